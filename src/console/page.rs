//! The views as HTML. No script, and no style but that of `style.css`.

use std::{fmt::Display, time::Duration};

use tokio::time::Instant;

use super::{
    text::{Count, KeyText, Short, Text},
    views::{Done, KeyPage, KeyRow, KeyView, KeysView, ProcessView, age, held_by},
};
use crate::{
    fencing::FencingToken,
    limits::{MAX_HOLDERS, MAX_RAW_KEY_BYTES},
    lock::Rfc3339,
    lock_key::LockKey,
    store::Holder,
};

/// What all pages have in common.
pub(super) struct Frame {
    /// The path of the console, without a slash at its end.
    pub(super) prefix: String,
    pub(super) keys_redacted: bool,
}

/// A table in a region that scrolls: its caption, its heads, and its rows.
fn table<const N: usize>(id: &str, caption: &str, heads: [&str; N], rows: &[[String; N]]) -> String {
    if rows.is_empty() {
        return format!("<p id=\"{id}\">{caption}: none.</p>");
    }
    let heads: String = heads.iter().map(|head| format!("<th scope=\"col\">{head}</th>")).collect();
    let row = |cells: &[String; N]| {
        let (first, rest) = cells.split_first().expect("a table has columns");
        let rest: String = rest.iter().map(|cell| format!("<td>{cell}</td>")).collect();
        format!("<tr><th scope=\"row\">{first}</th>{rest}</tr>\n")
    };
    let rows: String = rows.iter().map(row).collect();
    format!(
        "<div class=\"scroll\" role=\"region\" aria-label=\"{caption}\" tabindex=\"0\"><table id=\"{id}\">\
         <caption>{caption}</caption><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>\n"
    )
}

