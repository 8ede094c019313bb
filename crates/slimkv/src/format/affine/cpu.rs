//! Group-affine rows on the CPU.
