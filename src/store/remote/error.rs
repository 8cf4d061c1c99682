//! The text of an error: its server, its causes, and a hint for the operator.

use std::{error::Error, fmt};

/// An error of a call. Its text contains the causes, so that it has no source.
#[derive(Debug, thiserror::Error)]
#[error("{server}{error}{hint}")]
struct WithHint<E> {
    server: String,
    // Not named `source`: that would repeat the causes.
    error: E,
    hint: String,
}

/// Adds a hint, which may be empty. `server`: the name of the server before the error, unless the
/// text around it has the name.
pub(crate) fn with_hint(
    server: Option<&dyn fmt::Display>,
    error: impl fmt::Debug + fmt::Display + Send + Sync + 'static,
    hint: &str,
) -> Box<dyn Error + Send + Sync> {
    let server = server.map_or_else(String::new, |server| format!("{server}: "));
    let hint = if hint.is_empty() { String::new() } else { format!(" ({hint})") };
    Box::new(WithHint { server, error, hint })
}

/// An error and its causes on one line, without control characters: a server may have chosen the
/// text.
pub(crate) fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text += &format!(": {message}");
        }
        cause = error.source();
    }
    escape_control(&text)
}

/// A text that another program has chosen, without control characters.
pub(crate) fn escape_control(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
