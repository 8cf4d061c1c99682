//! Reports of background tasks, and the thread that logs and counts them.
//!
//! A subscriber or a recorder may block for as long as a pipe is full. A report is therefore queued
//! and processed on a thread where nothing else waits.

#[cfg(any(feature = "tracing", feature = "metrics"))]
pub(crate) use self::queue::Reports;
#[cfg(not(any(feature = "tracing", feature = "metrics")))]
pub(crate) use super::noop::Reports;
#[cfg(any(feature = "tracing", feature = "metrics"))]
mod queue {
    use std::{collections::VecDeque, sync::Arc};

    use tokio::runtime::Handle;

    use crate::{
        limits::MAX_QUEUED_REPORTS,
        sync::Mutex,
        telemetry::{isolated::isolated, report::Report},
    };

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
