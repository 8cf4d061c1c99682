use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Extensions, Method, Request, Response, StatusCode};
use http_body::Body;
use tokio::time::Instant;
use tower::{BoxError, Service, ServiceExt, util::Oneshot};

use super::{
    body_out::ResponseBody,
    config::Config,
    future::ResponseFuture,
    key_source::{Derived, KeySourceFor, NoKey},
    locks_layer::Outside,
    rejection::{OnReject, Rejection, RejectionBody},
    section::Section,
    trace::{LockSpan, Route},
};
use crate::{
    key::LockKey,
    lock::{Ask, LockFuture, LockLost, Owner, Policy},
};

/// Runs the inner service under the lock of the request. Made by [`LockLayer`](crate::LockLayer).
///
/// It adds no error of its own: whoever is turned away gets a response.
pub struct LockService<S, K> {
    inner: S,
    config: Arc<Config<K>>,
}

impl<S, K> LockService<S, K> {
    pub(super) fn new(inner: S, config: Arc<Config<K>>) -> Self {
        Self { inner, config }
    }
}

impl<S, K, B, ResB> Service<Request<B>> for LockService<S, K>
where
    B: Send + 'static,
    K: KeySourceFor<B, Body: Send + 'static>,
    S: Service<Request<K::Body>, Response = Response<ResB>, Error: Send + 'static, Future: Send + 'static>
        + Clone
        + Send
        + 'static,
    ResB: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<ResponseBody<ResB>>;
    type Error = S::Error;
    type Future = ResponseFuture<Oneshot<S, Request<K::Body>>, ResB, S::Error>;

    /// Always ready: a request that waits for its lock must not sit on the capacity of the inner service.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let inner = self.inner.clone();
        let (request, skipped) = self.config.skips(request);
        if skipped {
            return ResponseFuture::passing(inner.oneshot(K::pass(request)));
        }
        ResponseFuture::locked(Box::pin(locked(Arc::clone(&self.config), inner, request)))
    }
}

/// The way of a request that asks for a lock: its key, its turn, the inner service, its end.
async fn locked<S, K, B, ResB>(
    config: Arc<Config<K>>,
    mut inner: S,
    request: Request<B>,
) -> Result<Response<ResponseBody<ResB>>, S::Error>
where
    K: KeySourceFor<B>,
    S: Service<Request<K::Body>, Response = Response<ResB>>,
    ResB: Body<Data = Bytes, Error: Into<BoxError>>,
{
    let route = Route::of(request.extensions(), config.name);
    let outside = Outside::of(request.extensions());
    let policy = Outside::policy(outside.as_ref(), config.policy, &config.locks);
    let on_reject = config.on_reject.or(outside.as_ref().map(Outside::on_reject));
    let is_head = request.method() == Method::HEAD;

    let (mut request, key, room) = match config.key.derive(request, &config.locks).await {
        Ok(Derived { request, key: Some(key), room }) => (request, key, room),
        Ok(Derived { request, key: None, room }) => {
            let ready = inner.ready().await?;
            drop(room);
            return Ok(ready.call(request).await?.map(ResponseBody::passing));
        }
        Err(no_key) => return Ok(no_key.answer(&route, on_reject).map(ResponseBody::rejected)),
    };

    let owner = OwnerOfRequest::of(request.extensions());
    let mut section = match config.enter(&route, key, &policy, &owner).await {
        Ok(section) => section,
        Err(rejection) => return Ok(on_reject.answer(rejection).map(ResponseBody::rejected)),
    };

    request.extensions_mut().insert(owner.owner.clone());
    request.extensions_mut().insert(section.view());
    let handler = async {
        // Only now: a request that waits must not sit on the capacity of the inner service.
        let ready = inner.ready().await?;
        // Its body waits no longer.
        drop(room);
        section.span().around(|| ready.call(request)).await
    };
    let (head, body) = match section.view().while_held(owner.owner.scope(handler)).await {
        Ok(Ok(response)) => response.into_parts(),
        Ok(Err(error)) => {
            section.has_failed();
            section.end().await;
            return Err(error);
        }
        Err(why) => return Ok(broken_off(section, why, on_reject)),
    };

    if head.status.is_client_error() || head.status.is_server_error() {
        section.has_failed();
    }

    let has_content = !is_head && !matches!(head.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if !has_content {
        return Ok(Response::from_parts(head, ResponseBody::without_content(body, section).await));
    }
    Ok(match ResponseBody::under(section, body).await {
        Ok(body) => Response::from_parts(head, body),
        Err((section, why)) => broken_off(section, why, on_reject),
    })
}

/// The lock was lost before anything was sent: what was done under it is not known.
fn broken_off<B>(section: Section, why: LockLost, on_reject: &OnReject) -> Response<ResponseBody<B>> {
    section.lost(why);
    let rejection = if why == LockLost::LimitReached { Rejection::MaxHold } else { Rejection::Lost };
    on_reject.answer(rejection).map(ResponseBody::rejected)
}

/// Who the request is: whoever a layer further out said it is.
struct OwnerOfRequest {
    owner: Owner,
    /// The layer that says so first also says when it is over.
    is_ours: bool,
}

impl OwnerOfRequest {
    fn of(extensions: &Extensions) -> Self {
        match extensions.get::<Owner>().filter(|owner| !owner.is_retired()) {
            Some(owner) => Self { owner: owner.clone(), is_ours: false },
            None => Self { owner: Owner::new(), is_ours: true },
        }
    }
}

impl<K> Config<K> {
    fn skips<B>(&self, request: Request<B>) -> (Request<B>, bool) {
        let Some(skip) = &self.skip else { return (request, false) };
        let (head, body) = request.into_parts();
        let skips = skip(&head);
        (Request::from_parts(head, body), skips)
    }

    async fn enter(
        &self,
        route: &Route,
        key: LockKey,
        policy: &Policy,
        of_request: &OwnerOfRequest,
    ) -> Result<Section, Rejection> {
        let mut span = LockSpan::waiting(route, &key, policy);
        let began = Instant::now();
        let ask = Ask {
            key,
            wait: policy.request_wait(),
            terms: policy.request_terms(),
            owner: Some(of_request.owner.clone()),
            route: route.label(),
        };
        match LockFuture::new(Arc::clone(self.locks.core()), ask).await {
            Ok(guard) => {
                span.granted(&guard, began.elapsed());
                let owner = of_request.owner.clone();
                Ok(Section::new(guard, span, Arc::clone(&self.usual_hold), owner, of_request.is_ours))
            }
            Err(error) => {
                span.turned_away(&error, began.elapsed());
                Err(Rejection::of(error, &self.usual_hold))
            }
        }
    }
}

impl NoKey {
    fn answer(self, route: &Route, on_reject: &OnReject) -> Response<RejectionBody> {
        match self {
            Self::Answered(mut response) => {
                LockSpan::without_key(route, "bad_key");
                let status = response.status();
                response.extensions_mut().insert(Rejection::BadKey { status, field: None });
                response
            }
            Self::Rejected(rejection) => {
                let result = match rejection {
                    Rejection::BodyTooLarge => "body_too_large",
                    Rejection::BodiesFull { .. } => "bodies_full",
                    _ => "bad_key",
                };
                LockSpan::without_key(route, result);
                on_reject.answer(rejection)
            }
        }
    }
}

impl<S: Clone, K> Clone for LockService<S, K> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), config: Arc::clone(&self.config) }
    }
}

impl<S: fmt::Debug, K> fmt::Debug for LockService<S, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockService").field("inner", &self.inner).finish_non_exhaustive()
    }
}
