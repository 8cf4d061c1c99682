//! The answer of a handler, and its form as a record of the store.

use bytes::{BufMut, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, Response, StatusCode,
    header::{ETAG, LOCATION},
};

use super::{fingerprint::Fingerprint, headers::is_of_the_message};
use crate::{
    limits::MAX_ANSWER_HEADER_BYTES, middleware::request_lock::LOCK_TICKET, rejection::Rejection, store::Record,
};

/// The version of the format. A change of the format is a new version.
const VERSION: u8 = 1;

/// Version, fingerprint, status and the number of headers.
const FIXED_BYTES: usize = 1 + Fingerprint::LEN + 2 + 4;

/// The header of a response that is not the first one.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

/// The response of a handler, as it is kept for retries.
#[cfg_attr(any(test, fuzzing), derive(Clone, Debug, PartialEq, Eq))]
pub(crate) struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    /// `None`: a tombstone.
    body: Option<Bytes>,
}

/// Error of a record that is not an answer: another program or another version wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidAnswer {
    #[error("the record ends early")]
    Truncated,
    #[error("the record is longer than its contents")]
    TrailingBytes,
    #[error("the head of the record is longer than that of any answer")]
    TooLong,
    #[error("the record has the unknown version {0}")]
    UnknownVersion(u8),
    #[error("the record has an invalid status")]
    InvalidStatus,
    #[error("the record has an invalid header")]
    InvalidHeader,
}

impl Answer {
    /// Creates an answer of the headers that are kept. It is a tombstone if they have too many
    /// bytes, because an answer without some of its headers would be another one.
    pub(crate) fn new(status: StatusCode, headers: HeaderMap, body: Bytes) -> Self {
        if header_bytes(&headers) > MAX_ANSWER_HEADER_BYTES {
            return Self::tombstone(status, &headers);
        }
        Self { status, headers, body: Some(body) }
    }

    /// Creates the part of an answer that a retry gets if the rest is not kept: its status, and the
    /// headers that lead to the result.
    pub(crate) fn tombstone(status: StatusCode, headers: &HeaderMap) -> Self {
        let mut kept = HeaderMap::new();
        for name in [LOCATION, ETAG] {
            kept.extend(headers.get(&name).cloned().map(|value| (name, value)));
        }
        if header_bytes(&kept) > MAX_ANSWER_HEADER_BYTES {
            kept.clear();
        }
        Self { status, headers: kept, body: None }
    }

    /// The same without the rest.
    pub(crate) fn into_tombstone(self) -> Self {
        Self::tombstone(self.status, &self.headers)
    }

    /// The bytes of the headers and of the body.
    pub(crate) fn bytes(&self) -> usize {
        header_bytes(&self.headers) + self.body.as_ref().map_or(0, Bytes::len)
    }

    fn head_bytes(&self) -> usize {
        FIXED_BYTES + header_bytes(&self.headers)
    }

    /// The record of the answer to the request with this fingerprint.
    pub(crate) fn into_record(self, fingerprint: &Fingerprint) -> Record {
        let mut head = Vec::with_capacity(self.head_bytes());
        head.put_u8(VERSION);
        head.put_slice(&fingerprint.0);
        head.put_u16(self.status.as_u16());
        head.put_u32(length(self.headers.len()));
        for (name, value) in &self.headers {
            for text in [name.as_str().as_bytes(), value.as_bytes()] {
                head.put_u32(length(text.len()));
                head.put_slice(text);
            }
        }
        Record::new(head, self.body)
    }

    /// The answer as one text of bytes, for a database of the application. `None` for a tombstone.
    pub(crate) fn into_bytes(self, fingerprint: &Fingerprint) -> Option<Bytes> {
        let Record { head, body } = self.into_record(fingerprint);
        let body = body?;
        let mut bytes = BytesMut::with_capacity(4 + head.len() + body.len());
        bytes.put_u32(length(head.len()));
        bytes.put_slice(&head);
        bytes.put_slice(&body);
        Some(bytes.freeze())
    }

    /// The record in such bytes. Its head is checked by [`from_record`](Self::from_record).
    pub(crate) fn record_from_bytes(mut bytes: Bytes) -> Result<Record, InvalidAnswer> {
        let head = take_text(&mut bytes)?;
        Ok(Record::new(head, Some(bytes)))
    }

