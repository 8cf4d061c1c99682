//! Responses to requests that are rejected before their lock is requested.

use http::{Response, StatusCode, request::Parts};

use crate::{
    key_source::{KeyRejection, has_matched_route},
    rejection::{OnReject, Rejection, RejectionBody},
    telemetry::{
        route::Route,
        span::{LockSpan, RejectionCause},
    },
};

const BODY_TOO_LARGE: &str = "its body is longer than the `DefaultBodyLimit` outside of the layer (2 MiB if there is none), or \
                              than 64 MiB. With `request_body(RequestBodyMode::Stream)` a `LockLayer` reads no body before \
                              the lock; a `ReplayLayer` always does";
const NO_SCOPE: &str = "the scope of the `ReplayLayer` returned `None`, and the layer requires a key";

impl KeyRejection {
    /// Replaces the server error of an extractor that needs a matched route by 404 if no route
    /// matched. A layer on a whole router also sees such requests.
    pub(crate) fn or_no_route(self, head: &Parts) -> Self {
        match &self {
            Self::Response(response, Some(extractor))
                if response.status().is_server_error() && reads_matched_path(extractor) && !has_matched_route(head) =>
            {
                Self::NoRoute
            }
            _ => self,
        }
    }

    pub(crate) fn into_response(self, route: &Route, on_reject: &OnReject) -> Response<RejectionBody> {
        let (result, cause, rejection) = match self {
            Self::Response(mut response, extractor) => {
                let extractor = extractor.map(short_type_name);
                let status = response.status();
                let cause = extractor.as_deref().map(|name| RejectionCause {
                    extractor: Some(name),
                    ..RejectionCause::of(extractor_error(name, status))
                });
                LockSpan::rejected_before_lock(route, "invalid_key", status, cause);
                response.extensions_mut().insert(Rejection::InvalidKey { status, field: None, extractor });
                return response;
            }
            Self::Rejection(rejection) => {
                let (result, cause) = match &rejection {
                    Rejection::BodyTimeout => ("body_timeout", None),
                    Rejection::BodyTooLarge => ("body_too_large", Some(RejectionCause::of(BODY_TOO_LARGE))),
                    Rejection::BodyBufferFull { .. } => ("body_buffer_full", None),
                    Rejection::InvalidKey { field: Some(error), .. } => {
                        let field = Some(error.name());
                        ("invalid_key", Some(RejectionCause { field, ..RejectionCause::of(error.log_text()) }))
                    }
                    _ => ("invalid_key", None),
                };
                (result, cause, rejection)
            }
            Self::KeyCount(error) => {
                let status = StatusCode::UNPROCESSABLE_ENTITY;
                ("invalid_key", Some(RejectionCause::of(error.to_string())), Rejection::invalid_key(status))
            }
            Self::NoScope => {
                ("invalid_key", Some(RejectionCause::of(NO_SCOPE)), Rejection::invalid_key(StatusCode::BAD_REQUEST))
            }
            Self::Mistake(text) => {
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                ("invalid_key", Some(RejectionCause::of(text)), Rejection::invalid_key(status))
            }
            Self::NoRoute => ("no_route", None, Rejection::invalid_key(StatusCode::NOT_FOUND)),
        };
        LockSpan::rejected_before_lock(route, result, rejection.status(), cause);
        on_reject.respond(rejection)
    }
}

/// The text of an extractor's rejection for the operator of the service.
fn extractor_error(name: &str, status: StatusCode) -> String {
    let mut text = format!("extractor `{name}` of the key function rejected the request");
    if status.is_server_error() {
        text += ". A layer that inserts an extension must be outside of the lock layer, and a path parameter must be in \
                 the route";
    }
    text
}

/// Whether this is an extractor of Axum that reads the matched route.
fn reads_matched_path(extractor: &str) -> bool {
    ["axum::extract::path::", "axum::extract::matched_path::"].iter().any(|module| extractor.starts_with(module))
}

/// Removes the modules: `Json<Claim>` for `axum::json::Json<shop::Claim>`.
fn short_type_name(name: &str) -> String {
    let mut short = String::with_capacity(name.len());
    for part in name.split_inclusive(|c: char| !(c.is_alphanumeric() || "_:{}".contains(c))) {
        short.push_str(part.rsplit("::").next().unwrap_or(part));
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extractor_names_omit_modules() {
        for (name, short) in [
            ("axum::json::Json<shop::Claim>", "Json<Claim>"),
            ("axum::extract::path::Path<(u64, alloc::string::String)>", "Path<(u64, String)>"),
            ("axum_extra::TypedHeader<a::b_c::D<&str>>", "TypedHeader<D<&str>>"),
            ("axum::json::Json<shop::pay::{{closure}}::Claim>", "Json<Claim>"),
            ("Plain", "Plain"),
        ] {
            assert_eq!(short_type_name(name), short);
        }
    }
}
