//! The common parts of all pages, in HTML. No script, and no style but that of `style.css`.

use std::fmt::Display;

use super::{
    Console,
    text::{key_text, text},
};
use crate::{limits::MAX_RAW_KEY_BYTES, lock_key::LockKey};

/// A table in a region that scrolls: its caption, its heads, and the cells of its rows.
pub(super) fn table<const N: usize>(id: &str, caption: &str, heads: [&str; N], rows: Vec<[String; N]>) -> String {
    if rows.is_empty() {
        return format!("<p id=\"{id}\">{caption}: none.</p>");
    }
    let row = |cells: [String; N]| {
        let (first, rest) = cells.split_first().expect("a table has columns");
        format!("<tr><th scope=\"row\">{first}</th><td>{}</td></tr>\n", rest.join("</td><td>"))
    };
    let rows: String = rows.into_iter().map(row).collect();
    let heads = heads.join("</th><th scope=\"col\">");
    format!(
        "<div class=\"scroll\" role=\"region\" aria-label=\"{caption}\" tabindex=\"0\"><table id=\"{id}\">\
         <caption>{caption}</caption><thead><tr><th scope=\"col\">{heads}</th></tr></thead><tbody>\n{rows}</tbody></table></div>\n"
    )
}

impl Console {
    /// A whole page. The title is a text, the content is HTML.
    pub(super) fn page(&self, title: impl Display, content: impl Display) -> String {
        let (prefix, title) = (text(&self.prefix), text(title));
        let root = if prefix.is_empty() { "/" } else { &prefix };
        let why = if self.keys_redacted {
            "<p id=\"redacted\">Keys are redacted, because the log of this service redacts them. Type the name of a \
             key to open it.</p>\n"
        } else {
            ""
        };
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <title>{title} – Locks</title><link rel=\"stylesheet\" href=\"{prefix}/style.css\"></head>\n<body>\n\
             <nav aria-label=\"Console\"><a href=\"{root}\">This process</a> <a href=\"{prefix}/keys\">All keys</a>\n\
             <form id=\"open\" action=\"{prefix}/key\"><label for=\"name\">Key</label> \
             <input id=\"name\" name=\"name\" required maxlength=\"{MAX_RAW_KEY_BYTES}\" autocomplete=\"off\"> \
             <input id=\"raw\" name=\"raw\" type=\"checkbox\" value=\"1\"> <label for=\"raw\">raw</label> \
             <button>Open</button></form></nav>\n<main>\n<h1>{title}</h1>\n{why}{content}</main>\n</body>\n</html>\n",
        )
    }

    /// The text of a key, with a link to its page.
    pub(super) fn link(&self, key: &LockKey) -> String {
        if self.keys_redacted {
            return key_text(key);
        }
        format!("<a href=\"{}/key?{}\">{}</a>", text(&self.prefix), text(key.as_query()), key_text(key))
    }
}
