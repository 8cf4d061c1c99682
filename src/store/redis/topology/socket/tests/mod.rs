//! The socket beside a server in memory.

pub(super) mod wire;

use deadpool_redis::redis::cmd;

use self::wire::Wire;
use super::*;
use crate::store::{StoreErrorKind, redis::error::CallError};

fn open() -> (Arc<Mutex<State>>, Reader, Wire) {
    let wire = Wire::default();
    let (state, reader) = Socket::parts(Box::new(wire.clone()), None);
    (state, reader, wire)
}

fn poll(reader: &mut Reader) -> Poll<()> {
    Pin::new(reader).poll(&mut Context::from_waker(Waker::noop()))
}

fn call(state: &Arc<Mutex<State>>, text: &str) -> impl Fn() -> Option<Result<String, String>> {
    let caller = state.lock().send(&[Wire::echo(text)]);
    move || {
        let caller = caller.as_ref().map_err(ToString::to_string);
        let reply = caller.map(|caller| caller.poll_recv(&Context::from_waker(Waker::noop())));
        match reply {
            Ok(Poll::Pending) => None,
            Ok(Poll::Ready(Ok(Value::BulkString(text)))) => Some(Ok(String::from_utf8(text).expect("a text"))),
            Ok(Poll::Ready(reply)) => Some(Err(format!("{reply:?}"))),
            Err(error) => Some(Err(error)),
        }
    }
}

#[test]
fn calls_wait_for_a_slow_server_and_get_their_replies_in_order() {
    let (state, mut reader, wire) = open();
    let texts: Vec<_> = (0..100).map(|number| format!("{number:0300}")).collect();
    let calls: Vec<_> = texts.iter().map(|text| call(&state, text)).collect();
    for _ in 0..1000 {
        assert!(poll(&mut reader).is_pending());
        wire.serve();
    }
    let replies: Vec<_> = calls.iter().map(|call| call().expect("a reply").expect("a text")).collect();
    assert_eq!(replies, texts);
}

#[test]
fn sent_bytes_need_no_memory_while_others_wait() {
    let (state, mut reader, wire) = open();
    let text = "x".repeat(300);
    for _ in 0..1000 {
        // The server reads a hundred bytes at a time. It never has all of them.
        drop(call(&state, &text));
        for _ in 0..3 {
            assert!(poll(&mut reader).is_pending());
            wire.serve();
        }
        let state = state.lock();
        assert!(state.unsent.len() > state.sent && state.unsent.len() < 100_000);
    }
}

#[test]
fn reply_to_a_caller_that_is_gone_reaches_no_other() {
    let (state, mut reader, wire) = open();
    drop(call(&state, "gone"));
    let next = call(&state, "next");
    wire.serve();
    assert!(poll(&mut reader).is_pending());
    assert_eq!(next(), Some(Ok("next".into())));
}

#[test]
fn several_commands_have_one_reply() {
    let (state, mut reader, wire) = open();
    let caller = state.lock().send(&[Wire::echo("1"), cmd("NO"), Wire::echo("3")]).expect("open");
    wire.serve();
    assert!(poll(&mut reader).is_pending());
    let Poll::Ready(Ok(Value::Array(replies))) = caller.poll_recv(&Context::from_waker(Waker::noop())) else {
        panic!("no reply")
    };
    assert!(matches!(&replies[..], [Value::BulkString(_), Value::ServerError(_), Value::BulkString(_)]));
}

#[test]
fn calls_fail_when_the_connection_ends() {
    for ends in [
        (|wire: &Wire, _| wire.close()) as fn(&Wire, &mut Option<Reader>),
        |wire, _| wire.reply(&[b'+'; MAX_REPLY_BYTES + 1]),
        |wire, _| wire.reply(b"$1073741824\r\n"),
        |wire, _| wire.reply(b"HTTP/1.1 400\r\n"),
        // With its runtime.
        |_, reader| *reader = None,
    ] {
        let (state, reader, wire) = open();
        let mut reader = Some(reader);
        let under_way = call(&state, "a");
        ends(&wire, &mut reader);
        assert!(reader.as_mut().is_none_or(|reader| poll(reader).is_ready()));
        let error = under_way().expect("an end").expect_err("no reply");
        let later = call(&state, "b")().expect("an end").expect_err("no connection");
        assert!(!error.is_empty() && !later.is_empty());
        assert!(wire.is_dropped(), "the socket is closed: {error}");
    }
}

/// What follows such a value could be assigned to another call.
/// Guarantee: G1.
#[test]
fn value_of_another_protocol_fails_the_calls_behind_it() {
    for value in ["_\r\n", "*1\r\n_\r\n", ">2\r\n+invalidate\r\n*0\r\n"] {
        let (state, mut reader, wire) = open();
        let calls = ["a", "b"].map(|text| call(&state, text));
        wire.reply(value.as_bytes());
        wire.serve();
        assert!(poll(&mut reader).is_ready(), "{value:?}");
        assert!(calls.iter().all(|call| call().is_some_and(|reply| reply.is_err())), "{value:?}");
    }
}

/// Guarantee: G1.
#[test]
fn closed_connection_fails_its_calls() {
    let (state, mut reader, wire) = open();
    let under_way = call(&state, "a");
    end(&state, &aborted("closed"));
    assert!(under_way().is_some_and(|reply| reply.is_err()));
    assert!(call(&state, "b")().is_some_and(|reply| reply.is_err()));
    assert!(wire.is_dropped() && poll(&mut reader).is_ready());
}

/// Its reply would be assigned to the call that was not sent.
/// Guarantee: G1.
#[test]
fn no_call_follows_one_that_could_not_be_sent() {
    let (state, mut reader, wire) = open();
    let sent = call(&state, "a");
    wire.refuse_writes(true);
    let failed = call(&state, "b");
    wire.refuse_writes(false);
    let error = call(&state, "c")().expect("it is not sent").expect_err("not sent");
    assert!(error.contains("could not be sent"), "{error}");
    wire.serve();
    assert!(poll(&mut reader).is_pending());
    assert_eq!((sent(), failed()), (Some(Ok("a".into())), None), "the earlier reply is received");
}

#[test]
fn error_before_any_call_is_the_reason_of_the_end() {
    let (state, mut reader, wire) = open();
    wire.reply(b"-ERR max number of clients reached\r\n");
    wire.close();
    assert!(poll(&mut reader).is_ready());
    let reason = state.lock().reason.clone().expect("a reason");
    assert!(reason.to_string().contains("max number of clients"), "{reason}");
}

#[test]
fn reply_without_a_call_ends_the_connection() {
    let (state, mut reader, wire) = open();
    wire.reply(b"+OK\r\n");
    assert!(poll(&mut reader).is_ready());
    assert!(call(&state, "a")().expect("an end").is_err());
}

#[test]
fn waiting_calls_and_bytes_are_bounded() {
    let (state, _reader, _wire) = open();
    let calls = (0..MAX_PENDING).map(|_| call(&state, "a")).filter(|call| call().is_none());
    assert_eq!(calls.count(), MAX_PENDING);
    let error = state.lock().send(&[Wire::echo("a")]).expect_err("it is full");
    assert!(!CallError::breaks_connection(&error));
    assert_eq!(CallError::from(error).kind(), StoreErrorKind::Overloaded);
    let (state, _reader, _wire) = open();
    let text = "x".repeat(1 << 20);
    let calls = (0..100).map(|_| call(&state, &text)).filter(|call| call().is_none());
    assert_eq!(calls.count(), MAX_UNSENT_BYTES >> 20);
}
