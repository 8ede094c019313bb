//! How much memory the machine has, and how much of it this process used.

/// The machine's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// Installed bytes.
    pub total_bytes: u64,
    /// Bytes that programs can still get without swapping, where the system says so.
    pub available_bytes: Option<u64>,
}

/// The machine's memory; `None` where it cannot be asked.
pub fn machine() -> Option<Memory> {
    #[cfg(target_os = "linux")]
    {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let total_bytes = kib_field(&text, "MemTotal:")?;
        let mut available = kib_field(&text, "MemAvailable:");
        // A container may have less than the machine.
        if let Some(limit) = cgroup_limit() {
            available = available.map(|a| a.min(limit));
        }
        Some(Memory { total_bytes, available_bytes: available })
    }
    #[cfg(target_os = "macos")]
    {
        let mut total_bytes = 0u64;
        let mut size = std::mem::size_of::<u64>();
        // SAFETY: the name is NUL-terminated, and `size` is the size of the integer that the result is written to.
        let status = unsafe {
            let place = (&raw mut total_bytes).cast();
            libc::sysctlbyname(c"hw.memsize".as_ptr(), place, &mut size, std::ptr::null_mut(), 0)
        };
        (status == 0).then_some(Memory { total_bytes, available_bytes: None })
    }
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    None
}

/// The largest resident set that this process has had, in bytes; 0 where the system does not say.
pub fn peak_rss() -> u64 {
    #[cfg(target_os = "linux")]
    {
        // Not getrusage: its maximum survives exec, so a child would report what its parent used.
        std::fs::read_to_string("/proc/self/status").ok().and_then(|text| kib_field(&text, "VmHWM:")).unwrap_or(0)
    }
    #[cfg(target_os = "macos")]
    {
        // SAFETY: an all-zero rusage is valid, and getrusage only writes to it.
        unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            if libc::getrusage(libc::RUSAGE_SELF, &mut usage) == 0 { usage.ru_maxrss as u64 } else { 0 }
        }
    }
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    0
}

#[cfg(target_os = "linux")]
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(target_os = "linux")]
fn cgroup_limit() -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok();
    read("memory.max").map(|max| max.saturating_sub(read("memory.current").unwrap_or(0)))
}
