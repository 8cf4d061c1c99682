//! The values of each view, as JSON and as a page. The names in the JSON are stable.

use std::{
    borrow::Cow,
    time::{Duration, SystemTime},
};

use axum::response::Response;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    Access, Console,
    call::{self, Refusal},
    page::table,
    text::{count, key_text, short, text},
};
use crate::{
    fencing::FencingToken,
    limits::{LOCK_DELAY, MAX_CONSOLE_ROWS, MAX_HOLDERS},
    lock::{LockStatus, Rfc3339},
    origin::is_same_origin,
    store::{Cursor, Holder, ListEntry, ListRequest, StoreErrorKind},
    telemetry::waits::LongWait,
};

impl Console {
    /// What this process holds, the oldest ones first, and the longest waits of its last minutes.
    pub(super) fn process(&self) -> Response {
        let driver = self.locks.driver();
        let (mut holding, mut waits) = (self.locks.holding(), driver.waits.list());
        let (held, shutting_down) = (holding.len(), self.locks.is_shutting_down());
        holding.truncate(MAX_CONSOLE_ROWS);
        let keys = holding.iter_mut().map(|held| &mut held.key).chain(waits.iter_mut().map(|wait| &mut wait.key));
        keys.for_each(|key| *key = self.redact(key));
        let ago = |wait: &LongWait| Instant::now().saturating_duration_since(wait.ended);
        let wait = |wait: &LongWait| {
            json!({
                "route": wait.route.as_str(), "key": wait.key.as_str(), "raw": wait.key.is_raw(),
                "waited_ms": wait.waited.as_millis(), "ended_ms_ago": ago(wait).as_millis(), "result": wait.result,
            })
        };
        let view = json!({
            "instance": driver.instance(), "shutting_down": shutting_down, "keys_redacted": self.keys_redacted,
            "held": held, "holding": holding, "waits": waits.iter().map(wait).collect::<Vec<_>>(),
        });
        self.shown(&view, || {
            let rows = holding.iter().map(|held| {
                let (age, left) = (short(held.held_for), short(held.remaining));
                let (guards, waiting) = (held.guards.to_string(), held.waiting.to_string());
                let place = place(held.limit, held.fencing_token);
                [self.link(&held.key), age, left, place, guards, waiting, text(&held.id)]
            });
            let heads = ["Key", "Held for", "Time left", "Fencing token", "Guards", "Waiting here", "Acquisition"];
            let holding = table("holding", "Held by this process, oldest first", heads, rows.collect());
            let rows = waits.iter().map(|wait| {
                let ended = format!("{} ago", short(ago(wait)));
                [self.link(&wait.key), short(wait.waited), wait.result.to_owned(), text(wait.route.as_str()), ended]
            });
            let heads = ["Key", "Waited", "Result", "Route", "Ended"];
            let caption = "Longest waits of the last 5 minutes in this process";
            let waits = table("waits", caption, heads, rows.collect());
            let state = if shutting_down { " It is shutting down, and accepts no new calls." } else { "" };
            let held = count(held, "lock, permit or read", "locks, permits and reads");
            let answer = format!("<p id=\"answer\">This process holds {held}.{state}</p>\n");
            let content = format!("{answer}<h2>Held</h2>\n{holding}<h2>Waits</h2>\n{waits}");
            self.page(format!("Locks of {}", driver.instance()), content)
        })
    }

    /// Keys of all processes.
    pub(super) async fn keys(&self, query: &str) -> Result<Response, Refusal> {
        let busy = "This process lists keys for another request. Try again.";
        let busy = |_| Refusal(StatusCode::SERVICE_UNAVAILABLE, busy.to_owned());
        let _listing = self.locks.driver().listing.try_acquire().map_err(busy)?;
        let is_of_contended = call::field(query, "contended").is_some();
        let has_contended = is_of_contended || call::field(query, "after").is_none();
        let (contended, first) = if has_contended { self.list(query, true).await? } else { Default::default() };
        let (all, second) = if is_of_contended { Default::default() } else { self.list(query, false).await? };
        let view = json!({ "keys_redacted": self.keys_redacted, "contended": contended, "all": all });
        let note = "<p>These are the keys of all processes. A page may be empty although it is not the last one.</p>\n";
        Ok(self.shown(&view, || self.page("All keys", format!("{note}{first}{second}"))))
    }

