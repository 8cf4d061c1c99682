//! Reports of background tasks, and the thread that logs and counts them.
//!
//! A subscriber or a recorder may block for as long as a pipe is full. A report is therefore queued
//! and processed on a thread where nothing else waits.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

#[cfg(any(feature = "tracing", feature = "metrics"))]
pub(crate) use self::queue::Reports;
#[cfg(not(any(feature = "tracing", feature = "metrics")))]
pub(crate) use super::noop::Reports;
use crate::{error::LockLost, store::StoreErrorKind};

/// An observation to log or to count.
#[derive(Debug)]
#[cfg_attr(
    not(all(feature = "tracing", feature = "metrics")),
    allow(dead_code, reason = "some are only logged, and some only counted")
)]
pub(crate) enum Report {
    /// A grant ended before its section was released.
    Lost { fence: u64, why: LockLost },
    /// A grant has not been renewed for two thirds of its lease.
    RenewalLate { fence: u64 },
    /// A grant was renewed with this much of its lease left.
    Renewed { margin: Duration },
    /// A call of the store failed or timed out.
    StoreFailed { operation: &'static str, kind: StoreErrorKind },
    /// The same with its reason, at most once in an interval.
    StoreWarning { operation: &'static str, suppressed: u64, reason: String },
    /// A handler was dropped with its client, because too many finish without theirs.
    HandlerDropped { suppressed: u64, max: usize, route: String },
    /// The last manager was dropped while keys are held.
    Abandoned { held: usize },
}

/// Runs code of the application. Its panic is reported by the panic hook and ends here, because
/// `Drop` comes here, too.
#[cfg_attr(not(any(feature = "tracing", feature = "metrics")), allow(dead_code, reason = "there is no such code"))]
pub(crate) fn isolated(call: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(call)) {
        // The payload may panic when it is dropped.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(payload)));
    }
}

#[cfg(any(feature = "tracing", feature = "metrics"))]
mod queue {
    use std::{collections::VecDeque, sync::Arc};

    use tokio::runtime::Handle;

    use super::{Report, isolated};
    use crate::{limits::MAX_QUEUED_REPORTS, sync::Mutex};

    /// The reports that wait, and at most one thread that processes them.
    #[derive(Debug, Default)]
    pub(crate) struct Reports(Arc<Mutex<Queue>>);

    #[derive(Debug, Default)]
    struct Queue {
        waiting: VecDeque<Addressed>,
        has_worker: bool,
    }

    /// A report, and the subscriber that was current where it was made.
    #[derive(Debug)]
    struct Addressed {
        report: Report,
        #[cfg(feature = "tracing")]
        subscriber: tracing::Dispatch,
    }

    /// Processes the queue. If it is dropped with its runtime, the next report starts another one.
    struct Worker {
        queue: Arc<Mutex<Queue>>,
        is_done: bool,
    }

    impl Reports {
        /// Queues a report. It is dropped if too many wait already.
        pub(crate) fn send(&self, report: Report, runtime: Option<&Handle>) {
            let report = Addressed {
                report,
                #[cfg(feature = "tracing")]
                subscriber: tracing::dispatcher::get_default(Clone::clone),
            };
            let mut queue = self.0.lock();
            // A report that does not fit is dropped after the mutex is unlocked: its subscriber may
            // go with it.
            let mut rest = Some(report);
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
    }

    impl Worker {
        fn run(mut self) {
            loop {
                let mut queue = self.queue.lock();
                let Some(next) = queue.waiting.pop_front() else {
                    queue.has_worker = false;
                    drop(queue);
                    self.is_done = true;
                    return;
                };
                drop(queue);
                next.process();
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

    impl Addressed {
        fn process(self) {
            #[cfg(feature = "metrics")]
            isolated(|| crate::telemetry::metrics::record(&self.report));
            #[cfg(feature = "tracing")]
            isolated(|| {
                tracing::dispatcher::with_default(&self.subscriber, || crate::telemetry::log::write(&self.report));
            });
        }
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
