//! Keys from named fields of a request.

pub(crate) mod field;
mod reader;
#[cfg(feature = "axum")]
mod path;
#[cfg(feature = "axum")]
mod json;
mod canonical;

use std::{borrow::Cow, sync::Arc};

use http::request::Parts;

#[cfg(feature = "axum")]
use self::path::path_params;
use self::{field::Field, reader::FieldReader};
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
    FromFields { namespace, fields: fields.list() }
}

/// Source of keys from named fields.
#[derive(Clone)]
struct FromFields {
    namespace: &'static str,
    fields: Arc<[Field]>,
}

/// Parts of a key: a [`Field`], or a tuple of two to four.
#[diagnostic::on_unimplemented(
    message = "write `key::from_fields(\"order\", key::path_param(\"id\"))`, or a tuple of two to four fields: `{Self}` is neither",
    label = "not a field of a request",
    note = "a field is `key::header(\"..\")`, `key::query_param(\"..\")`, `key::path_param(\"..\")`, `key::json_field(\"..\")`, `key::form_field(\"..\")` or `key::extension::<T>()`",
    note = "for a key function use `key::from_fn(|Path(id): Path<u64>| (\"order\", id))`; for one key for all requests use `key::fixed((\"nightly\", \"mail\"))`"
)]
pub trait Fields {
    fn list(self) -> Arc<[Field]>;
}

// === impl Fields ===

impl Fields for Field {
    fn list(self) -> Arc<[Field]> {
        Arc::new([self])
    }
}

macro_rules! tuples {
    ($($tuple:ty => $len:literal),*) => {$(
        impl Fields for $tuple {
            fn list(self) -> Arc<[Field]> {
                Arc::new(<[Field; $len]>::from(self))
            }
        }
    )*};
}

tuples! { (Field, Field) => 2, (Field, Field, Field) => 3, (Field, Field, Field, Field) => 4 }

// === impl Field ===

impl Field {
    /// The text of the field as the client sent it, not in canonical form.
    pub(crate) async fn read_text(self, head: &mut Parts, body: &[u8]) -> Result<String, FieldProblem> {
        read_fields(&[self], head, Some(body), |reader, _| reader.into_text().map(Cow::into_owned)).await
    }
}

// === impl FromFields ===

impl FromFields {
    /// Derives the key. Without a body, checks only the fields of the head.
    async fn key(&self, head: &mut Parts, body: Option<&[u8]>) -> Result<LockKey, KeyRejection> {
        let key = read_fields(&self.fields, head, body, |reader, head| reader.into_key(self.namespace, head)).await;
        key.map_err(|error| reject(error, head))
    }
}

impl KeySource for FromFields {
    type Keys = LockKey;

    async fn extract_key(&self, head: &mut Parts, body: &mut BodyReader<'_>) -> Result<Option<LockKey>, KeyRejection> {
        let of_body = self.fields.iter().filter(|field| field.reads_body()).count();
        // An invalid head is rejected before its body is read.
        if of_body < self.fields.len() {
            let key = self.key(head, None).await?;
            if of_body == 0 {
                return Ok(Some(key));
            }
        }
        let bytes = body.read(head).await?;
        Ok(Some(self.key(head, Some(&bytes)).await?))
    }
}

/// Reads these fields of a request. The body is `None` before it is read.
async fn read_fields<T>(
    fields: &[Field],
    head: &mut Parts,
    body: Option<&[u8]>,
    result: impl FnOnce(FieldReader<'_>, &Parts) -> T,
) -> T {
    #[cfg(feature = "axum")]
    let path = path_params(fields, head).await;
    let head = &*head;
    let mut reader = FieldReader::new(fields, body.is_some());
    reader.read_head(head);
    #[cfg(feature = "axum")]
    reader.read_path(&path);
    #[cfg(feature = "axum")]
    if let Some(body) = body {
        reader.read_form(head, body);
        reader.read_json(body);
    }
    result(reader, head)
}

fn reject(error: FieldError, head: &Parts) -> KeyRejection {
    if error.is_missing_path_param() && !has_matched_route(head) {
        return KeyRejection::NoRoute;
    }
    let status = error.status();
    KeyRejection::Rejection(Rejection::InvalidKey { status, field: Some(error), extractor: None })
}
