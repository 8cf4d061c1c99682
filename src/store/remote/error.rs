//! The text of an error: its server, its causes, and a hint for the operator.

use std::{error::Error, fmt::Display};

/// The error of a call, whose text contains its causes, so that the result has no source. Adds a
/// hint, which may be empty. `server`: the name of the server before the error, unless the text
/// around it has the name.
pub(crate) fn with_hint(server: Option<&dyn Display>, error: impl Display, hint: &str) -> Box<dyn Error + Send + Sync> {
    let server = server.map_or_else(String::new, |server| format!("{server}: "));
    let hint = if hint.is_empty() { String::new() } else { format!(" ({hint})") };
    format!("{server}{error}{hint}").into()
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
