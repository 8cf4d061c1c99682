//! Whether a key needs the body is known from its type: who does not need it leaves the request as it is.

use std::future::{Future, ready};

use bytes::Bytes;
use http::{Request, request::Parts};

use super::key_source::{Derived, NoKey};
use crate::{key::LockKey, lock::Locks};

/// Marks what is found in the head of a request. The body stays what it was, of any type, and is not touched.
#[derive(Debug)]
pub enum FromHead {}

/// Marks what is found in the body, which is read for it and given on.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
#[derive(Debug)]
pub enum FromBody {}

/// What becomes of a body of type `B`.
#[doc(hidden)]
pub trait BodyUse<B> {
    /// What the inner service gets.
    type Body;
    /// What is kept of the request while somebody looks at the rest.
    type Kept: Send;

    fn pass(request: Request<B>) -> Request<Self::Body>;

    /// What is looked at, and what is kept. The bytes of a body that is not read are none.
    fn open(
        request: Request<B>,
        locks: &Locks,
    ) -> impl Future<Output = Result<(Parts, Bytes, Self::Kept), NoKey>> + Send;

    /// The request to go on with.
    fn close(looked_at: Parts, kept: Self::Kept, key: Option<LockKey>) -> Derived<Self::Body>;
}

/// The body is read if one of two needs it.
#[doc(hidden)]
pub trait Or<Other> {
    type Either;
}

impl Or<Self> for FromHead {
    type Either = Self;
}

#[cfg(feature = "axum")]
impl Or<FromBody> for FromHead {
    type Either = FromBody;
}

#[cfg(feature = "axum")]
impl<Other> Or<Other> for FromBody {
    type Either = Self;
}

impl<B: Send + 'static> BodyUse<B> for FromHead {
    type Body = B;
    type Kept = B;

    fn pass(request: Request<B>) -> Request<B> {
        request
    }

    fn open(request: Request<B>, _: &Locks) -> impl Future<Output = Result<(Parts, Bytes, B), NoKey>> + Send {
        let (parts, body) = request.into_parts();
        ready(Ok((parts, Bytes::new(), body)))
    }

    fn close(looked_at: Parts, body: B, key: Option<LockKey>) -> Derived<B> {
        Derived { request: Request::from_parts(looked_at, body), key, room: None }
    }
}

#[cfg(feature = "axum")]
mod from_body {
    use axum::body::Body;
    use tower::BoxError;

    use super::{BodyUse, Bytes, Derived, FromBody, LockKey, Locks, NoKey, Parts, Request};
    use crate::middleware::body_in::{self, Buffered};

    impl<B> BodyUse<B> for FromBody
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        type Body = Body;
        /// The parts, too: an extractor may take something out of those that it is shown.
        type Kept = (Parts, Buffered);

        fn pass(request: Request<B>) -> Request<Body> {
            request.map(Body::new)
        }

        async fn open(request: Request<B>, locks: &Locks) -> Result<(Parts, Bytes, Self::Kept), NoKey> {
            let room = locks.core().bodies();
            let (parts, body) = body_in::read(request.map(Body::new), room).await.map_err(NoKey::Rejected)?;
            Ok((parts.clone(), body.data(), (parts, body)))
        }

        fn close(_: Parts, (parts, body): Self::Kept, key: Option<LockKey>) -> Derived<Body> {
            let (body, room) = body.give_on();
            Derived { request: Request::from_parts(parts, body), key, room: Some(room) }
        }
    }
}
