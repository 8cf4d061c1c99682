//! Tests of the socket and of calls that start in place, under many thread schedules.
//!
//! ```sh
//! RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/shuttle.sh cargo test --lib shuttle_tests --features redis
//! ```

use std::{
    future::poll_fn,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Waker},
};

use deadpool_redis::redis::Value;
use shuttle::{future::block_on, thread};
use tokio::runtime::{Builder, Handle};

use super::{ReaderTask, Socket, tests::wire::Wire};
use crate::{
    store::remote::inline::poll_and_spawn,
    sync::{oneshot::Oneshot, schedules::check},
};

const CALLERS: usize = 3;

/// A socket whose reader is driven by the test.
fn open(wire: &Wire) -> (Socket, impl Future<Output = ()> + Send + 'static) {
    let (state, reader) = Socket::parts(Box::new(wire.clone()), None);
    let task = Handle::current().spawn(async {}).abort_handle();
    (Socket { state, reader: Arc::new(ReaderTask(task)) }, reader)
}

fn text(caller: usize) -> String {
    // Longer than the server accepts at once.
    format!("{caller:0150}")
}

/// Callers, one of which leaves, and a server. The reader and the caller race for the socket.
#[test]
fn each_call_gets_its_reply() {
    check(|| {
        let wire = Wire::default();
        let (socket, reader) = open(&wire);
        let reader = thread::spawn(move || block_on(reader));
        let server = wire.clone();
        let server = thread::spawn(move || {
            let mut replies = 0;
            while replies <= CALLERS {
                block_on(poll_fn(|cx| server.poll_written(cx)));
                replies += server.serve();
            }
        });
        let mut callers: Vec<_> = (0..CALLERS)
            .map(|caller| {
                let socket = socket.clone();
                thread::spawn(move || {
                    let reply = block_on(socket.call(&[Wire::echo(&text(caller))])).expect("a reply");
                    assert_eq!(reply, Value::BulkString(text(caller).into()));
                })
            })
            .collect();
        callers.push(thread::spawn(move || {
            let commands = [Wire::echo("gone")];
            let mut gone = pin!(socket.call(&commands));
            let _ = gone.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }));
        callers.into_iter().chain([server]).for_each(|thread| thread.join().expect("no panic"));
        wire.close();
        reader.join().expect("no panic");
    });
}

/// The connection ends beside calls: each of them ends, with its reply or with an error.
#[test]
fn no_call_outlives_the_connection() {
    for is_read in [false, true] {
        check(move || {
            let wire = Wire::default();
            let (socket, reader) = open(&wire);
            // Without a task that reads, its runtime has ended.
            let reader = thread::spawn(move || if is_read { block_on(reader) } else { drop(reader) });
            let callers: Vec<_> = (0..CALLERS)
                .map(|caller| {
                    let socket = socket.clone();
                    thread::spawn(move || block_on(socket.call(&[Wire::echo(&text(caller))])))
                })
                .collect();
            let waiter = thread::spawn(move || block_on(socket.ended()));
            wire.serve();
            wire.close();
            for (caller, thread) in callers.into_iter().enumerate() {
                if let Ok(reply) = thread.join().expect("no panic") {
                    assert_eq!(reply, Value::BulkString(text(caller).into()));
                }
            }
            waiter.join().expect("no panic");
            reader.join().expect("no panic");
        });
    }
}

/// The future is woken in its first poll, or after it, by one thread or by two.
#[test]
fn woken_future_becomes_one_task() {
    check(|| {
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        let (reply, ends) = (Arc::new(Oneshot::default()), Arc::new(AtomicUsize::new(0)));
        let wakers: Vec<_> = (0..2)
            .map(|number| {
                let reply = Arc::clone(&reply);
                thread::spawn(move || if number == 0 { reply.send(()).expect("it waits") } else { reply.wake() })
            })
            .collect();
        let ended = Arc::clone(&ends);
        let future = async move {
            poll_fn(|cx| reply.poll_recv(cx)).await;
            ended.fetch_add(1, SeqCst);
        };
        poll_and_spawn(future, runtime.handle());
        wakers.into_iter().for_each(|thread| thread.join().expect("no panic"));
        runtime.block_on(async { tokio::task::yield_now().await });
        assert_eq!(ends.load(SeqCst), 1);
    });
}
