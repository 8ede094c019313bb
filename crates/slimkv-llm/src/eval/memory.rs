//! The peak of the process's resident memory, where the system counts it.

/// Starts counting the peak anew from what is resident now.
pub(super) fn reset_peak() {
    // Where this is not Linux, or not allowed, the peak is that of the whole life of the process.
    #[cfg(target_os = "linux")]
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The peak in bytes.
#[cfg(target_os = "linux")]
pub(super) fn peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The peak in bytes.
#[cfg(not(target_os = "linux"))]
pub(super) fn peak() -> Option<u64> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn a_large_allocation_shows() {
        super::reset_peak();
        let before = super::peak().unwrap();
        let block = std::hint::black_box(vec![1u8; 64 << 20]);
        let after = super::peak().unwrap();
        drop(block);
        assert!(after >= before.saturating_sub(8 << 20) + (56 << 20), "{before} {after}");
    }
}
