//! Parsers of bytes that other programs write, with what must hold for any bytes.
//!
//! This file is a module of the library under `cargo fuzz`, because the parsers are private.

#![allow(missing_docs, clippy::missing_panics_doc, reason = "called by the fuzz targets alone")]

use bytes::Bytes;
use deadpool_redis::redis::{Value, parse_redis_value};

use crate::{
    replay::answer::Answer,
    store::{
        Record,
        connect::split,
        postgres::address::Address,
        redis::{
            topology::{
                parameters::Parameters,
                slot_map::{Redirect, SlotMap},
                socket::frame::FrameLength,
                url::ServerUrl,
            },
            wire::SLOTS,
        },
        remote::tls::TlsSettings,
        zookeeper::wire,
    },
};

/// A reply of Redis has the same end in one piece and in two, and is complete there.
pub fn reply(data: &[u8]) {
    let Some((&cut, buffer)) = data.split_first() else { return };
    let whole = FrameLength::default().of(buffer);
    let mut frame = FrameLength::default();
    match frame.of(&buffer[..buffer.len().min(usize::from(cut))]) {
        Ok(None) => assert_eq!(frame.of(buffer), whole),
        first => assert_eq!(first, whole),
    }
    if let Ok(Some(length)) = whole {
        assert!(length <= buffer.len());
        // The parser of the library may refuse the bytes, and needs no further ones.
        let _ = parse_redis_value(&buffer[..length]);
    }
}

/// A slot has a master of the map, or none.
pub fn slot_map(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let _ = Redirect::parse(true, "asked", &text);
    let info = Value::BulkString(b"cluster_current_epoch:7\r\n".to_vec());
    let Ok(slots) = parse_redis_value(data) else { return };
    let Some(map) = SlotMap::parse("asked", info, &slots) else { return };
    for slot in 0..SLOTS {
        assert!(map.owner(slot).is_none_or(|owner| owner < map.masters.len()));
    }
}

/// An answer that is read from a record has the same record.
pub fn answer(data: &[u8]) {
    let data = Bytes::copy_from_slice(data);
    for record in [Record::new(data.clone(), None), Record::new(data.clone(), Some(data.clone()))] {
        if let Ok((fingerprint, answer)) = Answer::from_record(&record) {
            let again = Answer::from_record(&answer.clone().into_record(&fingerprint));
            assert!(again.is_ok_and(|(_, again)| again == answer));
            let _ = answer.into_response();
        }
    }
    let _ = Answer::record_from_bytes(data);
}

/// The error of a URL has no text of the URL, which may be a part of a password.
pub fn url(data: &[u8]) {
    // No host has this text. A host without a scheme is shown.
    const SECRET: &str = "s3cr3t!";
    let Ok(text) = std::str::from_utf8(data) else { return };
    let url = text.replace('*', SECRET);
    let has_no_secret = |error: &str| assert!(!error.contains(SECRET), "{url}: {error}");
    if let Err(error) = split(&url) {
        has_no_secret(&error);
    }
    match ServerUrl::split(&url) {
        Ok(parts) => {
            let parameters = Parameters::parse(parts.query, parts.kind);
            if let Err(error) = parameters.and_then(|mut parameters| parameters.settings()) {
                has_no_secret(&error);
            }
        }
        Err(error) => has_no_secret(&error),
    }
    if let Err(error) = Address::parse(&url, &TlsSettings::default(), None) {
        has_no_secret(&format!("{error:?} {error}"));
    }
}

/// A frame of ZooKeeper is a reply, an event or nothing, whose parts are parts of the frame.
pub fn zookeeper(data: &[u8]) {
    let Some(frame) = wire::parse(data) else { return };
    let wire::Frame::Reply { body, .. } = frame else { return };
    assert!(wire::names(body).is_none_or(|names| names.len() <= body.len() / 4));
    assert!(wire::data(body).is_none_or(|(data, _)| data.len() <= body.len()));
    let _ = (wire::created(body), wire::stat(body), wire::multi(body), wire::is_open(body), wire::connected(body));
}
