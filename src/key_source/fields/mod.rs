//! Keys from named fields of a request.

pub(crate) mod field;
mod reader;
#[cfg(feature = "axum")]
mod path;
#[cfg(feature = "axum")]
mod json;
mod canonical;

use std::{borrow::Cow, sync::Arc};

use bytes::Bytes;
use http::request::Parts;

#[cfg(feature = "axum")]
use self::path::PathParams;
use self::{
    field::{Field, Source},
    reader::FieldReader,
};
use super::{KeyRejection, KeySource, has_matched_route};
use crate::{
    body::reader::BodyReader,
    lock_key::LockKey,
    rejection::{
        Rejection,
        field_error::{FieldError, FieldProblem},
    },
};

/// Creates a source that derives keys from named fields of the request: one [`Field`], or a tuple
/// of two to four.
///
/// ```
/// # use tower_lock::{LockLayer, LockManager, key};
/// # fn layers(locks: &LockManager) {
/// // order:7
/// LockLayer::new(locks, key::from_fields("order", key::query_param("id")));
/// // order:acme:7
/// let fields = (key::header("x-tenant"), key::query_param("id"));
/// LockLayer::new(locks, key::from_fields("order", fields));
/// # }
/// ```
///
/// Prefer a key of parsed values ([`key::from_fn`](crate::key::from_fn)), because all texts that
/// the handler parses as one value are then one key. A field is text. A client must not bypass a
/// lock by writing a value in another form, so each text is accepted, converted or rejected:
///
/// | text | result |
/// |---|---|
/// | percent-encoded, in a path, a query or a form | decoded |
/// | a UUID in upper case, without hyphens, in braces, or as `urn:uuid:` | in lower case |
/// | missing, empty, duplicated | rejected |
/// | with leading or trailing whitespace or control characters | rejected |
/// | a number that is not a canonical integer: `07`, `+7`, `-0`, `7.0`, `7.5`, `7e3` | rejected |
/// | any other; `Gold` and `gold` are two texts | unchanged |
///
/// This also rejects zip codes (`01234`), versions (`1.10`), and about one in a million UUIDs
/// without hyphens (those that are valid numbers: 32 digits with one `e`, or with a leading zero).
/// Use a key function for such values, and for values that the handler compares case-insensitively.
///
/// An invalid field of the head is rejected before the body is read.
///
/// # Errors
///
/// Rejects with [`Rejection::InvalidKey`] and a [`FieldError`]. The response is a problem of the
/// type `invalid-key`. It names the field and the reason, but not the value.
/// [`LockLayer::on_reject`](crate::LockLayer::on_reject) can replace it.
pub fn from_fields<F: Fields>(namespace: &'static str, fields: F) -> impl KeySource<Keys = LockKey> {
    FromFields { namespace, sources: fields.sources() }
}

/// Source of keys from named fields.
#[derive(Clone)]
struct FromFields {
    namespace: &'static str,
    sources: Arc<[Source]>,
}

/// Parts of a key: a [`Field`], or a tuple of two to four.
#[diagnostic::on_unimplemented(
    message = "write `key::from_fields(\"order\", key::path_param(\"id\"))`, or a tuple of two to four fields: `{Self}` is neither",
    label = "not a field of a request",
    note = "a field is `key::header(\"..\")`, `key::query_param(\"..\")`, `key::path_param(\"..\")`, `key::json_field(\"..\")`, `key::form_field(\"..\")` or `key::extension::<T>()`",
    note = "for a key function use `key::from_fn(|Path(id): Path<u64>| (\"order\", id))`; for one key for all requests use `key::fixed((\"nightly\", \"mail\"))`"
)]
pub trait Fields {
    fn sources(self) -> Arc<[Source]>;
}

// === impl Fields ===

impl Fields for Field {
    fn sources(self) -> Arc<[Source]> {
        Arc::new([self.source])
    }
}

macro_rules! fields {
    ($($field:ident: $type:ty),*) => {
        impl Fields for ($($type,)*) {
            fn sources(self) -> Arc<[Source]> {
                let ($($field,)*) = self;
                Arc::new([$($field.source),*])
            }
        }
    };
}

fields!(a: Field, b: Field);
fields!(a: Field, b: Field, c: Field);
fields!(a: Field, b: Field, c: Field, d: Field);

// === impl Field ===

impl Field {
    /// The text of the field as the client sent it, not in canonical form.
    pub(crate) async fn read_text(self, head: &mut Parts, body: &[u8]) -> Result<String, FieldProblem> {
        let sources = [self.source];
        #[cfg(feature = "axum")]
        let path = PathParams::extract(&sources, head).await;
        let mut reader = FieldReader::new(&sources);
        reader.read_head(head);
        #[cfg(feature = "axum")]
        {
            reader.read_path(&path);
            reader.read_form(head, body);
            reader.read_json(body);
        }
        #[cfg(not(feature = "axum"))]
        let _ = body;
        reader.into_text().map(Cow::into_owned)
    }
}

// === impl FromFields ===

impl FromFields {
    /// Derives the key. Without a body, checks only the fields of the head.
    async fn key(&self, head: &mut Parts, body: Option<&Bytes>) -> Result<LockKey, FieldError> {
        #[cfg(feature = "axum")]
        let path = PathParams::extract(&self.sources, head).await;
        let head = &*head;
        let mut reader = FieldReader::new(&self.sources);
        reader.read_head(head);
        #[cfg(feature = "axum")]
        reader.read_path(&path);
        #[cfg(feature = "axum")]
        if let Some(body) = body {
            reader.read_form(head, body);
            reader.read_json(body);
        }
        reader.into_key(self.namespace, head, body.is_some())
    }
}

impl KeySource for FromFields {
    type Keys = LockKey;

    async fn extract_key(&self, head: &mut Parts, body: &mut BodyReader<'_>) -> Result<Option<LockKey>, KeyRejection> {
        let of_body = self.sources.iter().filter(|source| source.reads_body()).count();
        // An invalid head is rejected before its body is read.
        if of_body < self.sources.len() {
            let key = self.key(head, None).await.map_err(|error| reject(error, head))?;
            if of_body == 0 {
                return Ok(Some(key));
            }
        }
        let bytes = body.read(head).await?;
        Ok(Some(self.key(head, Some(&bytes)).await.map_err(|error| reject(error, head))?))
    }
}

fn reject(error: FieldError, head: &Parts) -> KeyRejection {
    if error.is_missing_path_param() && !has_matched_route(head) {
        return KeyRejection::NoRoute;
    }
    let status = error.status();
    KeyRejection::Rejection(Rejection::InvalidKey { status, field: Some(error), extractor: None })
}
