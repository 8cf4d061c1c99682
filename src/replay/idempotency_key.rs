//! The idempotency key of a request.

use std::fmt;

use http::request::Parts;

use super::fingerprint::Fingerprint;
use crate::{
    key_source::fields::field::Field,
    limits::MAX_IDEMPOTENCY_KEY_BYTES,
    lock_key::LockKey,
    rejection::{
        Rejection,
        field_error::{FieldError, FieldLocation, FieldProblem},
    },
};

/// Key that a client sends with each attempt of one request.
///
/// It has 1 to 255 characters of printable ASCII, and is compared byte for byte: the client chose
/// it, and no handler parses it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct IdempotencyKey(String);

/// The field of a request that has the key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IdempotencyKeyField {
    field: Field,
    location: FieldLocation,
    name: &'static str,
}

impl IdempotencyKey {
    /// The key of the lock that has the record of the request.
    pub(crate) fn lock_key(&self, scope: &LockKey) -> LockKey {
        LockKey::replay(scope, &self.0)
    }

    /// The key of a request without one, and of each equal request. No client can send this text.
    pub(crate) fn of_equal(request: &Fingerprint) -> Self {
        let digits: String = request.0.iter().map(|byte| format!("{byte:02x}")).collect();
        Self(format!("≡{digits}"))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Parses the value of a header: a string of RFC 9651, or the key itself, as many clients send
    /// it. The two forms of one key are equal.
    ///
    /// The specification of the header has no parameters. They are rejected, as is a list of two
    /// keys: a part that is ignored could distinguish two requests.
    fn from_header(value: &str) -> Result<Self, FieldProblem> {
        let value = value.trim_matches(' ');
        match value.strip_prefix('"') {
            Some(rest) => Self::new(unquote(rest)?),
            None if value.contains([' ', '"', ',', ';']) => Err(FieldProblem::MalformedIdempotencyKey),
            None => Self::new(value.to_owned()),
        }
    }

    fn new(text: String) -> Result<Self, FieldProblem> {
        match text.len() {
            0 => Err(FieldProblem::Empty),
            1..=MAX_IDEMPOTENCY_KEY_BYTES if text.bytes().all(|byte| matches!(byte, b' '..=b'~')) => Ok(Self(text)),
            1..=MAX_IDEMPOTENCY_KEY_BYTES => Err(FieldProblem::MalformedIdempotencyKey),
            _ => Err(FieldProblem::TooLong),
        }
    }
}

impl IdempotencyKeyField {
    /// # Panics
    ///
    /// Panics if the field is an extension, because a client sends the key.
    #[track_caller]
    pub(crate) fn new(field: Field) -> Self {
        let Some((location, name)) = field.sent() else {
            panic!(
                "`ReplayLayer::key`: the client sends the key, so use `key::header`, `key::json_field` or another field"
            );
        };
        Self { field, location, name }
    }

    /// Whether the key is in the body.
    pub(crate) fn reads_body(&self) -> bool {
        self.field.reads_body()
    }

    /// Reads the key. `None` if the request has none.
    pub(crate) async fn read(&self, head: &mut Parts, body: &[u8]) -> Result<Option<IdempotencyKey>, Rejection> {
        let key = match self.field.read_text(head, body).await {
            Err(FieldProblem::Missing) => return Ok(None),
            Ok(value) if self.location == FieldLocation::Header => IdempotencyKey::from_header(&value),
            Ok(text) => IdempotencyKey::new(text),
            Err(problem) => Err(problem),
        };
        key.map(Some).map_err(|problem| Rejection::IdempotencyKeyInvalid { field: self.error(problem) })
    }

    /// The rejection of a request without a key.
    pub(crate) fn missing(&self) -> Rejection {
        Rejection::IdempotencyKeyMissing { field: self.error(FieldProblem::Missing) }
    }

    fn error(&self, problem: FieldProblem) -> FieldError {
        FieldError { location: self.location, name: self.name, problem }
    }
}

impl fmt::Debug for IdempotencyKey {
    /// Without the text, which may be personal data.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdempotencyKey({} bytes)", self.0.len())
    }
}

