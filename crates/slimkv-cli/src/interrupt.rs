//! Ctrl-C: what is half written goes, and the exit code is 130.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use crate::failure::{Failure, Outcome};
use crate::output;

static STOP: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
/// Pieces of work that look at `STOP` themselves.
static LOOKING: AtomicUsize = AtomicUsize::new(0);

/// Starts to watch for Ctrl-C and for a request to terminate.
pub fn watch() -> Outcome {
    ctrlc::set_handler(|| {
        // The second time, or where nobody looks, the program ends here and now.
        let already = STOP.swap(true, Ordering::SeqCst);
        if already || LOOKING.load(Ordering::SeqCst) == 0 {
            output::remove_unfinished();
            std::process::exit(130);
        }
    })
    .map_err(|e| Failure::Failed(format!("cannot watch for Ctrl-C: {e}")))
}

/// Runs work that ends soon after the flag turns true, and cleans up after itself.
pub fn watched<T>(work: impl FnOnce(Arc<AtomicBool>) -> T) -> T {
    struct Look;
    impl Drop for Look {
        fn drop(&mut self) {
            LOOKING.fetch_sub(1, Ordering::SeqCst);
        }
    }
    LOOKING.fetch_add(1, Ordering::SeqCst);
    let _look = Look;
    work(STOP.clone())
}

/// An error once Ctrl-C was pressed.
pub fn check() -> Outcome {
    if STOP.load(Ordering::SeqCst) { Err(Failure::Interrupted) } else { Ok(()) }
}