    /// Reads a record, which may have any bytes.
    pub(crate) fn from_record(record: &Record) -> Result<(Fingerprint, Self), InvalidAnswer> {
        let mut head = record.head.clone();
        // First, because other versions may have another length.
        let [version] = take_array(&mut head)?;
        if version != VERSION {
            return Err(InvalidAnswer::UnknownVersion(version));
        }
        // Bounds the memory of the header map, which is larger than its text.
        if record.head.len() > FIXED_BYTES + MAX_ANSWER_HEADER_BYTES {
            return Err(InvalidAnswer::TooLong);
        }
        let fingerprint = Fingerprint(take_array(&mut head)?);
        let status = u16::from_be_bytes(take_array(&mut head)?);
        let status = StatusCode::from_u16(status).map_err(|_| InvalidAnswer::InvalidStatus)?;
        // An upgrade leaves a tombstone. No server sends it as a response.
        if status.is_informational() && record.body.is_some() {
            return Err(InvalidAnswer::InvalidStatus);
        }
        let count = u32::from_be_bytes(take_array(&mut head)?);
        let mut headers = HeaderMap::new();
        for _ in 0..count {
            let name = HeaderName::from_bytes(&take_text(&mut head)?).map_err(|_| InvalidAnswer::InvalidHeader)?;
            let value = HeaderValue::from_maybe_shared(take_text(&mut head)?);
            let mut value = value.map_err(|_| InvalidAnswer::InvalidHeader)?;
            // As in the first response: a record has no such mark.
            value.set_sensitive(name == LOCK_TICKET);
            // It would frame the response in another way than the server.
            if is_of_the_message(&name) {
                return Err(InvalidAnswer::InvalidHeader);
            }
            headers.try_append(name, value).map_err(|_| InvalidAnswer::InvalidHeader)?;
        }
        if !head.is_empty() {
            return Err(InvalidAnswer::TrailingBytes);
        }
        Ok((fingerprint, Self { status, headers, body: record.body.clone() }))
    }

    /// The response to a retry. A tombstone has none.
    pub(crate) fn into_response(self) -> Result<Response<Bytes>, Rejection> {
        let Some(body) = self.body else {
            return Err(Rejection::AnswerNotKept {
                original_status: self.status,
                location: self.headers.get(LOCATION).cloned(),
                etag: self.headers.get(ETAG).cloned(),
            });
        };
        let has_content = !matches!(self.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        let mut response = Response::new(if has_content { body } else { Bytes::new() });
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
        Ok(response)
    }
}

/// The bytes of headers in a record, with their lengths.
fn header_bytes(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| 4 + name.as_str().len() + 4 + value.len()).sum()
}

fn length(len: usize) -> u32 {
    u32::try_from(len).expect("headers have a bound")
}

fn take(head: &mut Bytes, len: usize) -> Result<Bytes, InvalidAnswer> {
    if len > head.len() { Err(InvalidAnswer::Truncated) } else { Ok(head.split_to(len)) }
}

fn take_array<const N: usize>(head: &mut Bytes) -> Result<[u8; N], InvalidAnswer> {
    Ok(take(head, N)?[..].try_into().expect("as many bytes"))
}

