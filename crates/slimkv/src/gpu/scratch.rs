//! Scratch memory whose words say themselves whether they were written.
//!
//! A unit that reads what another cube wrote in the same launch needs a fence between, and CubeCL has none for a whole
//! device. So nothing but single words is relied on: all are [`VACANT`] when a launch begins, they are written and read
//! as atomics, and a reader asks again until something else is there; in the end it leaves them vacant. NCCL's
//! low-latency protocol rests on the same idea.

use std::cell::RefCell;
use std::sync::Arc;

use cubecl::prelude::*;

use super::{Buffer, Gpu, fill, with_client};
use crate::Result;

/// A word that holds nothing: two floats that [`put`] never writes.
pub(crate) const VACANT: u64 = u64::MAX;

/// Scratch memory of at most so many bytes is kept from one call of a thread to the next.
const KEPT: usize = 4 << 20;

thread_local! {
    /// One for each GPU that this thread used. Launches of a thread run in order, those of two threads need not.
    static SCRATCH: RefCell<Vec<Buffer>> = const { RefCell::new(Vec::new()) };
}

impl Gpu {
    /// At least `bytes` of words that are all [`VACANT`]. Launches must leave them so.
    pub(crate) fn vacant(&self, op: &'static str, bytes: usize) -> Result<Buffer> {
        SCRATCH.with_borrow_mut(|all| {
            let mine = |buffer: &Buffer| Arc::ptr_eq(&buffer.gpu().0, &self.0);
            if let Some(kept) = all.iter().find(|buffer| mine(buffer) && buffer.len() >= bytes) {
                return Ok(kept.clone());
            }
            // A power of two, so that a cache that grows does not ask for more at every step.
            let wanted = if bytes <= KEPT { bytes.next_power_of_two() } else { bytes };
            let buffer = self.empty(op, wanted)?;
            with_client!(self, client => fill(client, buffer.handle(), buffer.words(), u32::MAX));
            if bytes <= KEPT {
                all.retain(|buffer| !mine(buffer));
                all.push(buffer.clone());
            }
            Ok(buffer)
        })
    }
}

/// Writes two floats to a vacant word.
#[cube]
pub(crate) fn put(words: &mut Array<Atomic<u64>>, at: u32, first: f32, second: f32) {
    let mut low = u32::reinterpret(first);
    let high = u32::reinterpret(second);
    if low == u32::MAX && high == u32::MAX {
        // Two NaNs, of which one becomes another.
        low = 0x7FFF_FFFFu32;
    }
    words[at as usize].store(u64::cast_from(low) | (u64::cast_from(high) << 32u64));
}

/// Reads a word that is on its way, and leaves it there.
#[cube]
pub(crate) fn get(words: &Array<Atomic<u64>>, at: u32) -> u64 {
    let mut word = words[at as usize].load();
    while word == VACANT {
        word = words[at as usize].load();
    }
    word
}

/// The first float of a word.
#[cube]
pub(crate) fn first_of(word: u64) -> f32 {
    f32::reinterpret(u32::cast_from(word))
}

/// The second float of a word.
#[cube]
pub(crate) fn second_of(word: u64) -> f32 {
    f32::reinterpret(u32::cast_from(word >> 32u64))
}
