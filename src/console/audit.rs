//! The event of a revocation. It is written once, also if the client disconnects before the reply.

use std::time::Duration;

use super::views::Done;
use crate::{
    lock_key::LockKey,
    store::{ForceReleaseReply, StoreError},
};

/// A revocation that is under way. Its drop writes the event.
pub(super) struct Audit {
    operator: String,
    /// As the log may show it.
    key: LockKey,
    holder: String,
    /// How long the holder has held the key, if the store knows it.
    pub(super) held: Option<Duration>,
    reply: String,
}

impl Audit {
    pub(super) fn start(operator: &str, key: LockKey, holder: Option<&str>) -> Self {
        let reply = "not known: the client has disconnected".to_owned();
        Self { operator: operator.to_owned(), key, holder: holder.unwrap_or("all").to_owned(), held: None, reply }
    }

    pub(super) fn replied(&mut self, reply: &Result<ForceReleaseReply, StoreError>) {
        self.reply = match reply {
            Ok(reply) => Done::of(reply).name().to_owned(),
            Err(error) => format!("failed: {error}"),
        };
    }
}

impl Drop for Audit {
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
