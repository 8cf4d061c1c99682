//! Work for a thread where nothing else waits: logs and metrics of background tasks.
//!
//! A subscriber or a recorder is code of the application. It may block for as long as a pipe is
//! full, and it may panic. A task that renews locks or receives messages must do neither.

use std::{
    collections::VecDeque,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use tokio::runtime::Handle;
use tracing::Dispatch;

use crate::{limits::MAX_QUEUED_REPORTS, sync::Mutex};

/// The jobs that wait, and at most one thread that runs them in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Background(Arc<Mutex<Queue>>);

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    has_worker: bool,
}

/// A job, and the subscriber that was current where it was made.
struct Job {
    run: Box<dyn FnOnce() + Send>,
    subscriber: Dispatch,
}

/// Runs the jobs. If it is dropped with its runtime, the next job starts another one.
struct Worker {
    queue: Arc<Mutex<Queue>>,
    is_done: bool,
}

impl Background {
    /// Runs the job later, on a thread of this runtime; at once without one. The job is dropped if
    /// too many wait already.
    pub(crate) fn run(&self, runtime: Option<&Handle>, job: impl FnOnce() + Send + 'static) {
        let job = Job { run: Box::new(job), subscriber: tracing::dispatcher::get_default(Clone::clone) };
        let mut queue = self.0.lock();
        // A job that does not fit is dropped after the mutex is unlocked: its subscriber may go
        // with it.
        let mut rest = Some(job);
        if queue.waiting.len() < MAX_QUEUED_REPORTS {
            queue.waiting.extend(rest.take());
        }
        let has_worker = std::mem::replace(&mut queue.has_worker, true);
        drop(queue);
        if has_worker {
            return;
        }
        let worker = Worker { queue: Arc::clone(&self.0), is_done: false };
        match runtime {
            // Not an async task: it would block a worker of the runtime.
            Some(runtime) => isolated(|| drop(runtime.spawn_blocking(move || worker.run()))),
            None => worker.run(),
        }
    }

    /// The same on the current runtime.
    #[cfg(any(feature = "__database", feature = "redis"))]
    pub(crate) fn log(&self, job: impl FnOnce() + Send + 'static) {
        self.run(Handle::try_current().ok().as_ref(), job);
    }
}

impl Worker {
    fn run(mut self) {
        loop {
            let mut queue = self.queue.lock();
            let Some(Job { run, subscriber }) = queue.waiting.pop_front() else {
                queue.has_worker = false;
                drop(queue);
                self.is_done = true;
                return;
            };
            drop(queue);
            isolated(|| tracing::dispatcher::with_default(&subscriber, run));
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.is_done {
            self.queue.lock().has_worker = false;
        }
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("waiting", &self.waiting.len()).finish_non_exhaustive()
    }
}

/// Runs code of the application. Its panic is reported by the panic hook and ends here, because
/// `Drop` comes here, too.
pub(crate) fn isolated(call: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(call)) {
        // The payload may panic when it is dropped.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(payload)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Panics again when it is dropped.
    struct PanicOnDrop;

    impl Drop for PanicOnDrop {
        fn drop(&mut self) {
            panic!("once more");
        }
    }

    #[test]
    fn panics_of_subscribers_and_recorders_are_contained() {
        isolated(|| panic!("a subscriber"));
        isolated(|| std::panic::panic_any(PanicOnDrop));
        struct CallsWhenDropped;
        impl Drop for CallsWhenDropped {
            fn drop(&mut self) {
                isolated(|| panic!("while its thread unwinds"));
            }
        }
        assert!(
            catch_unwind(|| {
                let _calls = CallsWhenDropped;
                panic!("a handler");
            })
            .is_err()
        );
    }
}