    /// A part of a page of keys, as JSON and in HTML.
    async fn list(&self, query: &str, contended_only: bool) -> Result<(Value, String), Refusal> {
        let mut request = ListRequest::new(MAX_CONSOLE_ROWS).contended_only(contended_only);
        request.after = call::field(query, "after").map(Cursor::new);
        let has_cursor = request.after.is_some();
        let page = self.locks.list(request).await.map_err(|error| match error.kind() {
            // After a page, the cursor is wrong, and not the store.
            StoreErrorKind::Unsupported if has_cursor => {
                let old = "The position is that of another store, or is old. Start at the first page.";
                Refusal(StatusCode::BAD_REQUEST, old.to_owned())
            }
            _ => error.into(),
        })?;
        let (mut keys, mut rows) = (Vec::new(), Vec::new());
        for ListEntry { key, status } in page.entries {
            let (status, key) = (self.locks.driver().status_of(&key, status), self.redact(&key));
            keys.push(json!({ "key": key.as_str(), "raw": key.is_raw(), "status": status }));
            let first = status.holder();
            let holder = first.map_or("none".into(), held_by);
            let others = count(status.holding.saturating_sub(1), "other", "others");
            let holder = if status.holding > 1 { format!("{holder} and {others}") } else { holder.into_owned() };
            let age = first.map_or_else(String::new, shown_age);
            let left =
                if status.remaining == Duration::MAX { "without an end".to_owned() } else { short(status.remaining) };
            let (waiting, here) = (status.waiting.to_string(), status.waiting_locally.to_string());
            rows.push([self.link(&key), text(holder), age, left, waiting, here]);
        }
        let (id, title, more) = match contended_only {
            true => ("contended", "Keys that processes wait for", "contended=1&amp;"),
            false => ("keys", "Keys in use", ""),
        };
        let next = page.next.as_ref().map(|next| {
            let next: String = form_urlencoded::byte_serialize(next.as_str().as_bytes()).collect();
            let link = format!("{}/keys?{more}after={next}", text(&self.prefix));
            format!("<p><a id=\"{id}-next\" href=\"{link}\">Next page: {title}</a></p>\n")
        });
        let heads = ["Key", "Holder", "Held for", "Time left", "Waiting processes", "Waiting here"];
        let part = format!("<h2>{title}</h2>\n{}{}", table(id, title, heads, rows), next.unwrap_or_default());
        Ok((json!({ "keys": keys, "next": page.next.as_ref().map(Cursor::as_str) }), part))
    }

    /// One key, and what was done to it.
    pub(super) async fn key(&self, query: &str) -> Result<Response, Refusal> {
        let key = call::key(query)?;
        let status = self.locks.inspect(key.clone()).await?;
        let (shown, may_revoke) = (self.redact(&key), matches!(self.access, Access::Revoke { .. }));
        let view = json!({
            "key": shown.as_str(), "raw": shown.is_raw(), "keys_redacted": self.keys_redacted,
            "may_revoke": may_revoke, "status": status,
        });
        Ok(self.shown(&view, || {
            // Also of a key that is redacted.
            let action = format!("{}/revoke?{}", text(&self.prefix), text(key.as_query()));
            let button = |id: &str, holder: &str, text: &str, label: &str| {
                format!("<form{id} method=\"post\" action=\"{action}{holder}\"><button aria-label=\"{label}\">{text}</button></form>")
            };
            let rows = status.holders.iter().map(|holder| {
                let token = FencingToken::from_fence(holder.fence).filter(|_| holder.fence != 0);
                let connected = match holder.connected {
                    Some(true) => "connected",
                    Some(false) => "not connected",
                    None => "not known",
                };
                let (id, since) = (holder.id.to_string(), holder.since.map(|since| Rfc3339(since).to_string()));
                let encoded: String = form_urlencoded::byte_serialize(id.as_bytes()).collect();
                let id = text(id);
                let revoke = button("", &format!("&amp;holder={encoded}"), "Revoke", &format!("Revoke {id}"));
                let (connected, place) = (connected.to_owned(), place(holder.id.max_holders(), token));
                let revoke = if may_revoke { revoke } else { String::new() };
                [text(held_by(holder)), id, shown_age(holder), since.unwrap_or_default(), connected, place, revoke]
            });
            let heads = ["Instance", "Acquisition", "Held for", "Since", "Process", "Fencing token", "Revoke"];
            let holders = table("holders", "Holders", heads, rows.collect());
            let what = if status.holders.is_empty() { "End the block" } else { "Revoke all holders" };
            let all = button(" id=\"revoke-all\"", "", what, what);
            let all = if may_revoke && can_revoke(&status) { all } else { String::new() };
            let done = call::field(query, "done").filter(|_| is_same_origin(&self.head.headers));
            let done = done.and_then(|code| sentence(&code));
            let done = done.map(|done| format!("<p id=\"done\" role=\"status\">{}</p>\n", text(done)));
            let (done, answer, key) = (done.unwrap_or_default(), text(answer(&status, may_revoke)), key_text(&shown));
            let content = format!("{done}<p id=\"answer\">{answer}</p>\n<p id=\"key\">{key}</p>\n<h2>Holders</h2>\n{holders}{all}\n");
            self.page("One key", content)
        }))
    }
}

