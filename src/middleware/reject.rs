//! Responses to requests that are rejected before their lock is requested.

use http::{Response, StatusCode, request::Parts};

use crate::{
    key_source::{NoKey, has_route},
    rejection::{OnReject, Rejection, RejectionBody},
    telemetry::{route::Route, span::LockSpan},
};

impl NoKey {
    /// A layer on a whole router sees requests that no route of it has matched: what says so as a mistake of the service is none.
    pub(super) fn of(self, head: &Parts) -> Self {
        match &self {
            Self::Answered(response, Some(extractor))
                if response.status().is_server_error() && reads_the_route(extractor) && !has_route(head) =>
            {
                Self::NoRoute
            }
            _ => self,
        }
    }

    pub(super) fn answer(self, route: &Route, on_reject: &OnReject) -> Response<RejectionBody> {
        match self {
            Self::Answered(mut response, extractor) => {
                let extractor = extractor.map(without_modules);
                let status = response.status();
                LockSpan::without_key(route, "bad_key", status, extractor.as_deref());
                response.extensions_mut().insert(Rejection::InvalidKey { status, field: None, extractor });
                response
            }
            Self::Rejected(rejection) => {
                let result = match rejection {
                    Rejection::BodyTimeout => "body_timeout",
                    Rejection::BodyTooLarge => "body_too_large",
                    Rejection::BodyBufferFull { .. } => "bodies_full",
                    _ => "bad_key",
                };
                LockSpan::without_key(route, result, rejection.status(), None);
                on_reject.answer(rejection)
            }
            Self::NoRoute => {
                let status = StatusCode::NOT_FOUND;
                LockSpan::without_key(route, "no_route", status, None);
                on_reject.answer(Rejection::InvalidKey { status, field: None, extractor: None })
            }
        }
    }
}

/// Axum's own, of what its router has matched.
fn reads_the_route(extractor: &str) -> bool {
    ["axum::extract::path::", "axum::extract::matched_path::"].iter().any(|module| extractor.starts_with(module))
}

/// `axum::json::Json<shop::Claim>` is `Json<Claim>` to whoever reads it.
fn without_modules(name: &str) -> String {
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
            assert_eq!(without_modules(name), short);
        }
    }
}