impl Frame {
    /// A whole page. The title is a text, the content is HTML.
    pub(super) fn page(&self, title: impl Display, content: impl Display) -> String {
        let prefix = Text(&self.prefix);
        let root = Text(if self.prefix.is_empty() { "/" } else { &self.prefix });
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
            title = Text(title),
        )
    }

    /// The text of a key, with a link to its page.
    fn link(&self, key: &LockKey) -> String {
        if self.keys_redacted {
            return KeyText(key).to_string();
        }
        format!("<a href=\"{}/key?{}\">{}</a>", Text(&self.prefix), Text(key.as_query()), KeyText(key))
    }

    pub(super) fn process(&self, view: &ProcessView) -> String {
        let held = view.holding.iter().map(|held| {
            let place = if held.limit == 1 {
                held.fencing_token.map_or_else(String::new, |token| token.to_string())
            } else {
                place(held.limit)
            };
            let (age, left) = (Short(held.held_for).to_string(), Short(held.remaining).to_string());
            let counts = [held.guards.to_string(), held.waiting.to_string()];
            let [guards, waiting] = counts;
            [self.link(&held.key), age, left, place, guards, waiting, Text(&held.id).to_string()]
        });
        let heads = ["Key", "Held for", "Time left", "Fencing token", "Guards", "Waiting here", "Acquisition"];
        let held = table("holding", "Held by this process, oldest first", heads, &held.collect::<Vec<_>>());
        let waits = view.waits.iter().map(|wait| {
            let ago = Instant::now().saturating_duration_since(wait.ended);
            let (waited, ended) = (Short(wait.waited).to_string(), format!("{} ago", Short(ago)));
            [self.link(&wait.key), waited, wait.result.to_owned(), Text(wait.route.as_str()).to_string(), ended]
        });
        let heads = ["Key", "Waited", "Result", "Route", "Ended"];
        let waits =
            table("waits", "Longest waits of the last 5 minutes in this process", heads, &waits.collect::<Vec<_>>());
        let state = if view.shutting_down { " It is shutting down, and accepts no new calls." } else { "" };
        let count = Count(view.held, "lock, permit or read", "locks, permits and reads");
        let content = format!(
            "<p id=\"answer\">This process holds {count}.{state}</p>\n<h2>Held</h2>\n{held}<h2>Waits</h2>\n{waits}"
        );
        self.page(format_args!("Locks of {}", view.instance), content)
    }

    pub(super) fn keys(&self, view: &KeysView) -> String {
        let part = |id: &str, head: &str, page: &KeyPage, query: &str| {
            let rows: Vec<_> = page.keys.iter().map(|row| self.key_row(row)).collect();
            let heads = ["Key", "Holder", "Held for", "Time left", "Waiting processes", "Waiting here"];
            let next = page.next.as_ref().map(|next| {
                let next: String = form_urlencoded::byte_serialize(next.as_bytes()).collect();
                format!(
                    "<p><a id=\"{id}-next\" href=\"{}/keys?{query}after={next}\">Next page: {head}</a></p>\n",
                    Text(&self.prefix)
                )
            });
            format!("<h2>{head}</h2>\n{}{}", table(id, head, heads, &rows), next.unwrap_or_default())
        };
        let contended = view
            .contended
            .as_ref()
            .map(|page| part("contended", "Keys that processes wait for", page, "contended=1&amp;"));
        let all = view.all.as_ref().map(|page| part("keys", "Keys in use", page, ""));
        let note = "<p>These are the keys of all processes. A page may be empty although it is not the last one.</p>\n";
        self.page("All keys", format_args!("{note}{}{}", contended.unwrap_or_default(), all.unwrap_or_default()))
    }

    fn key_row(&self, row: &KeyRow) -> [String; 6] {
        let status = &row.status;
        let (holder, age) = match status.holder() {
            Some(first) if status.holding > 1 => (
                format!("{} and {}", Text(held_by(first)), Count(status.holding - 1, "other", "others")),
                shown_age(first),
            ),
            Some(first) => (Text(held_by(first)).to_string(), shown_age(first)),
            None => ("none".to_owned(), String::new()),
        };
        let counts = [status.waiting.to_string(), status.waiting_locally.to_string()];
        let [waiting, here] = counts;
        [self.link(&row.key), holder, age, left(status.remaining), waiting, here]
    }

    /// `name` is the query of the key, also of one that is redacted.
    pub(super) fn key(&self, view: &KeyView, name: &str, done: Option<Done>) -> String {
        let status = &view.row.status;
        let button = |id: &str, holder: &str, text: &str, label: &str| {
            format!(
                "<form{id} method=\"post\" action=\"{}/revoke?{}{holder}\"><button aria-label=\"{label}\">{text}</button></form>",
                Text(&self.prefix),
                Text(name)
            )
        };
        let done = done.map(|done| format!("<p id=\"done\" role=\"status\">{}</p>\n", Text(done.sentence())));
        let answer: String = view.sentences().iter().map(|said| format!("{} ", Text(said))).collect();
        let holders = status.holders.iter().map(|holder| {
            let fence = match holder.id.max_holders() {
                1 if holder.fence == 0 => String::new(),
                1 => FencingToken::from_fence(holder.fence).map_or_else(String::new, |token| token.to_string()),
                limit => place(limit),
            };
            let connected = match holder.connected {
                Some(true) => "connected",
                Some(false) => "not connected",
                None => "not known",
            };
            let id = holder.id.to_string();
            let encoded: String = form_urlencoded::byte_serialize(id.as_bytes()).collect();
            let revoke = if view.may_revoke {
                button("", &format!("&amp;holder={encoded}"), "Revoke", &format!("Revoke {}", Text(&id)))
            } else {
                String::new()
            };
            let since = holder.since.map_or_else(String::new, |since| Rfc3339(since).to_string());
            let instance = Text(held_by(holder)).to_string();
            [instance, Text(&id).to_string(), shown_age(holder), since, connected.to_owned(), fence, revoke]
        });
        let heads = ["Instance", "Acquisition", "Held for", "Since", "Process", "Fencing token", "Revoke"];
        let holders = table("holders", "Holders", heads, &holders.collect::<Vec<_>>());
        let all = if view.may_revoke && view.can_revoke() {
            let text = if status.holders.is_empty() { "End the block" } else { "Revoke all holders" };
            button(" id=\"revoke-all\"", "", text, text)
        } else {
            String::new()
        };
        let content = format!(
            "{}<p id=\"answer\">{answer}</p>\n<p id=\"key\">{}</p>\n<h2>Holders</h2>\n{holders}{all}\n",
            done.unwrap_or_default(),
            KeyText(&view.row.key),
        );
        self.page("One key", content)
    }

    pub(super) fn refusal(&self, title: impl Display, message: &str) -> String {
        self.page(title, format_args!("<p id=\"answer\">{}</p>\n", Text(message)))
    }
}

fn shown_age(holder: &Holder) -> String {
    age(holder).map_or_else(|| "not known".to_owned(), |age| Short(age).to_string())
}

fn left(remaining: Duration) -> String {
    if remaining == Duration::MAX { "without an end".to_owned() } else { Short(remaining).to_string() }
}

/// What one of several holders has.
fn place(limit: u16) -> String {
    if limit == MAX_HOLDERS { "a read".to_owned() } else { format!("1 of {limit}") }
}
