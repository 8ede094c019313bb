//! What one thread works with.

use super::Isa;

/// The instruction set, and the matrix unit where it has one, configured on this thread until this is dropped.
///
/// Not `Send`: tile registers belong to a thread. One thread has at most one.
pub(crate) struct Worker {
    isa: Isa,
    #[cfg(target_arch = "x86_64")]
    tiles: Option<super::amx::Tiles>,
    on_this_thread: std::marker::PhantomData<*const ()>,
}

impl Worker {
    /// Gets ready on this thread.
    pub fn new(isa: Isa) -> Self {
        Worker {
            isa,
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `cpu::isa` and `cpu::with_isa` give out `Amx` only where it is there.
            tiles: (isa == Isa::Amx).then(|| unsafe { super::amx::Tiles::new() }),
            on_this_thread: std::marker::PhantomData,
        }
    }

    /// The instruction set.
    #[inline(always)]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Keeps the matrix unit awake, if there is one: it sleeps after somewhat more than 500 cycles without a product, and
    /// takes about 700 to wake. To be called every few hundred instructions between products; more often would wait, as each
    /// call takes 52 cycles after the one before.
    #[inline(always)]
    pub fn stay_awake(&self) {
        #[cfg(target_arch = "x86_64")]
        if let Some(tiles) = &self.tiles {
            tiles.stay_awake();
        }
    }

    /// The matrix unit.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn tiles(&self) -> Option<&super::amx::Tiles> {
        self.tiles.as_ref()
    }
}
