//! A future that starts where it is made.
//!
//! A call to a server is written in the poll of its caller: a task for it would be moved to another
//! worker of the runtime, and back. The rest of the call runs in a task.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Wake, Waker},
};

use tokio::runtime::Handle;

use crate::sync::Mutex;

type Boxed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Becomes a task of the runtime when it is woken.
struct Unstarted {
    runtime: Handle,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_woken: bool,
    /// From the end of the first poll until it is woken.
    waiting: Option<Boxed>,
}

/// Polls a future once. The rest runs in a task of this runtime. If the runtime has stopped, the
/// future is dropped.
pub(crate) fn poll_and_spawn(future: impl Future<Output = ()> + Send + 'static, runtime: &Handle) {
    let mut future: Boxed = Box::pin(future);
    let unstarted = Arc::new(Unstarted { runtime: runtime.clone(), state: Mutex::default() });
    let waker = Waker::from(Arc::clone(&unstarted));
    if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
        return;
    }
    let mut state = unstarted.state.lock();
    if state.is_woken {
        // Not under the mutex: a runtime that has stopped drops the future, which may wake it.
        drop(state);
        runtime.spawn(future);
    } else {
        state.waiting = Some(future);
    }
}

impl Wake for Unstarted {
    fn wake(self: Arc<Self>) {
        let mut state = self.state.lock();
        state.is_woken = true;
        let woken = state.waiting.take();
        drop(state);
        if let Some(future) = woken {
            self.runtime.spawn(future);
        }
    }
}
