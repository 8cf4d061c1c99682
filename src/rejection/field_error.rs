//! Why a field of a request gives no key.

use std::fmt;

use http::StatusCode;

/// Error of a field that cannot be a part of a key, or an idempotency key: the name of the field
/// and the reason.
///
/// The error does not contain the value of the field. It is a part of
/// [`Rejection::InvalidKey`](crate::Rejection::InvalidKey) and
/// [`Rejection::IdempotencyKeyInvalid`](crate::Rejection::IdempotencyKeyInvalid).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct FieldError {
    pub(crate) location: FieldLocation,
    pub(crate) name: &'static str,
    pub(crate) problem: FieldProblem,
}

/// Reason why a field cannot be a part of a key. The text follows the name of the field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FieldProblem {
    /// The field is missing.
    #[error("is missing")]
    Missing,
    /// The field is empty.
    #[error("is empty")]
    Empty,
    /// The field occurs more than once. One reader may use the first value, and another one the
    /// last.
    #[error("is duplicated")]
    Duplicate,
    /// The value is a header that is not visible ASCII, or a path parameter that is not UTF-8.
    #[error("is not readable text")]
    NotText,
    /// The value has leading or trailing whitespace or control characters, and the handler may trim
    /// them.
    #[error("has leading or trailing whitespace or control characters")]
    SurroundingWhitespace,
    /// The value is a number, but not a canonical integer (`01`, `+1`, `-0`, `1.0`, `1e3`).
    #[error("is a number in non-canonical form (leading zero, plus sign, fraction or exponent)")]
    NonCanonicalNumber,
    /// The value in JSON is not a string, a boolean or an integer between -2^53 and 2^53.
    ///
    /// A reader that parses numbers as floats cannot distinguish larger integers.
    #[error("is not a string, a boolean or an integer between -2^53 and 2^53")]
    WrongType,
    /// The body is not JSON.
    #[error("cannot be read: the body is not valid JSON")]
    InvalidJson,
    /// The body is JSON, but not an object.
    #[error("cannot be found: the body is not a JSON object")]
    NotAnObject,
    /// The value is no ticket, or that of another key.
    #[error("is not a ticket for this resource")]
    NotATicket,
    /// The value is an idempotency key of more than 255 characters.
    #[error("has more than 255 characters")]
    TooLong,
    /// The value is not an idempotency key.
    ///
    /// A header has a string of RFC 9651 without parameters (`"8e03978e"`), or the key itself,
    /// without spaces, quotes, commas and semicolons. Any other field has printable ASCII.
    #[error("is neither a string in double quotes (RFC 9651) nor a text of visible ASCII characters")]
    MalformedIdempotencyKey,
}

/// The part of a request that has a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldLocation {
    Header,
    Query,
    Extension,
    Path,
    Json,
    Form,
}

impl FieldError {
    /// Returns the name of the field, as passed to [`header`](crate::key::header) and the other
    /// functions. For an [`extension`](crate::key::extension) it is the name of its type.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the reason.
    #[must_use]
    pub fn problem(&self) -> FieldProblem {
        self.problem
    }

    /// Returns the status of a [`Rejection::InvalidKey`](crate::Rejection::InvalidKey).
    ///
    /// It is 422 for a field of a body that could be read. It is 500 for a mistake of the service:
    /// no layer inserts the extension, or the route does not have the path parameter. Otherwise it
    /// is 400.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match (self.location, self.problem) {
            (FieldLocation::Extension, _) => StatusCode::INTERNAL_SERVER_ERROR,
            (FieldLocation::Path, FieldProblem::Missing | FieldProblem::Duplicate) => StatusCode::INTERNAL_SERVER_ERROR,
            (_, FieldProblem::InvalidJson) => StatusCode::BAD_REQUEST,
            (FieldLocation::Json | FieldLocation::Form, _) => StatusCode::UNPROCESSABLE_ENTITY,
            _ => StatusCode::BAD_REQUEST,
        }
    }

    /// Whether the route has no such parameter, or no route matched.
    pub(crate) fn is_missing_path_param(&self) -> bool {
        self.location == FieldLocation::Path && self.problem == FieldProblem::Missing
    }

    /// The error for the operator of the service. Clients need not know the names of Rust types.
    pub(crate) fn log_text(&self) -> String {
        let Self { location, name, problem } = self;
        match (location, problem) {
            (FieldLocation::Extension, _) => format!(
                "no extension of type `{name}` was found: put the layer that inserts it outside of the lock layer"
            ),
            (FieldLocation::Path, FieldProblem::Missing) => {
                format!("the path of this route has no parameter `{{{name}}}`")
            }
            _ => self.to_string(),
        }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { location, name, problem } = self;
        // Clients need not know the names of Rust types.
        if *location == FieldLocation::Extension {
            return write!(f, "a value that the service provides {problem}");
        }
        let location = match location {
            FieldLocation::Header => "header",
            FieldLocation::Query => "query parameter",
            FieldLocation::Extension => "extension",
            FieldLocation::Path => "path parameter",
            FieldLocation::Json => "JSON field",
            FieldLocation::Form => "form field",
        };
        write!(f, "{location} `{name}` {problem}")
    }
}
