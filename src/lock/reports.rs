//! What those who operate the service are told from the background: the log, and what is counted there.
//!
//! A subscriber and a recorder are code of others. They may call these locks, panic, or block for as long as a pipe is full. So nothing is
//! told under a mutex, a panic ends where it began, and what no request asked for is told on a thread where nothing else waits.

use std::panic::{AssertUnwindSafe, catch_unwind};

#[cfg(not(any(feature = "tracing", feature = "metrics")))]
pub(super) use self::disabled::Reports;
#[cfg(any(feature = "tracing", feature = "metrics"))]
pub(super) use self::enabled::Reports;
use crate::{error::LockLost, store::StoreErrorKind};

/// One thing to tell.
#[derive(Debug)]
#[cfg_attr(not(all(feature = "tracing", feature = "metrics")), allow(dead_code, reason = "not all of it is told"))]
pub(super) enum Report {
    /// A grant is over before its section was.
    Lost { fence: u64, why: LockLost },
    /// A grant is about to be.
    Late { fence: u64 },
    /// With how much of its lease left a grant was renewed.
    Renewed(std::time::Duration),
    /// A call of the store had no answer.
    StoreFailed { operation: &'static str, kind: StoreErrorKind },
    /// The same in words, now and then.
    StoreComplaint { operation: &'static str, left_out: u64, reason: String },
    /// A handler was dropped with its client, because too many finish alone.
    Dropped { left_out: u64, max: usize, route: String },
    /// The last handle was dropped, and keys are held.
    Abandoned { held: usize },
}

/// Tells something by code of others. A panic of theirs is shown by the panic hook, and changes nothing here: `Drop` tells, too.
#[cfg_attr(not(any(feature = "tracing", feature = "metrics")), allow(dead_code, reason = "nothing is told"))]
pub(crate) fn quietly(tell: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(tell)) {
        // What was thrown may throw when it is dropped.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(payload)));
    }
}

#[cfg(any(feature = "tracing", feature = "metrics"))]
mod enabled {
    use std::{collections::VecDeque, sync::Arc};

    use tokio::runtime::Handle;

    use super::{Report, quietly};
    use crate::{limits::MAX_QUEUED_REPORTS, sync::Mutex};

    /// What waits to be told, and one thread at the most that tells it.
    #[derive(Debug, Default)]
    pub(in crate::lock) struct Reports(Arc<Mutex<Queue>>);

    #[derive(Debug, Default)]
    struct Queue {
        waiting: VecDeque<Addressed>,
        is_told: bool,
    }

    /// A report, and the subscriber of where it was made.
    #[derive(Debug)]
    struct Addressed {
        report: Report,
        #[cfg(feature = "tracing")]
        to: tracing::Dispatch,
    }

    /// Tells what waits. If it is dropped before, with its runtime, the next report starts another one.
    struct Teller {
        queue: Arc<Mutex<Queue>>,
        is_done: bool,
    }

    impl Reports {
        /// Tells it soon. What is told so slowly that too much waits is not told.
        pub(in crate::lock) fn send(&self, report: Report, runtime: Option<&Handle>) {
            let report = Addressed {
                report,
                #[cfg(feature = "tracing")]
                to: tracing::dispatcher::get_default(Clone::clone),
            };
            let mut queue = self.0.lock();
            // What has no room is dropped when the mutex is free: its subscriber may go with it.
            let mut left_out = Some(report);
            if queue.waiting.len() < MAX_QUEUED_REPORTS {
                queue.waiting.extend(left_out.take());
            }
            let is_told = std::mem::replace(&mut queue.is_told, true);
            drop(queue);
            if is_told {
                return;
            }
            let teller = Teller { queue: Arc::clone(&self.0), is_done: false };
            match runtime {
                // A task would take a worker with it that blocks, and whatever that worker was about to run.
                Some(runtime) => quietly(|| drop(runtime.spawn_blocking(move || teller.run()))),
                None => teller.run(),
            }
        }
    }

    impl Teller {
        fn run(mut self) {
            loop {
                let mut queue = self.queue.lock();
                let Some(next) = queue.waiting.pop_front() else {
                    queue.is_told = false;
                    drop(queue);
                    self.is_done = true;
                    return;
                };
                drop(queue);
                next.tell();
            }
        }
    }

    impl Drop for Teller {
        fn drop(&mut self) {
            if !self.is_done {
                self.queue.lock().is_told = false;
            }
        }
    }

    impl Addressed {
        fn tell(self) {
            #[cfg(feature = "metrics")]
            quietly(|| crate::lock::metrics::report(&self.report));
            #[cfg(feature = "tracing")]
            quietly(|| tracing::dispatcher::with_default(&self.to, || crate::lock::complaints::report(&self.report)));
        }
    }
}

#[cfg(not(any(feature = "tracing", feature = "metrics")))]
mod disabled {
    use tokio::runtime::Handle;

    use super::Report;

    #[derive(Debug, Default)]
    pub(in crate::lock) struct Reports(());

    impl Reports {
        #[expect(clippy::unused_self, reason = "the same call as with a feature")]
        pub(in crate::lock) fn send(&self, _: Report, _: Option<&Handle>) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is thrown may throw once more when it is dropped.
    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("once more");
        }
    }

    #[test]
    fn what_panics_while_it_is_told_ends_there() {
        quietly(|| panic!("a subscriber"));
        quietly(|| std::panic::panic_any(Bomb));
        struct Tells;
        impl Drop for Tells {
            fn drop(&mut self) {
                quietly(|| panic!("while its thread unwinds"));
            }
        }
        assert!(
            catch_unwind(|| {
                let _tells = Tells;
                panic!("a handler");
            })
            .is_err()
        );
    }
}