/// The answer to the first questions of an operator: the holder of the key, since when, the number
/// of waiters, and whether the key may be revoked.
fn answer(status: &LockStatus, may_revoke: bool) -> String {
    let LockStatus { holders, holding, remaining, record_left, kept_by, waiting, waiting_locally } = status;
    let mut said = vec![match holders.first() {
        Some(first) => {
            let since = age(first).map(|age| format!(" for {}", short(age))).unwrap_or_default();
            let first = held_by(first) + &*since;
            match holding {
                0 | 1 => format!("Held by {first}."),
                more => format!("Held by {more} holders: {first}, and {}.", count(more - 1, "other", "others")),
            }
        }
        None if *remaining == Duration::MAX => "Blocked without an end, and without a holder.".to_owned(),
        None if !remaining.is_zero() => format!("Without a holder, and blocked for another {}.", short(*remaining)),
        None if kept_by.is_some() => "Without a holder.".to_owned(),
        None => "Free: the next call gets it.".to_owned(),
    }];
    said.extend(kept_by.as_ref().map(|transaction| format!("Kept by {transaction}, until it ends.")));
    match holders.iter().filter(|holder| holder.connected == Some(false)).count() {
        0 => {}
        1 if *holding == 1 => said.push("Its process is not connected to the store.".to_owned()),
        dead => said.push(format!("{dead} of them are not connected to the store.")),
    }
    if !holders.is_empty() {
        said.push(match *remaining {
            Duration::MAX => "The key has no TTL: another program has written it.".to_owned(),
            left => format!("Without a renewal, the last lease ends in {}.", short(left)),
        });
    }
    said.push(count(*waiting, "process waits.", "processes wait."));
    said.push(count(*waiting_locally, "call waits in this process.", "calls wait in this process."));
    said.extend(record_left.map(|left| format!("Its record is kept for another {}.", short(left))));
    let revocation = match (may_revoke, can_revoke(status)) {
        (true, true) => "You may revoke it.",
        (true, false) => "There is nothing to revoke.",
        (false, _) => "You may only read.",
    };
    format!("{} {revocation}", said.join(" "))
}

/// The sentence of a page after a revocation with this code. No text of a URL is shown.
fn sentence(code: &str) -> Option<String> {
    Some(match code {
        "unblocked" => "The key had no holder. Its block has ended, and the key is free.".to_owned(),
        "free" => "Nothing was revoked. The key was free, or this holder did not hold it any more.".to_owned(),
        _ => format!(
            "Revoked from {}. The place of each stays blocked for {} s. A handler is aborted at its next await, and \
             its client gets 503 `lost`. A handler with `OnLost::Continue` goes on.",
            count(code.strip_prefix("revoked-")?.parse::<u16>().ok()?.into(), "holder", "holders"),
            LOCK_DELAY.as_secs(),
        ),
    })
}

/// Whether a revocation would change something.
fn can_revoke(status: &LockStatus) -> bool {
    !status.holders.is_empty() || !status.remaining.is_zero()
}

/// The instance of a holder, or its ticket.
fn held_by(holder: &Holder) -> Cow<'_, str> {
    if holder.id.is_of_ticket() {
        format!("the ticket `{}`", holder.id.ticket_label()).into()
    } else {
        holder.id.instance().into()
    }
}

/// How long the holder has held its key, by the clocks of the store and of this process.
#[expect(clippy::disallowed_methods, reason = "the store tells the time of a grant by the wall clock")]
pub(super) fn age(holder: &Holder) -> Option<Duration> {
    holder.since.map(|since| SystemTime::now().duration_since(since).unwrap_or_default())
}

fn shown_age(holder: &Holder) -> String {
    age(holder).map_or_else(|| "not known".to_owned(), short)
}

/// The token of a lock, and what one of several holders has.
fn place(limit: u16, token: Option<FencingToken>) -> String {
    match limit {
        1 => token.map_or_else(String::new, |token| token.to_string()),
        MAX_HOLDERS => "a read".to_owned(),
        limit => format!("1 of {limit}"),
    }
}
