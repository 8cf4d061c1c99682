//! What a request asks of the console, and the rules for it. Nothing here has effects.

use http::{Extensions, StatusCode, Uri, request::Parts};

use crate::{
    lock_key::LockKey,
    origin::is_same_origin,
    store::{StoreError, StoreErrorKind},
};

/// Each is a route, so that one of the application for all paths does not win. The fallback has the
/// others below the address of the console.
pub(super) const PATHS: &str = "/ /keys /key /revoke /style.css /api/holding /api/keys /api/key /api/revoke";

/// What the client of a request may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nothing: each path gets 403, the style sheet included.
    Denied,
    /// Open all pages.
    Read,
    /// Open all pages, and revoke locks.
    Revoke {
        /// The name of the operator, for the event of each revocation.
        operator: String,
    },
}

/// Why a request is refused.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) StatusCode, pub(super) String);

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        let status = match error.kind() {
            StoreErrorKind::InvalidKey => StatusCode::BAD_REQUEST,
            StoreErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        // Without its cause, which may have the address of a server.
        Self(status, error.to_string())
    }
}

/// The methods of a path.
pub(super) fn methods(path: &str) -> &'static str {
    if path.ends_with("/revoke") { "POST" } else { "GET, HEAD" }
}

/// Whether the client may send this request.
pub(super) fn check(access: &Access, head: &Parts) -> Result<(), Refusal> {
    let (path, forbidden) = (head.uri.path(), |why: &str| Err(Refusal(StatusCode::FORBIDDEN, why.to_owned())));
    let methods = methods(path);
    if *access == Access::Denied {
        return forbidden("You may not open this page.");
    }
    if !PATHS.split(' ').any(|known| known == path) {
        return Err(Refusal(StatusCode::NOT_FOUND, "The console has no such page.".to_owned()));
    }
    if !methods.split(", ").any(|allowed| allowed == head.method.as_str()) {
        return Err(Refusal(StatusCode::METHOD_NOT_ALLOWED, format!("This page has the methods {methods}.")));
    }
    if methods == "POST" && !matches!(access, Access::Revoke { .. }) {
        return forbidden("You may only read.");
    }
    if methods == "POST" && !is_same_origin(&head.headers) {
        return forbidden(
            "The request does not show that it comes from this page. A browser shows it over HTTPS, and over HTTP on \
             localhost. A program sends the header `x-tower-lock: 1`.",
        );
    }
    Ok(())
}

/// The path in front of those of the console: what the routers around it have removed.
pub(super) fn prefix(extensions: &Extensions, uri: &Uri) -> String {
    let original = extensions.get().map_or(uri.path(), |original: &axum::extract::OriginalUri| original.0.path());
    let rest = if uri.path() == "/" { "" } else { uri.path() };
    let prefix = original.strip_suffix(rest).unwrap_or_default().trim_end_matches('/');
    // A link that begins with two slashes is one to another host.
    if prefix.starts_with("//") { String::new() } else { prefix.to_owned() }
}

/// The first value of a field of a query or a form.
pub(super) fn field(query: &str, name: &str) -> Option<String> {
    let mut fields = form_urlencoded::parse(query.as_bytes());
    fields.find(|(field, value)| field == name && !value.is_empty()).map(|(_, value)| value.into_owned())
}

/// The key that a query names.
pub(super) fn key(query: &str) -> Result<LockKey, Refusal> {
    let name = field(query, "name").unwrap_or_default();
    let key = if field(query, "raw").is_some() { LockKey::raw(name).ok() } else { LockKey::parse(&name) };
    key.ok_or_else(|| {
        let rule = "No key has this name: a name is one that a page or a log shows, of at most 256 bytes. One that \
                    another program chose is raw, and has at most 1,024.";
        Refusal(StatusCode::BAD_REQUEST, rule.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_has_no_part_of_a_url() {
        let cause = "redis://ann:secret@10.0.0.7:6379: connection refused";
        for operation in ["list", "inspect", "force-release"] {
            let error = StoreError::new("redis", operation, StoreErrorKind::Unavailable).with_source(cause);
            let Refusal(status, message) = error.into();
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(message, format!("the redis store cannot be reached to {operation} a lock"));
        }
    }

    #[test]
    fn prefix_is_what_the_routers_around_have_removed() {
        for (original, inner, expected) in [
            ("/ops/locks", "/", "/ops/locks"),
            ("/ops/locks/", "/", "/ops/locks"),
            ("/ops/locks/api/key", "/api/key", "/ops/locks"),
            ("/keys", "/keys", ""),
            ("/", "/", ""),
            ("//host/keys", "/keys", ""),
        ] {
            let mut extensions = Extensions::new();
            let uri = |path: &'static str| Uri::from_static(path);
            extensions.insert(axum::extract::OriginalUri(uri(original)));
            assert_eq!(prefix(&extensions, &uri(inner)), expected, "{original}");
        }
    }
}
