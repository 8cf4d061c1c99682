//! The runtime of a thread, unless it is being shut down.
//!
//! A runtime that is shut down drops its tasks, and some of them go on in their `Drop`: a request
//! without a reply is repeated, a key is released. Tokio still reports that runtime as the current
//! one, but its timers panic. What follows from such a `Drop` therefore uses no runtime of this
//! thread.

use std::{cell::RefCell, collections::VecDeque};

use tokio::runtime::Handle;

type Ends = VecDeque<Box<dyn FnOnce()>>;

thread_local! {
    /// While a runtime is being shut down: the ends of tasks that were dropped meanwhile.
    static ENDS: RefCell<Option<Ends>> = const { RefCell::new(None) };
}

/// Runs what a panic of a waker has left.
struct Rest;

/// The runtime of this thread. `None`: there is none, or it is being shut down.
pub(crate) fn current() -> Option<Handle> {
    let is_ending = ENDS.try_with(|ends| ends.borrow().is_some()).unwrap_or(true);
    if is_ending { None } else { Handle::try_current().ok() }
}

/// Runs the end of a task that was dropped with its runtime. Each end may start a task that is
/// dropped at once: its own end runs after this one, and not deeper in the stack.
pub(crate) fn at_end(run: impl FnOnce() + 'static) {
    let mut run: Option<Box<dyn FnOnce()>> = Some(Box::new(run));
    let is_first = ENDS.try_with(|ends| {
        let mut ends = ends.borrow_mut();
        let is_first = ends.is_none();
        ends.get_or_insert_default().extend(run.take());
        is_first
    });
    match is_first {
        Ok(true) => {
            let _rest = Rest;
            run_all();
        }
        Ok(false) => {}
        // The thread ends, and has no runtime.
        Err(_) => run.into_iter().for_each(|run| run()),
    }
}

fn run_all() {
    while let Some(run) = ENDS.with_borrow_mut(|ends| ends.as_mut().and_then(VecDeque::pop_front)) {
        run();
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        run_all();
        ENDS.set(None);
    }
}
