//! The runtime of a thread, unless it is being shut down.
//!
//! A runtime that is shut down drops its tasks, and some of them go on in their `Drop`: a request
//! without a reply is repeated, a key is released. Tokio still reports that runtime as the current
//! one, but its timers panic. What follows from such a `Drop` therefore uses no runtime of this
//! thread.

use std::cell::Cell;

use tokio::runtime::Handle;

thread_local! {
    static IS_ENDING: Cell<bool> = const { Cell::new(false) };
}

/// The runtime of this thread. `None`: there is none, or it is being shut down.
pub(crate) fn current() -> Option<Handle> {
    if IS_ENDING.get() { None } else { Handle::try_current().ok() }
}

/// Runs the end of a task that was dropped with its runtime.
pub(crate) fn at_end<T>(run: impl FnOnce() -> T) -> T {
    // Also after a panic of a waker.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IS_ENDING.set(self.0);
        }
    }
    let _restore = Restore(IS_ENDING.replace(true));
    run()
}
