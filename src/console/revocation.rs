//! A revocation, its reply, and its event.

use std::time::Duration;

use axum::{
    body::Body,
    response::{IntoResponse, Redirect, Response},
};
use http::StatusCode;
use http_body_util::{BodyExt, Limited};
use serde_json::json;
use tokio::time::timeout;

use super::{
    Access, Console,
    call::{self, Refusal},
    views::age,
};
use crate::{
    acquisition::AcquisitionId,
    limits::{BODY_IDLE_TIMEOUT, LOCK_DELAY, MAX_CONSOLE_FORM_BYTES},
    lock_key::LockKey,
    store::ForceReleaseReply,
};

/// A revocation that is under way. Its drop writes the event once, also if the client disconnects
/// before the reply.
struct Audit<'a> {
    operator: &'a str,
    /// As the log may show it.
    key: LockKey,
    holder: &'a str,
    /// How long the holder has held the key, if the store knows it.
    held: Option<Duration>,
    reply: String,
}

impl Console {
    pub(super) async fn revoke(&self, query: &str, body: Body) -> Result<Response, Refusal> {
        let Access::Revoke { operator } = &self.access else { unreachable!("refused before") };
        let form = form(query, body).await?;
        let (key, holder) = (call::key(&form)?, call::field(&form, "holder"));
        let (shown, reply) = (self.redact(&key), "not known: the client has disconnected".to_owned());
        let mut audit = Audit { operator, key: shown, holder: holder.as_deref().unwrap_or("all"), held: None, reply };
        // Before the revocation, because the store forgets the times of its grants.
        if let Ok(status) = self.locks.inspect(key.clone()).await {
            let is_meant = |id: &AcquisitionId| holder.as_ref().is_none_or(|holder| *holder == id.to_string());
            let holders = status.holders.iter().filter(|holder| is_meant(&holder.id));
            audit.held = holders.filter_map(age).max();
        }
        let reply = match &holder {
            Some(holder) => self.locks.revoke(key.clone(), &AcquisitionId::from_text(holder)).await,
            None => self.locks.force_release(key.clone()).await,
        };
        let (name, holders) = match reply {
            Ok(ForceReleaseReply::Revoked { holders }) => ("revoked", holders),
            Ok(ForceReleaseReply::Unblocked { .. }) => ("unblocked", Vec::new()),
            Ok(ForceReleaseReply::Free) => ("free", Vec::new()),
            Err(error) => {
                audit.reply = format!("failed: {error}");
                let Refusal(status, message) = error.into();
                return Err(Refusal(status, format!("{message}. The lock may have been revoked.")));
            }
        };
        audit.reply = name.to_owned();
        let blocked_ms = (!holders.is_empty()).then_some(LOCK_DELAY.as_millis());
        let view = json!({ "reply": name, "holders": holders, "blocked_ms": blocked_ms });
        if self.is_json {
            return Ok(self.shown(&view, String::new));
        }
        let number = if name == "revoked" { format!("-{}", holders.len()) } else { String::new() };
        let page = format!("{}/key?{}&done={name}{number}", self.prefix, key.as_query());
        Ok(Redirect::to(&page).into_response())
    }
}

/// The fields of a request: those of its query come first.
async fn form(query: &str, body: Body) -> Result<String, Refusal> {
    let refusal = |status, why: &str| Refusal(status, why.to_owned());
    let body = timeout(BODY_IDLE_TIMEOUT, Limited::new(body, MAX_CONSOLE_FORM_BYTES).collect()).await;
    let body = body.map_err(|_| refusal(StatusCode::REQUEST_TIMEOUT, "The form did not arrive in time."))?;
    let body = body.map_err(|_| refusal(StatusCode::PAYLOAD_TOO_LARGE, "The form is too long."))?.to_bytes();
    Ok(format!("{query}&{}", String::from_utf8_lossy(&body)))
}

impl Drop for Audit<'_> {
    fn drop(&mut self) {
        let Self { operator, key, holder, held, reply } = self;
        // On one line, however a subscriber writes its fields.
        let one_line = |text: &str| text.escape_debug().to_string();
        tracing::info!(
            target: "tower_lock::audit",
            operator = one_line(operator),
            key = one_line(key.as_str()),
            holder = one_line(holder),
            held_ms = held.map(|held| u64::try_from(held.as_millis()).unwrap_or(u64::MAX)),
            reply = one_line(reply),
            "an operator revoked a lock",
        );
    }
}
