//! Plain rows on the CPU.