fn take_text(head: &mut Bytes) -> Result<Bytes, InvalidAnswer> {
    let len = u32::from_be_bytes(take_array(head)?);
    take(head, usize::try_from(len).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FINGERPRINT: Fingerprint = Fingerprint([7; 32]);

    fn map(headers: &[(&'static str, &[u8])]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_bytes(value).expect("a value"));
        }
        map
    }

    fn created() -> Answer {
        let headers = map(&[
            ("location", b"/rewards/7"),
            ("link", b"</a>; rel=\"next\""),
            ("x-bytes", b"caf\xe9 \xff"),
            ("link", b"</b>; rel=\"prev\""),
            ("etag", b"\"7\""),
        ]);
        Answer::new(StatusCode::CREATED, headers, Bytes::from_static(b"{\"id\":7}"))
    }

    /// A header map with random names, repetitions and bytes.
    fn random_headers(rng: &mut fastrand::Rng) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for _ in 0..rng.usize(0..12) {
            let name = format!("x-{}", rng.u8(0..6));
            let value: Vec<u8> = (0..rng.usize(0..40)).map(|_| rng.u8(32..).max(32)).filter(|b| *b != 127).collect();
            let name = HeaderName::try_from(name).expect("a name");
            headers.append(name, HeaderValue::from_bytes(&value).expect("a value"));
        }
        headers
    }

    #[test]
    fn answer_survives_its_record() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..5_000 {
            let status = StatusCode::from_u16(rng.u16(200..1000)).expect("three digits");
            let fingerprint = Fingerprint(std::array::from_fn(|_| rng.u8(..)));
            let body: Vec<u8> = (0..rng.usize(0..100)).map(|_| rng.u8(..)).collect();
            let mut answer = Answer::new(status, random_headers(&mut rng), body.into());
            if rng.bool() {
                answer.body = None;
            }
            let record = answer.clone().into_record(&fingerprint);
            let bytes = record.head.len() + record.body.as_ref().map_or(0, Bytes::len);
            assert_eq!(bytes, answer.head_bytes() + answer.body.as_ref().map_or(0, Bytes::len));
            let (read_fingerprint, read) = Answer::from_record(&record).expect("an answer");
            assert_eq!((read_fingerprint, &read), (fingerprint, &answer));
            assert!(read.headers.iter().eq(answer.headers.iter()), "in their order");
        }
    }

    /// Records outlive the process that wrote them.
    #[test]
    fn format_of_version_1_does_not_change() {
        let answer = Answer::new(StatusCode::CREATED, map(&[("etag", b"\"7\"")]), Bytes::from_static(b"hi"));
        let record = answer.into_record(&FINGERPRINT);
        let mut head = vec![1];
        head.extend([7; 32]);
        head.extend([0, 201]);
        head.extend([0, 0, 0, 1]);
        head.extend(b"\0\0\0\x04etag\0\0\0\x03\"7\"");
        assert_eq!((&*record.head, record.body.as_deref()), (&*head, Some(&b"hi"[..])));
    }

    #[test]
    fn truncated_record_is_an_error() {
        let Record { head, body, .. } = created().into_record(&FINGERPRINT);
        for end in 0..head.len() {
            let record = Record::new(head.slice(..end), body.clone());
            assert_eq!(Answer::from_record(&record), Err(InvalidAnswer::Truncated), "{end} bytes");
        }
    }

    #[test]
    fn foreign_record_is_an_error() {
        let head = created().into_record(&FINGERPRINT).head;
        let with = |at: usize, byte: u8| {
            let mut head = head.to_vec();
            head[at] = byte;
            Answer::from_record(&Record::new(head, None)).map(drop)
        };
        assert_eq!(with(0, 2), Err(InvalidAnswer::UnknownVersion(2)));
        assert_eq!(with(33, 255), Err(InvalidAnswer::InvalidStatus));
        assert_eq!(with(FIXED_BYTES + 4, b' '), Err(InvalidAnswer::InvalidHeader), "name");
        assert_eq!(with(FIXED_BYTES + 4 + 8 + 4, b'\n'), Err(InvalidAnswer::InvalidHeader), "value");
        let longer = Record::new([&head[..], b"\0"].concat(), None);
        assert_eq!(Answer::from_record(&longer).map(drop), Err(InvalidAnswer::TrailingBytes));
    }

    #[test]
    fn random_bytes_do_not_panic() {
        let mut rng = fastrand::Rng::with_seed(2);
        let valid = created().into_record(&FINGERPRINT).head;
        for _ in 0..20_000 {
            let mut head = valid.to_vec();
            for _ in 0..rng.usize(0..6) {
                let at = rng.usize(..head.len());
                head[at] = rng.u8(..);
            }
            if let Ok((fingerprint, answer)) = Answer::from_record(&Record::new(head, None)) {
                let again = Answer::from_record(&answer.clone().into_record(&fingerprint));
                assert_eq!(again, Ok((fingerprint, answer)));
            }
            let head: Vec<u8> = std::iter::once(VERSION).chain((0..rng.usize(0..200)).map(|_| rng.u8(..))).collect();
            drop(Answer::from_record(&Record::new(head, None)));
        }
    }

    /// The lengths in a record do not decide how much memory is used.
    #[test]
    fn head_of_a_record_is_bounded() {
        let mut head = vec![VERSION; FIXED_BYTES + MAX_ANSWER_HEADER_BYTES + 1];
        assert_eq!(Answer::from_record(&Record::new(head.clone(), None)).map(drop), Err(InvalidAnswer::TooLong));
        head.truncate(FIXED_BYTES);
        head[FIXED_BYTES - 4..].fill(255);
        head[33..35].copy_from_slice(&200_u16.to_be_bytes());
        assert_eq!(Answer::from_record(&Record::new(head.clone(), None)).map(drop), Err(InvalidAnswer::Truncated));
        head.extend([255; 4]);
        assert_eq!(Answer::from_record(&Record::new(head, None)).map(drop), Err(InvalidAnswer::Truncated));
    }

    #[test]
    fn too_many_header_bytes_leave_a_tombstone() {
        let of = |bytes: usize| {
            let mut headers = map(&[("location", b"/rewards/7")]);
            let rest = MAX_ANSWER_HEADER_BYTES - header_bytes(&headers) - header_bytes(&map(&[("x-long", b"")]));
            headers.append("x-long", HeaderValue::from_bytes(&vec![b'x'; rest + bytes]).expect("a value"));
            Answer::new(StatusCode::CREATED, headers, Bytes::new())
        };
        assert_eq!((of(0).headers.len(), of(0).body), (2, Some(Bytes::new())), "just fits");
        assert_eq!(of(1), Answer::tombstone(StatusCode::CREATED, &map(&[("location", b"/rewards/7")])));
        let record = of(0).into_record(&FINGERPRINT);
        assert!(Answer::from_record(&record).is_ok(), "the longest answer can be read");

        let long = map(&[("location", &[b'x'; MAX_ANSWER_HEADER_BYTES])]);
        let none = Answer::tombstone(StatusCode::CREATED, &HeaderMap::new());
        assert_eq!(Answer::new(StatusCode::CREATED, long, Bytes::new()), none);
    }

    #[test]
    fn retry_gets_the_answer_marked_as_replayed() {
        let response = created().into_response().expect("kept");
        assert_eq!(response.status(), StatusCode::CREATED);
        assert_eq!(response.headers()["idempotency-replayed"], "true");
        assert_eq!(response.headers()["location"], "/rewards/7");
        assert_eq!(response.headers().get_all("link").iter().count(), 2);
        assert_eq!(&response.body()[..], b"{\"id\":7}");
    }

    /// No log of a retry shows it either.
    #[test]
    fn ticket_of_a_retry_is_sensitive() {
        let headers = map(&[("lock-ticket", b"key=k&secret=1"), ("etag", b"\"7\"")]);
        let record = Answer::new(StatusCode::OK, headers, Bytes::new()).into_record(&FINGERPRINT);
        let (_, answer) = Answer::from_record(&record).expect("an answer");
        let response = answer.into_response().expect("kept");
        assert!(response.headers()["lock-ticket"].is_sensitive() && !response.headers()["etag"].is_sensitive());
    }

    #[test]
    fn tombstone_says_where_the_result_is() {
        let rejection =
            Answer::tombstone(StatusCode::CREATED, &created().headers).into_response().expect_err("no body");
        let Rejection::AnswerNotKept { original_status, location, etag } = rejection else { panic!("{rejection:?}") };
        assert_eq!(original_status, StatusCode::CREATED);
        assert_eq!(location.expect("kept"), "/rewards/7");
        assert_eq!(etag.expect("kept"), "\"7\"");
        let Record { head, .. } = created().into_record(&FINGERPRINT);
        let (_, dropped) = Answer::from_record(&Record::new(head, None)).expect("an answer");
        assert!(matches!(dropped.into_response(), Err(Rejection::AnswerNotKept { .. })), "the store dropped the body");
    }

    /// Bytes of another program must not frame the response in another way than the server.
    #[test]
    fn record_with_framing_is_an_error() {
        let record = |status: u16, name: &'static str| {
            let status = StatusCode::from_u16(status).expect("three digits");
            let headers = HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_static("2"))]);
            let fingerprint = Fingerprint([7; 32]);
            Answer { status, headers, body: Some("hello".into()) }.into_record(&fingerprint)
        };
        assert_eq!(Answer::from_record(&record(200, "content-length")).map(drop), Err(InvalidAnswer::InvalidHeader));
        assert_eq!(Answer::from_record(&record(200, "transfer-encoding")).map(drop), Err(InvalidAnswer::InvalidHeader));
        assert_eq!(Answer::from_record(&record(101, "etag")).map(drop), Err(InvalidAnswer::InvalidStatus));
        let (_, empty) = Answer::from_record(&record(204, "etag")).expect("an answer");
        assert!(empty.into_response().expect("a response").body().is_empty());
    }
}
