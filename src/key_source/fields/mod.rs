//! Keys from fields of a request by their names.

pub(crate) mod field;
mod reader;
#[cfg(feature = "axum")]
mod path;
#[cfg(feature = "axum")]
mod json;
mod canonical;

use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::request::Parts;

#[cfg(feature = "axum")]
use self::path::PathParams;
use self::{
    field::{Field, Source},
    reader::Finder,
};
use super::{KeySource, NoKey, has_route};
use crate::{
    body::reader::BodyReader,
    lock_key::LockKey,
    rejection::{Rejection, field_error::FieldError},
};

/// Keys from fields of the request, by their names: one [`Field`], or a tuple of two to four.
///
/// ```
/// # use tower_lock::{LockLayer, LockManager, key};
/// # fn layers(locks: &LockManager) {
/// LockLayer::new(locks, key::from_fields("order", key::query_param("id")));                           // order:7
/// LockLayer::new(locks, key::from_fields("order", (key::header("x-tenant"), key::query_param("id"))));     // order:acme:7
/// # }
/// ```
///
/// A key of parsed values ([`key::from_fn`](crate::key::from_fn)) is better where it can be had: there whatever the handler takes for one value is one key. A
/// field has a text, and a client must not walk past a lock with another spelling of it. So
///
/// | the text | becomes |
/// |---|---|
/// | percent-encoded, in a path, a query or a form | decoded |
/// | a UUID, in upper case, without hyphens, in braces, or as a `urn:uuid:` | `67e55044-10b1-426f-9247-bb680e5fe0c8` |
/// | missing, empty, given twice | refused |
/// | with a blank or a control character at an end | refused |
/// | a number other than `0`, `7`, `-7`: `07`, `+7`, `-0`, `7.0`, `7.5`, `7e3` | refused |
/// | any other, `Gold` and `gold` for two | itself |
///
/// Refused are, with these, some that mean something else: a zip code `01234`, a version `1.10`, and a UUID without hyphens that reads as a
/// number (of a million, one may have 32 digits and one `e`, or a zero in front; with hyphens it is one). Where texts like these
/// are to be locked, or where the handler takes two texts for one (it ignores case, say), write a key function.
///
/// A field of the head that is of no use is refused before the body is read.
///
/// # Errors
///
/// The answer is a problem of the type `bad-key`, which says of which field what is wrong, and never what stood in it:
/// [`Rejection::InvalidKey`], with a [`FieldError`]. [`LockLayer::on_reject`](crate::LockLayer::on_reject) may put another one in its place.
pub fn from_fields<F: Fields>(namespace: &'static str, fields: F) -> FromFields {
    FromFields { namespace, sources: fields.sources() }
}

/// Keys from fields of a request. Made by [`from_fields`].
#[derive(Clone)]
pub struct FromFields {
    namespace: &'static str,
    sources: Arc<[Source]>,
}

/// A [`Field`], or a tuple of two to four: the parts of a key.
///
/// Not to be implemented.
#[diagnostic::on_unimplemented(
    message = "write `key::from_fields(\"order\", key::path_param(\"id\"))`, or a tuple of two to four fields: `{Self}` is neither",
    label = "not a field of a request",
    note = "a field is `key::header(\"..\")`, `key::query_param(\"..\")`, `key::path_param(\"..\")`, `key::json_field(\"..\")`, `form_field(\"..\")` or `extension::<T>()`",
    note = "a key function goes to `key::from_fn(|Path(id): Path<u64>| (\"order\", id))`; what is the same for each request goes to `key::fixed((\"nightly\", \"mail\"))`"
)]
pub trait Fields: sealed::Sealed {
    #[doc(hidden)]
    fn sources(self) -> Arc<[Source]>;
}

mod sealed {
    pub trait Sealed {}
}

// === impl Fields ===

impl sealed::Sealed for Field {}

impl Fields for Field {
    fn sources(self) -> Arc<[Source]> {
        Arc::new([self.source])
    }
}

macro_rules! fields {
    ($($field:ident: $type:ty),*) => {
        impl sealed::Sealed for ($($type,)*) {}

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

// === impl FromFields ===

impl FromFields {
    /// `body`: not read yet; then what the head is of no use for is said, and no more.
    async fn key(&self, head: &mut Parts, body: Option<&Bytes>) -> Result<LockKey, FieldError> {
        #[cfg(feature = "axum")]
        let path = PathParams::of(&self.sources, head).await;
        let head = &*head;
        let mut finder = Finder::new(&self.sources);
        finder.look_in_head(head);
        #[cfg(feature = "axum")]
        finder.look_in_path(&path);
        #[cfg(feature = "axum")]
        if let Some(body) = body {
            finder.look_in_form(head, body);
            finder.look_in_json(body);
        }
        finder.key(self.namespace, head, body.is_some())
    }
}

impl KeySource for FromFields {
    async fn derive(&self, head: &mut Parts, body: &mut BodyReader<'_>) -> Result<Option<LockKey>, NoKey> {
        let of_body = self.sources.iter().filter(|source| source.is_of_body()).count();
        // A bad head is answered before its body is read.
        if of_body < self.sources.len() {
            let key = self.key(head, None).await.map_err(|error| refused(error, head))?;
            if of_body == 0 {
                return Ok(Some(key));
            }
        }
        let bytes = body.read(head).await?;
        Ok(Some(self.key(head, Some(&bytes)).await.map_err(|error| refused(error, head))?))
    }
}

fn refused(error: FieldError, head: &Parts) -> NoKey {
    if error.is_of_path() && !has_route(head) {
        return NoKey::NoRoute;
    }
    let status = error.status();
    // Whoever reads the answer may not be who can mend it.
    #[cfg(feature = "tracing")]
    if status.is_server_error() {
        tracing::error!(target: "tower_lock", field = error.name(), "no key can be derived for this route: {error}");
    }
    NoKey::Rejected(Rejection::InvalidKey { status, field: Some(error), extractor: None })
}

impl fmt::Debug for FromFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FromFields").field("namespace", &self.namespace).field("fields", &self.sources).finish()
    }
}
