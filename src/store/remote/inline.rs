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

enum State {
    /// In its first poll.
    Polled {
        is_woken: bool,
    },
    Waiting(Boxed),
    /// It has ended, or is a task.
    Gone,
}

/// Polls a future once. The rest runs in a task of this runtime. If the runtime has stopped, the
/// future is dropped.
pub(crate) fn poll_and_spawn(future: impl Future<Output = ()> + Send + 'static, runtime: &Handle) {
    let mut future: Boxed = Box::pin(future);
    let unstarted =
        Arc::new(Unstarted { runtime: runtime.clone(), state: Mutex::new(State::Polled { is_woken: false }) });
    let waker = Waker::from(Arc::clone(&unstarted));
    let is_ready = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
    let mut state = unstarted.state.lock();
    let (next, spawned) = match *state {
        _ if is_ready => (State::Gone, None),
        State::Polled { is_woken: true } => (State::Gone, Some(future)),
        _ => (State::Waiting(future), None),
    };
    *state = next;
    drop(state);
    if let Some(future) = spawned {
        runtime.spawn(future);
    }
}

impl Wake for Unstarted {
    fn wake(self: Arc<Self>) {
        let mut state = self.state.lock();
        let woken = match &mut *state {
            State::Polled { is_woken } => {
                *is_woken = true;
                return;
            }
            State::Waiting(_) | State::Gone => std::mem::replace(&mut *state, State::Gone),
        };
        drop(state);
        if let State::Waiting(future) = woken {
            self.runtime.spawn(future);
        }
    }
}
