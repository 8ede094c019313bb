//! Advanced Matrix Extensions: 16 x 64 byte tiles, and the product of two of them in 16 cycles.
//!
//! Stable Rust has no intrinsics for them, so the instructions are written out. Tiles 0 to 3 are sums, 4 and 5 left and 6
//! and 7 right operands: a product takes 52 cycles but one can start every 16, so four sums are worked on at a time.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use super::product::{Steps, Sums};

/// Whether the processor has the instructions and the system lets this process use them.
pub(super) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        const TILE_AND_INT8: u32 = 1 << 24 | 1 << 25;
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_AND_INT8 == TILE_AND_INT8 && permitted()
    })
}

/// Linux saves the large tile state only for processes that ask for it.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_STATE_PERMISSION: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: i64;
    // SAFETY: `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)` touches no memory of the process.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") REQUEST_STATE_PERMISSION,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The tile registers, configured on this thread until it is dropped.
pub(super) struct Tiles(());

#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    column_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Tiles {
    /// Configures all tiles at their full size.
    ///
    /// # Safety
    ///
    /// [`available`] is true.
    pub unsafe fn new() -> Self {
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], column_bytes: [0; 16], rows: [0; 16] };
        config.column_bytes[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: the configuration is valid: palette 1, at most 16 rows of 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
        Tiles(())
    }

    /// `sums[i] = sum over j of left[i][j] * right[i][j]` for four `i` and `steps` `j`; the left operand is unsigned and
    /// the right one signed.
    ///
    /// # Safety
    ///
    /// This is the thread that configured the tiles.
    #[inline(always)]
    pub unsafe fn unsigned_signed(&self, left: [Steps; 4], right: [Steps; 4], steps: usize, sums: &mut [Sums; 4]) {
        // SAFETY: tiles are 16 rows of 64 bytes, as configured.
        unsafe {
            self.zero();
            for j in 0..steps {
                asm!(
                    "tileloadd tmm4, [{l0} + {stride}]",
                    "tileloadd tmm6, [{r0} + {stride}]",
                    "tdpbusd tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{l1} + {stride}]",
                    "tileloadd tmm7, [{r1} + {stride}]",
                    "tdpbusd tmm1, tmm5, tmm7",
                    "tileloadd tmm4, [{l2} + {stride}]",
                    "tileloadd tmm6, [{r2} + {stride}]",
                    "tdpbusd tmm2, tmm4, tmm6",
                    "tileloadd tmm5, [{l3} + {stride}]",
                    "tileloadd tmm7, [{r3} + {stride}]",
                    "tdpbusd tmm3, tmm5, tmm7",
                    l0 = in(reg) left[0].at(j), l1 = in(reg) left[1].at(j),
                    l2 = in(reg) left[2].at(j), l3 = in(reg) left[3].at(j),
                    r0 = in(reg) right[0].at(j), r1 = in(reg) right[1].at(j),
                    r2 = in(reg) right[2].at(j), r3 = in(reg) right[3].at(j),
                    stride = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly),
                );
            }
            self.store(sums);
        }
    }

    /// As [`unsigned_signed`](Self::unsigned_signed) with a signed left and an unsigned right operand.
    ///
    /// # Safety
    ///
    /// As there.
    #[inline(always)]
    pub unsafe fn signed_unsigned(&self, left: [Steps; 4], right: [Steps; 4], steps: usize, sums: &mut [Sums; 4]) {
        // SAFETY: as above.
        unsafe {
            self.zero();
            for j in 0..steps {
                asm!(
                    "tileloadd tmm4, [{l0} + {stride}]",
                    "tileloadd tmm6, [{r0} + {stride}]",
                    "tdpbsud tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{l1} + {stride}]",
                    "tileloadd tmm7, [{r1} + {stride}]",
                    "tdpbsud tmm1, tmm5, tmm7",
                    "tileloadd tmm4, [{l2} + {stride}]",
                    "tileloadd tmm6, [{r2} + {stride}]",
                    "tdpbsud tmm2, tmm4, tmm6",
                    "tileloadd tmm5, [{l3} + {stride}]",
                    "tileloadd tmm7, [{r3} + {stride}]",
                    "tdpbsud tmm3, tmm5, tmm7",
                    l0 = in(reg) left[0].at(j), l1 = in(reg) left[1].at(j),
                    l2 = in(reg) left[2].at(j), l3 = in(reg) left[3].at(j),
                    r0 = in(reg) right[0].at(j), r1 = in(reg) right[1].at(j),
                    r2 = in(reg) right[2].at(j), r3 = in(reg) right[3].at(j),
                    stride = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly),
                );
            }
            self.store(sums);
        }
    }

    /// One product that nobody reads: the sums are zeroed before they are used.
    #[inline(always)]
    pub fn stay_awake(&self) {
        // SAFETY: all tiles are configured on this thread, as a session is not sent to another.
        unsafe {
            asm!("tdpbusd tmm3, tmm4, tmm6", out("tmm3") _, options(nostack, nomem));
        }
    }

    /// # Safety
    ///
    /// `self` proves that the tiles are configured.
    #[inline(always)]
    unsafe fn zero(&self) {
        // SAFETY: zeroing configured tiles touches no memory.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem),
            );
        }
    }

    /// # Safety
    ///
    /// As for [`zero`](Self::zero).
    #[inline(always)]
    unsafe fn store(&self, sums: &mut [Sums; 4]) {
        // SAFETY: each of the four is 16 rows of 64 bytes.
        unsafe {
            asm!(
                "tilestored [{sums} + {stride}], tmm0",
                "tilestored [{sums} + {stride} + 1024], tmm1",
                "tilestored [{sums} + {stride} + 2048], tmm2",
                "tilestored [{sums} + {stride} + 3072], tmm3",
                sums = in(reg) sums,
                stride = in(reg) 64usize,
                options(nostack),
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: releasing the tiles has no precondition where AMX is there.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}
