//! Advanced Matrix Extensions: 16 x 64 byte tiles, and the product of two of them in 16 cycles.
//!
//! Stable Rust has no intrinsics for them, so the instructions are written out. The tiles that are used:
//!
//! ```text
//! 0, 1  sums over values      2  weights (as many rows as sums)    3  codes of values
//! 4     scores                5  codes of keys                     6  queries
//! ```

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use super::product::{Codes, Sums};

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
pub(crate) struct Session(());

#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    column_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Session {
    /// Configures the tiles; sums over values have `rows` rows.
    ///
    /// # Safety
    ///
    /// [`available`] is true.
    pub unsafe fn new(rows: usize) -> Self {
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], column_bytes: [0; 16], rows: [0; 16] };
        config.column_bytes[..7].fill(64);
        config.rows[..7].fill(16);
        config.rows[..3].fill(rows.clamp(1, 16) as u8);
        // SAFETY: the configuration is valid: palette 1, at most 16 rows of 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
        Session(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: releasing the tiles has no precondition where AMX is there.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}

/// `scores = keys * queries`; codes are unsigned, queries signed.
///
/// # Safety
///
/// A [`Session`] is alive on this thread, and there are as many tiles of queries as of keys.
#[inline(always)]
pub(super) unsafe fn scores(keys: &[Codes], queries: &[Codes], scores: &mut Sums) {
    // SAFETY: tiles are 16 rows of 64 bytes, as configured.
    unsafe {
        asm!("tilezero tmm4", out("tmm4") _, options(nostack, nomem));
        for (key, query) in keys.iter().zip(queries) {
            asm!(
                "tileloadd tmm5, [{key} + {stride}]",
                "tileloadd tmm6, [{query} + {stride}]",
                "tdpbusd tmm4, tmm5, tmm6",
                key = in(reg) key,
                query = in(reg) query,
                stride = in(reg) 64usize,
                out("tmm4") _, out("tmm5") _, out("tmm6") _,
                options(nostack, readonly),
            );
        }
        asm!(
            "tilestored [{sums} + {stride}], tmm4",
            sums = in(reg) scores,
            stride = in(reg) 64usize,
            options(nostack),
        );
    }
}

/// Two tiles of `sums = weights * codes`; weights are signed, codes unsigned. Step `i` of the codes of tile `j` is
/// `codes[i * step + j]`.
///
/// # Safety
///
/// As for [`scores`]; every such index is inside `codes`.
#[inline(always)]
pub(super) unsafe fn sums(weights: &[Codes], codes: *const Codes, step: usize, sums: &mut [Sums; 2]) {
    // SAFETY: as above; weights and sums have as many rows as were configured, at most 16.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", out("tmm0") _, out("tmm1") _, options(nostack, nomem));
        for (i, weights) in weights.iter().enumerate() {
            let codes = codes.add(i * step);
            asm!(
                "tileloadd tmm2, [{weights} + {stride}]",
                "tileloadd tmm3, [{codes} + {stride}]",
                "tdpbsud tmm0, tmm2, tmm3",
                "tileloadd tmm3, [{codes} + {stride} + 1024]",
                "tdpbsud tmm1, tmm2, tmm3",
                weights = in(reg) weights,
                codes = in(reg) codes,
                stride = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, readonly),
            );
        }
        asm!(
            "tilestored [{sums} + {stride}], tmm0",
            "tilestored [{sums} + {stride} + 1024], tmm1",
            sums = in(reg) sums,
            stride = in(reg) 64usize,
            options(nostack),
        );
    }
}
