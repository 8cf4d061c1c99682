use std::{error::Error, fmt};

use http::StatusCode;

/// A field of a request that no key can be made of: which one, and why. Never what stands in it.
///
/// In [`Rejection::InvalidKey`](crate::Rejection::InvalidKey).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldError {
    pub(crate) place: Place,
    pub(crate) name: &'static str,
    pub(crate) problem: FieldProblem,
}

/// What is wrong with a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FieldProblem {
    /// It is not there.
    Missing,
    /// It is there, and has no character.
    Empty,
    /// Its name is there more than once: who reads it may take the first, or the last.
    Duplicate,
    /// It is a header of other bytes than visible ASCII, or a path that is not UTF-8.
    NotText,
    /// It begins or ends with a blank or a control character, which a handler may trim.
    SurroundingWhitespace,
    /// It reads as a number, and is not spelled as integers are: `01`, `+1`, `-0`, `1.0`, `1e3`.
    NonCanonicalNumber,
    /// In JSON, it is none of a string, a bool and an integer between -2^53 and 2^53: beyond them, readers that know floats alone take two integers
    /// for one.
    WrongType,
    /// The body is no JSON.
    InvalidJson,
    /// The body is JSON, and no object.
    NotAnObject,
}

/// Where in a request a field is.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Header,
    Query,
    Extension,
    #[cfg(feature = "axum")]
    Path,
    #[cfg(feature = "axum")]
    Json,
    #[cfg(feature = "axum")]
    Form,
}

impl FieldError {
    /// The name of the field, as it was given to [`header`](crate::key::header) and its like; the name of the type of an
    /// [`extension`](crate::key::extension).
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What is wrong with it.
    #[must_use]
    pub fn problem(&self) -> FieldProblem {
        self.problem
    }

    /// 400; 422 where a body could be read, and its field is of no use; 500 where it is not the client who forgot something: an extension
    /// that nobody has put there, a parameter that the route does not have.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match (self.place, self.problem) {
            (Place::Extension, _) => StatusCode::INTERNAL_SERVER_ERROR,
            #[cfg(feature = "axum")]
            (Place::Path, FieldProblem::Missing | FieldProblem::Duplicate) => StatusCode::INTERNAL_SERVER_ERROR,
            (_, FieldProblem::InvalidJson) => StatusCode::BAD_REQUEST,
            #[cfg(feature = "axum")]
            (Place::Json | Place::Form, _) => StatusCode::UNPROCESSABLE_ENTITY,
            _ => StatusCode::BAD_REQUEST,
        }
    }
}

impl FieldError {
    /// The route has no such parameter, or none was matched.
    pub(crate) fn is_of_path(&self) -> bool {
        #[cfg(feature = "axum")]
        return self.place == Place::Path && self.problem == FieldProblem::Missing;
        #[cfg(not(feature = "axum"))]
        false
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, name, problem } = self;
        // The name of a Rust type is no matter of the client.
        if *place == Place::Extension {
            return write!(f, "a value that the service should have put there {problem}");
        }
        let place = match place {
            Place::Header => "header",
            Place::Query => "query parameter",
            Place::Extension => "extension",
            #[cfg(feature = "axum")]
            Place::Path => "path parameter",
            #[cfg(feature = "axum")]
            Place::Json => "JSON field",
            #[cfg(feature = "axum")]
            Place::Form => "form field",
        };
        write!(f, "the {place} `{name}` {problem}")
    }
}

impl Error for FieldError {}

impl fmt::Display for FieldProblem {
    /// Goes on after the name of the field.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Missing => "is missing",
            Self::Empty => "is empty",
            Self::Duplicate => "is there more than once",
            Self::NotText => "is no readable text",
            Self::SurroundingWhitespace => "begins or ends with a blank",
            Self::NonCanonicalNumber => {
                "reads as a number, and must then be written in plain digits, without a leading zero or plus"
            }
            Self::WrongType => "is no string, no bool and no integer between -2^53 and 2^53",
            Self::InvalidJson => "cannot be read: the body is no JSON",
            Self::NotAnObject => "cannot be found: the body is no JSON object",
        })
    }
}
