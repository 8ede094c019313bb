//! The SIMD vocabulary: instruction sets, their choice at run time, and what an algorithm is written in.
//!
//! An algorithm is written once, generic over `Simd`, as a `Kernel`; `Isa::run` compiles it once an instruction set
//! and runs the right one. The instruction set is chosen at the entry of an operation, by [`isa`], and passed down as a
//! value, so that one call never mixes two of them.

mod aligned;
pub(crate) mod floats;
pub(crate) mod math;
pub mod roofline;
mod scalar;
mod simd;
mod worker;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
pub(crate) mod product;

use std::cell::Cell;
use std::sync::OnceLock;

pub(crate) use aligned::Aligned;
pub(crate) use simd::{Kernel, Simd};
pub(crate) use worker::Worker;

use crate::{Error, Result};

/// The environment variable that forces an instruction set.
const VARIABLE: &str = "SLIMKV_ISA";

/// An instruction set that the CPU kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust; every machine.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX2 and AVX-VNNI (Intel's client processors since Alder Lake, Zen 5 and later).
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL, VBMI and VNNI (Ice Lake, Zen 4 and later).
    Avx512,
    /// AVX-512 and the AMX matrix unit for 8-bit integers (Sapphire Rapids and later, on Linux).
    Amx,
    /// NEON of 64-bit ARM.
    Neon,
}

impl Isa {
    /// Every instruction set, the plainest first.
    pub const ALL: [Isa; 6] = [Isa::Scalar, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Amx, Isa::Neon];

    /// The name that `SLIMKV_ISA` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
        }
    }

    /// Whether this machine has it, and if not, what is missing.
    pub fn available(self) -> std::result::Result<(), String> {
        let missing: Vec<&str> = self.features().into_iter().filter(|f| !f.1).map(|f| f.0).collect();
        if missing.is_empty() { Ok(()) } else { Err(format!("this processor lacks {}", missing.join(", "))) }
    }

    /// The instruction sets of this machine, the plainest first.
    pub fn here() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.available().is_ok()).collect()
    }

    /// What it needs, and whether it is there.
    fn features(self) -> Vec<(&'static str, bool)> {
        #[cfg(target_arch = "x86_64")]
        macro_rules! has {
            ($($name:tt),*) => { vec![$(($name, std::arch::is_x86_feature_detected!($name))),*] };
        }
        match self {
            Isa::Scalar => Vec::new(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => has!["avx2", "fma", "f16c"],
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => has!["avxvnni", "avx2", "fma", "f16c"],
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                has!["avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512vnni", "avx2", "fma", "f16c"]
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => {
                let mut features = Isa::Avx512.features();
                features.push(("AMX for 8-bit integers that the system allows", amx::available()));
                features
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 | Isa::Amx => vec![("the x86-64 architecture", false)],
            Isa::Neon => vec![("the 64-bit ARM architecture", cfg!(target_arch = "aarch64"))],
        }
    }

    /// Runs `kernel` compiled for this instruction set. The machine has it: [`isa`] and [`with_isa`] give out no other.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `isa` and `with_isa` checked that the machine has these features.
            Isa::Avx512 | Isa::Amx => unsafe { avx512::run(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx2 => unsafe { avx2::run(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::AvxVnni => unsafe { avx2::run_vnni(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: NEON is part of the architecture.
            Isa::Neon => unsafe { neon::run(kernel) },
            _ => scalar::run(kernel),
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

thread_local! {
    static OVERRIDE: Cell<Option<Isa>> = const { Cell::new(None) };
}

/// The instruction set of operations that start on this thread: the one that [`with_isa`] forces, or `SLIMKV_ISA`, or the
/// best of this machine.
///
/// An unknown name, or a set that this machine lacks, is an error with the reason.
pub fn isa() -> Result<Isa> {
    static CHOSEN: OnceLock<Result<Isa>> = OnceLock::new();
    match OVERRIDE.get() {
        Some(isa) => Ok(isa),
        None => CHOSEN.get_or_init(|| choose(std::env::var(VARIABLE).ok().as_deref())).clone(),
    }
}

fn choose(forced: Option<&str>) -> Result<Isa> {
    match forced {
        None | Some("") => Ok(Isa::ALL.into_iter().rev().find(|isa| isa.available().is_ok()).unwrap_or(Isa::Scalar)),
        Some(name) => match Isa::ALL.into_iter().find(|isa| isa.name() == name) {
            Some(isa) => check(isa).map(|()| isa),
            None => {
                Err(Error::Parse { what: VARIABLE, text: name.into(), expected: Isa::ALL.map(Isa::name).join(", ") })
            }
        },
    }
}

fn check(isa: Isa) -> Result<()> {
    isa.available().map_err(|reason| Error::DeviceUnavailable { device: format!("cpu ({VARIABLE}={isa})"), reason })
}

/// Runs `body` with every operation that it starts on this thread using `isa`, whatever `SLIMKV_ISA` says.
///
/// An instruction set that this machine lacks is an error.
pub fn with_isa<T>(isa: Isa, body: impl FnOnce() -> T) -> Result<T> {
    struct Restore(Option<Isa>);
    impl Drop for Restore {
        fn drop(&mut self) {
            OVERRIDE.set(self.0);
        }
    }
    check(isa)?;
    let _restore = Restore(OVERRIDE.replace(Some(isa)));
    Ok(body())
}

/// The processor's name and the instruction set in use.
pub fn name() -> String {
    let processor = processor_name().unwrap_or_else(|| format!("{} processor", std::env::consts::ARCH));
    match isa() {
        Ok(isa) => format!("{processor} ({isa})"),
        Err(why) => format!("{processor} ({why})"),
    }
}

#[cfg(target_arch = "x86_64")]
fn processor_name() -> Option<String> {
    use std::arch::x86_64::__cpuid;
    let leaf = |n| __cpuid(n);
    if leaf(0x8000_0000).eax < 0x8000_0004 {
        return None;
    }
    let registers = (0x8000_0002..=0x8000_0004u32).map(leaf).flat_map(|r| [r.eax, r.ebx, r.ecx, r.edx]);
    let bytes: Vec<u8> = registers.flat_map(u32::to_le_bytes).take_while(|&b| b != 0).collect();
    let text = String::from_utf8_lossy(&bytes).split_whitespace().collect::<Vec<_>>().join(" ");
    (!text.is_empty()).then_some(text)
}

#[cfg(not(target_arch = "x86_64"))]
fn processor_name() -> Option<String> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_known_ones() {
        let text = choose(Some("sse9")).unwrap_err().to_string();
        assert!(text.contains("sse9") && text.contains("scalar, avx2, avxvnni, avx512, amx, neon"), "{text}");
    }

    #[test]
    fn a_set_that_the_machine_lacks_is_an_error_with_the_reason() {
        let absent = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx2 };
        let text = choose(Some(absent.name())).unwrap_err().to_string();
        assert!(text.contains("architecture"), "{text}");
        assert!(with_isa(absent, || ()).is_err());
    }

    #[test]
    fn the_override_ends_with_its_body() {
        let before = isa().unwrap();
        assert_eq!(with_isa(Isa::Scalar, isa).unwrap().unwrap(), Isa::Scalar);
        assert_eq!(isa().unwrap(), before);
    }
}
