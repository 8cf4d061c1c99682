//! A task of a store that runs for as long as its runtime. The next call on another runtime starts
//! another one.

use tokio::{runtime::Handle, task::AbortHandle};

use crate::sync::Mutex;

/// A task of a store.
#[derive(Debug, Default)]
pub(crate) struct Task(Mutex<Option<AbortHandle>>);

impl Task {
    /// Starts the task on this runtime, unless it runs.
    pub(crate) fn start<F: Future<Output = ()> + Send + 'static>(&self, run: impl FnOnce() -> F) {
        let mut task = self.0.lock();
        if task.as_ref().is_none_or(AbortHandle::is_finished)
            && let Ok(runtime) = Handle::try_current()
        {
            *task = Some(runtime.spawn(run()).abort_handle());
        }
    }

    pub(crate) fn stop(&self) {
        if let Some(task) = self.0.lock().take() {
            task.abort();
        }
    }
}
