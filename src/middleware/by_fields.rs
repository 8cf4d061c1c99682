//! Keys from fields of a request by their names.

use std::{fmt, marker::PhantomData, sync::Arc};

use bytes::Bytes;
use http::{Request, request::Parts};

#[cfg(feature = "axum")]
use super::finder::PathParams;
use super::{
    body_use::{BodyUse, Or},
    field::{Field, Source},
    field_error::FieldError,
    finder::Finder,
    key_source::{Derived, KeySource, KeySourceFor, NoKey},
    rejection::Rejection,
};
use crate::{key::LockKey, lock::Locks};

/// Keys from fields of the request, by their names: one [`Field`], or a tuple of two to four.
///
/// ```
/// # use tower_lock::{LockLayer, Locks, by_fields, header, query_param};
/// # fn layers(locks: &Locks) {
/// LockLayer::new(locks, by_fields("order", query_param("id")));                           // order:7
/// LockLayer::new(locks, by_fields("order", (header("x-tenant"), query_param("id"))));     // order:acme:7
/// # }
/// ```
///
/// A key of parsed values ([`by`](crate::by)) is better where it can be had: there whatever the handler takes for one value is one key. A
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
/// Fields of the head leave the body alone, of whatever type it is. If one field is of the body, the body is read for all of them, once.
///
/// # Errors
///
/// The answer is a problem of the type `bad-key`, which says of which field what is wrong, and never what stood in it:
/// [`Rejection::BadKey`], with a [`FieldError`]. [`LockLayer::on_reject`](crate::LockLayer::on_reject) may put another one in its place.
pub fn by_fields<F: Fields>(namespace: &'static str, fields: F) -> ByFields<F::From> {
    ByFields { namespace, sources: fields.sources(), from: PhantomData }
}

/// Keys from fields of a request. Made by [`by_fields`].
pub struct ByFields<From> {
    namespace: &'static str,
    sources: Arc<[Source]>,
    from: PhantomData<fn() -> From>,
}

/// A [`Field`], or a tuple of two to four: the parts of a key.
///
/// Not to be implemented.
#[diagnostic::on_unimplemented(
    message = "write `by_fields(\"order\", path_param(\"id\"))`, or a tuple of two to four fields: `{Self}` is neither",
    label = "not a field of a request",
    note = "a field is `header(\"..\")`, `query_param(\"..\")`, `path_param(\"..\")`, `json_field(\"..\")`, `form_field(\"..\")` or `extension::<T>()`",
    note = "a key function goes to `by(|Path(id): Path<u64>| (\"order\", id))`; what is the same for each request goes to `constant((\"nightly\", \"mail\"))`"
)]
pub trait Fields: sealed::Sealed {
    /// [`FromHead`](crate::FromHead), if all of them are.
    type From;

    #[doc(hidden)]
    fn sources(self) -> Arc<[Source]>;
}

mod sealed {
    pub trait Sealed {}
}

// === impl Fields ===

impl<A> sealed::Sealed for Field<A> {}

impl<A> Fields for Field<A> {
    type From = A;

    fn sources(self) -> Arc<[Source]> {
        Arc::new([self.source])
    }
}

/// What reads the body if one of these does.
macro_rules! either {
    ($one:ty) => { $one };
    ($one:ty, $other:ty $(, $more:ty)*) => { either!(<$one as Or<$other>>::Either $(, $more)*) };
}

macro_rules! fields {
    ($($field:ident)*, $($bound:tt)*) => {
        impl<$($field),*> sealed::Sealed for ($(Field<$field>,)*) {}

        impl<$($field),*> Fields for ($(Field<$field>,)*)
        where
            $($bound)*
        {
            type From = either!($($field),*);

            #[allow(non_snake_case, reason = "a field is named as its type")]
            fn sources(self) -> Arc<[Source]> {
                let ($($field,)*) = self;
                Arc::new([$($field.source),*])
            }
        }
    };
}

fields!(A B, A: Or<B>);
fields!(A B C, A: Or<B>, A::Either: Or<C>);
fields!(A B C D, A: Or<B>, A::Either: Or<C>, <A::Either as Or<C>>::Either: Or<D>);

// === impl ByFields ===

impl<From> ByFields<From> {
    async fn key(&self, parts: &mut Parts, body: &Bytes) -> Result<LockKey, FieldError> {
        #[cfg(feature = "axum")]
        let path = PathParams::of(&self.sources, parts).await;
        let parts = &*parts;
        let mut finder = Finder::new(&self.sources);
        finder.look_in_head(parts);
        #[cfg(feature = "axum")]
        finder.look_in_path(&path);
        #[cfg(feature = "axum")]
        finder.look_in_body(parts, body);
        #[cfg(not(feature = "axum"))]
        let _ = body;
        finder.key(self.namespace, parts)
    }
}

impl<From: 'static> KeySource for ByFields<From> {}

impl<B, From> KeySourceFor<B> for ByFields<From>
where
    B: Send + 'static,
    From: BodyUse<B> + 'static,
{
    type Body = From::Body;

    fn pass(request: Request<B>) -> Request<Self::Body> {
        From::pass(request)
    }

    async fn derive(&self, request: Request<B>, locks: &Locks) -> Result<Derived<Self::Body>, NoKey> {
        let (mut parts, body, kept) = From::open(request, locks).await?;
        let key = self.key(&mut parts, &body).await.map_err(refused)?;
        Ok(From::close(parts, kept, Some(key)))
    }
}

fn refused(error: FieldError) -> NoKey {
    let status = error.status();
    // Whoever reads the answer may not be who can mend it.
    #[cfg(feature = "tracing")]
    if status.is_server_error() {
        tracing::error!(target: "tower_lock", "no key can be made for this route: {error}");
    }
    NoKey::Rejected(Rejection::BadKey { status, field: Some(error) })
}

impl<From> Clone for ByFields<From> {
    fn clone(&self) -> Self {
        Self { namespace: self.namespace, sources: Arc::clone(&self.sources), from: PhantomData }
    }
}

impl<From> fmt::Debug for ByFields<From> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ByFields").field("namespace", &self.namespace).field("fields", &self.sources).finish()
    }
}
