//! What a request asks of the console, and the rules for it. Nothing here has effects.

use http::{Extensions, HeaderMap, Method, StatusCode, Uri};

use crate::{
    lock_key::LockKey,
    origin::is_same_origin,
    store::{Cursor, StoreError, StoreErrorKind},
};

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

/// What a request asks for. A JSON path has the same values as its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Style,
    Process,
    Keys,
    Key,
    Revoke,
}

/// Why a request is refused.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) message: String,
    /// Of a 405.
    pub(super) allow: Option<&'static str>,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), allow: None }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        let status = match error.kind() {
            StoreErrorKind::InvalidKey => StatusCode::BAD_REQUEST,
            StoreErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        // Without its cause, which may have the address of a server.
        Self::new(status, error.to_string())
    }
}

/// What a request may do. It is decided before anything is called.
pub(super) fn permitted(access: &Access, method: &Method, path: &str, headers: &HeaderMap) -> Result<View, Refusal> {
    if *access == Access::Denied {
        return Err(Refusal::new(StatusCode::FORBIDDEN, "You may not open this page."));
    }
    let view = match path.strip_prefix("/api").unwrap_or(path) {
        "/" | "/holding" => View::Process,
        "/keys" => View::Keys,
        "/key" => View::Key,
        "/revoke" => View::Revoke,
        "/style.css" => View::Style,
        _ => return Err(Refusal::new(StatusCode::NOT_FOUND, "The console has no such page.")),
    };
    let allow = if view == View::Revoke { "POST" } else { "GET, HEAD" };
    if !allow.split(", ").any(|allowed| allowed == method.as_str()) {
        let refusal = Refusal::new(StatusCode::METHOD_NOT_ALLOWED, format!("This page has the methods {allow}."));
        return Err(Refusal { allow: Some(allow), ..refusal });
    }
    if view == View::Revoke {
        if !matches!(access, Access::Revoke { .. }) {
            return Err(Refusal::new(StatusCode::FORBIDDEN, "You may only read."));
        }
        if !is_same_origin(headers) {
            return Err(Refusal::new(
                StatusCode::FORBIDDEN,
                "The request does not show that it comes from this page. A browser shows it over HTTPS, and over HTTP \
                 on localhost. A program sends the header `x-tower-lock: 1`.",
            ));
        }
    }
    Ok(view)
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
        Refusal::new(StatusCode::BAD_REQUEST, rule)
    })
}

pub(super) fn cursor(query: &str) -> Option<Cursor> {
    field(query, "after").map(Cursor::new)
}

/// The error of a listing. After a page, the cursor is wrong, and not the store.
pub(super) fn listing_failed(error: StoreError, has_cursor: bool) -> Refusal {
    match error.kind() {
        StoreErrorKind::Unsupported if has_cursor => Refusal::new(
            StatusCode::BAD_REQUEST,
            "The position is that of another store, or is old. Start at the first page.",
        ),
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_has_no_part_of_a_url() {
        let cause = "redis://ann:secret@10.0.0.7:6379: connection refused";
        for operation in ["list", "inspect", "force-release"] {
            let error = StoreError::new("redis", operation, StoreErrorKind::Unavailable).with_source(cause);
            let Refusal { status, message, .. } = error.into();
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