/// The contents of a string of RFC 9651, from the character after its first quote.
fn unquote(text: &str) -> Result<String, FieldProblem> {
    let mut contents = String::with_capacity(text.len());
    let mut chars = text.chars();
    loop {
        match (chars.next(), chars.as_str()) {
            (Some('"'), "") => return Ok(contents),
            (Some('\\'), rest) if rest.starts_with(['"', '\\']) => contents.extend(chars.next()),
            (Some('"' | '\\') | None, _) => return Err(FieldProblem::MalformedIdempotencyKey),
            (Some(c), _) => contents.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, Request};

    use super::*;
    use crate::key_source::fields::field::header;

    fn parse(value: &str) -> Result<String, FieldProblem> {
        IdempotencyKey::from_header(value).map(|key| key.0)
    }

    async fn read(field: Field, headers: &[&[u8]], body: &str) -> Result<Option<String>, FieldProblem> {
        let (mut head, ()) = Request::new(()).into_parts();
        for value in headers {
            head.headers.append("idempotency-key", HeaderValue::from_bytes(value).expect("a value"));
        }
        match IdempotencyKeyField::new(field).read(&mut head, body.as_bytes()).await {
            Ok(key) => Ok(key.map(|key| key.0)),
            Err(Rejection::IdempotencyKeyInvalid { field }) => Err(field.problem),
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn quoted_and_bare_keys_are_equal() {
        for (value, key) in [
            ("abc", "abc"),
            ("\"abc\"", "abc"),
            ("  \"abc\"  ", "abc"),
            (" abc ", "abc"),
            ("8e03978e-40d5-43dd-bc93-6894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
            ("\"8E03978E\"", "8E03978E"),
            (r#""a\"b\\c""#, r#"a"b\c"#),
            (r#""a b,c;d""#, "a b,c;d"),
            ("\" \"", " "),
            ("a\\b", "a\\b"),
            ("!#$%&'()*+-./:<=>?@[]^_`{|}~", "!#$%&'()*+-./:<=>?@[]^_`{|}~"),
        ] {
            assert_eq!(parse(value).as_deref(), Ok(key), "{value}");
        }
    }

    #[test]
    fn malformed_and_empty_keys_are_rejected() {
        for value in ["", "  ", "\"\""] {
            assert_eq!(parse(value), Err(FieldProblem::Empty), "{value:?}");
        }
        for value in [
            "\"",
            "\"abc",
            "abc\"",
            "a\"b",
            "\"a\"b\"",
            "\"a\\",
            "\"a\\\"",
            r#""a\n""#,
            "\"a\tb\"",
            "a b",
            "a\tb",
            "\tabc",
            "\"a\";v=1",
            "a;v=1",
            "\"a\", \"b\"",
            "a, b",
            "a,b",
            "\"caf\u{e9}\"",
            "caf\u{e9}",
            "\"a\u{7f}\"",
        ] {
            assert_eq!(parse(value), Err(FieldProblem::MalformedIdempotencyKey), "{value:?}");
        }
    }

    #[test]
    fn key_has_at_most_255_characters() {
        let (longest, longer) = ("x".repeat(255), "x".repeat(256));
        assert_eq!(parse(&longest).as_ref(), Ok(&longest));
        assert_eq!(parse(&format!("\"{longest}\"")).as_ref(), Ok(&longest));
        assert_eq!(parse(&format!("\"{}\"", "\\\\".repeat(255))), Ok("\\".repeat(255)), "the escapes do not count");
        assert_eq!(parse(&longer), Err(FieldProblem::TooLong));
        assert_eq!(parse(&format!("\"{longer}\"")), Err(FieldProblem::TooLong));
    }

    #[test]
    fn every_key_survives_its_quotes_and_no_text_panics() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..10_000 {
            let key: String = (0..rng.usize(1..=20)).map(|_| char::from(rng.u8(b' '..=b'~'))).collect();
            let quoted = format!("\"{}\"", key.replace('\\', r"\\").replace('"', "\\\""));
            assert_eq!(parse(&quoted).as_ref(), Ok(&key));
            let text: String = (0..rng.usize(0..8))
                .map(|_| *rng.choice(&['"', '\\', 'a', ' ', ',', '\u{e9}']).expect("one"))
                .collect();
            if let Ok(key) = parse(&text) {
                assert!(!key.is_empty() && key.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{text:?}");
            }
        }
    }

    #[tokio::test]
    async fn header_is_read_once() {
        let key = header("idempotency-key");
        assert_eq!(read(key, &[], "").await, Ok(None));
        let missing = IdempotencyKeyField::new(key).missing();
        assert!(
            matches!(missing, Rejection::IdempotencyKeyMissing { field } if field.problem == FieldProblem::Missing)
        );
        assert_eq!(read(key, &[b"\"abc\""], "").await, Ok(Some("abc".into())));
        assert_eq!(read(key, &[b"abc", b"abc"], "").await, Err(FieldProblem::Duplicate));
        assert_eq!(read(key, &[b""], "").await, Err(FieldProblem::Empty));
        assert_eq!(read(key, &[b"caf\xe9"], "").await, Err(FieldProblem::NotText));
        assert_eq!(read(header("x-request-id"), &[b"abc"], "").await, Ok(None));
    }

    #[cfg(feature = "axum")]
    #[tokio::test]
    async fn field_of_the_body_has_the_same_bounds() {
        use crate::key_source::fields::field::json_field;

        let id = json_field("request_id");
        assert!(IdempotencyKeyField::new(id).reads_body());
        let json = |value: &str| format!("{{\"request_id\": {value}, \"amount\": 1}}");
        for (value, key) in [
            (r#""abc""#, "abc"),
            (r#""a b,\"c\"""#, "a b,\"c\""),
            ("42", "42"),
            // Not in canonical form: the bytes of the client are the key.
            (r#""8E03978E40D543DDBC936894A57F9324""#, "8E03978E40D543DDBC936894A57F9324"),
            (r#""007""#, "007"),
        ] {
            assert_eq!(read(id, &[], &json(value)).await, Ok(Some(key.into())), "{value}");
        }
        let (longest, longer) = ("x".repeat(255), "x".repeat(256));
        assert_eq!(read(id, &[], &json(&format!("\"{longest}\""))).await, Ok(Some(longest)));
        for (body, problem) in [
            (json(&format!("\"{longer}\"")), FieldProblem::TooLong),
            (json(r#""""#), FieldProblem::Empty),
            (json(r#""caf\u00e9""#), FieldProblem::MalformedIdempotencyKey),
            (json(r#""a\nb""#), FieldProblem::MalformedIdempotencyKey),
            (json("null"), FieldProblem::WrongType),
            (r#"{"request_id": "a", "request_id": "b"}"#.into(), FieldProblem::Duplicate),
            ("[]".into(), FieldProblem::NotAnObject),
            ("{".into(), FieldProblem::InvalidJson),
        ] {
            assert_eq!(read(id, &[], &body).await, Err(problem), "{body}");
        }
        assert_eq!(read(id, &[b"abc"], "{}").await, Ok(None), "a header is not the field");
    }

    #[test]
    fn lock_key_depends_on_scope_and_key() {
        let key = |text: &str| IdempotencyKey::new(text.into()).expect("a key");
        let lock = |scope: LockKey, text| key(text).lock_key(&scope).to_string();
        let base = lock(LockKey::from(("user", 1)), "abc");
        assert_eq!(base, lock(LockKey::from(("user", "1")), "abc"));
        assert_ne!(base, lock(LockKey::from(("user", 2)), "abc"), "another user");
        assert_ne!(base, lock(LockKey::from(("user", 1)), "abd"), "another key");
        assert_ne!(base, lock(LockKey::raw("user:1").expect("a name"), "abc"), "raw scope");
        assert_ne!(lock(LockKey::from(("user", 1)), "1:abc"), lock(LockKey::from(("user", 1, 1)), "abc"));
        assert!(base.starts_with("+replay:~") && base.len() == 41, "{base}");
    }

    #[test]
    fn key_is_not_in_its_debug_text() {
        let key = IdempotencyKey::new("ann@example.org".into()).expect("a key");
        assert_eq!(format!("{key:?}"), "IdempotencyKey(15 bytes)");
    }

    #[test]
    #[should_panic(expected = "the client sends the key")]
    fn extension_is_no_idempotency_key() {
        IdempotencyKeyField::new(crate::key_source::fields::field::extension::<u64>());
    }
}
