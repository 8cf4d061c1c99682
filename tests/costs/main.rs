//! Bounds of allocations and of bytes: counts, which do not depend on the machine.
//!
//! A bound of a layer is what the layer adds to the same lock without HTTP, which has bounds of its
//! own. The counts are the same with each set of features, unless a test says otherwise.

mod layers;
mod locks;

use std::{
    future::IntoFuture,
    ops::Sub,
    pin::pin,
    task::{Context, Poll, Waker},
};

use allocation_counter::measure;
use tokio::runtime::{Builder, Runtime};

/// What one call allocates on its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    allocations: u64,
    bytes: u64,
}

impl Cost {
    /// Counts a call that was made before. A shared table that grows meanwhile does not count.
    fn of(mut call: impl FnMut()) -> Self {
        call();
        let calls = (0..32).map(|_| measure(&mut call));
        calls.map(|count| Self { allocations: count.count_total, bytes: count.bytes_total }).min().expect("some calls")
    }

    #[track_caller]
    fn is_at_most(self, allocations: u64, bytes: u64) {
        println!("{self:?}");
        assert!(
            self.allocations <= allocations && self.bytes <= bytes,
            "{self:?}: at most {allocations} allocations and {bytes} bytes are allowed",
        );
    }
}

impl Sub for Cost {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { allocations: self.allocations - other.allocations, bytes: self.bytes - other.bytes }
    }
}

/// Polls once, without a scheduler, whose allocations would count.
fn now<F: IntoFuture>(future: F) -> F::Output {
    let future = pin!(future.into_future());
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("not ready, in memory and without contention"),
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().build().expect("a runtime")
}
