//! The checks of a server before it is used.

use std::fmt;

use deadpool_redis::redis::{aio::PubSub, cmd, from_redis_value, make_extension_error};
use futures_util::StreamExt;
use tokio::time::timeout;

use super::{
    connection::{Query, SharedConnection},
    error::{CallError, RedisConnectError},
    proto::{self, SelfTestReport, escape_control},
    subscriber::Subscriber,
    warn_fence_replaced,
};
use crate::{lock_key::LockKey, process::Process, store::StoreErrorKind};

/// Why the self-test came to no end.
pub(super) struct SelfTestError {
    pub(super) error: RedisConnectError,
    /// The server may be about to start.
    pub(super) is_transient: bool,
}

impl From<RedisConnectError> for SelfTestError {
    fn from(error: RedisConnectError) -> Self {
        Self { error, is_transient: false }
    }
}

/// Everything that locks need, once; the connection that listened, and the server's clock.
pub(super) async fn self_test(events: &Subscriber) -> Result<(PubSub, i64), SelfTestError> {
    let limits = events.timeouts;
    let address = || events.address.clone();
    let failed = |trouble: CallError| {
        use StoreErrorKind::{Failover, Timeout, Unavailable};

        let may_pass = matches!(trouble.kind(), Failover | Timeout | Unavailable);
        let error = RedisConnectError::Unreachable { address: address(), source: trouble.with_hint() };
        SelfTestError { error, is_transient: may_pass }
    };
    let all_refused =
        |refusals| SelfTestError::from(RedisConnectError::PermissionDenied { address: address(), refusals });
    let refused = |error: &dyn fmt::Display| all_refused(vec![escape_control(&error.to_string())]);
    let [asks, ends] = &events.connections;
    // To connect may take longer than a call.
    asks.ready().await.map_err(failed)?;
    ends.ready().await.map_err(failed)?;
    check_server(asks, &events.address, &failed).await?;
    let once = format!("self-test:{:016x}", Process::default().random_bits());
    let channel = events.keyspace.inbox(&once);
    let mut listener = events.connect().await.map_err(failed)?;
    match timeout(limits.call, listener.subscribe(&channel)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) if error.code() == Some("NOPERM") => return Err(refused(&error)),
        Ok(Err(error)) => return Err(failed(error.into())),
        Err(_) => return Err(failed(CallError::NoReply)),
    }
    let key = LockKey::from(("self-test", once.as_str()));
    let call = events.keyspace.self_test(&key, &channel, "1 hello").map_err(|name| failed(name.into()))?;
    let run = async |question| {
        // By the connection that was not used yet.
        ends.query(question, limits.call_deadline()).await.map_err(|trouble| match trouble {
            // It may not even run a script.
            CallError::Redis(error) if error.code() == Some("NOPERM") => refused(&error),
            trouble => failed(trouble),
        })
    };
    // By its text and by its hash: after a restart the first one is needed, whoever may have taught the server now.
    let read = |reply| proto::parse_self_test(&reply).map_err(|misread| failed(misread.into()));
    // Of what is no fence only the first one hears: it has put the clock there.
    let no_fence = read(run(Query::Eval(&call)).await?)?.invalid_fence;
    let SelfTestReport { now, receivers, refused: refusals, .. } = read(run(Query::EvalSha(&call)).await?)?;
    if let Some(first) = refusals.first() {
        // A replica, or no memory: that is no matter of rights, and has a remedy of its own.
        let said = first.split_once(": ").map_or(first.as_str(), |(_, said)| said);
        let (code, detail) = said.split_once(' ').unwrap_or((said, ""));
        let is_known = !matches!(code, "ERR" | "NOPERM");
        return Err(if is_known {
            failed(make_extension_error(code.to_owned(), Some(detail.to_owned())).into())
        } else {
            all_refused(refusals)
        });
    }
    if let Some(no_fence) = no_fence {
        warn_fence_replaced(&events.keyspace, &no_fence);
    }
    let came = matches!(timeout(limits.call, listener.on_message().next()).await, Ok(Some(_)));
    if !came || receivers == 0 {
        return Err(RedisConnectError::PubSubUnavailable { address: address(), receivers, received: came }.into());
    }
    timeout(limits.call, listener.unsubscribe(&channel))
        .await
        .map_err(|_| failed(CallError::NoReply))?
        .map_err(|error| failed(error.into()))?;
    Ok((listener, now))
}

/// Its version, and whether it may throw locks away. Asked of `INFO`, because a server that somebody else runs has no `CONFIG`.
async fn check_server(
    lane: &SharedConnection,
    address: &str,
    failed: &(dyn Fn(CallError) -> SelfTestError + Sync),
) -> Result<(), SelfTestError> {
    let section =
        async |name: &str| match lane.query(Query::Command(cmd("INFO").arg(name)), lane.timeouts.call_deadline()).await
        {
            Ok(info) => Ok(from_redis_value::<String>(info).ok()),
            Err(CallError::Redis(error)) if error.code() == Some("NOPERM") => Ok(None),
            Err(trouble) => Err(failed(trouble)),
        };
    let (server, memory) = (section("server").await?, section("memory").await?);
    match server.as_deref().and_then(|info| info_field(info, "redis_version")) {
        Some(version) if is_unsupported(version) => {
            return Err(RedisConnectError::UnsupportedVersion {
                address: address.to_owned(),
                version: escape_control(version),
            }
            .into());
        }
        Some(_) => {}
        None => warn("its version cannot be read (`INFO server`): locks need Redis 7.0"),
    }
    let memory = memory.unwrap_or_default();
    let policy = info_field(&memory, "maxmemory_policy").unwrap_or("noeviction");
    if policy != "noeviction" && info_field(&memory, "maxmemory").is_some_and(|max| max != "0") {
        warn(
            "its `maxmemory-policy` throws keys away when memory is short, and a lock that is thrown away is a lock for two: \
              use `noeviction`",
        );
    }
    Ok(())
}

fn info_field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Older than 7.0. What cannot be read as a version is not.
fn is_unsupported(version: &str) -> bool {
    version.split('.').next().and_then(|major| major.parse::<u32>().ok()).is_some_and(|major| major < 7)
}

#[cfg(feature = "tracing")]
fn warn(what: &'static str) {
    tracing::warn!(target: "tower_lock", "the Redis for locks: {what}");
}

#[cfg(not(feature = "tracing"))]
fn warn(_: &'static str) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_before_7_are_too_old_and_unknown_ones_pass() {
        for (version, too_old) in
            [("6.2.14", true), ("7.0.15", false), ("7.2.4", false), ("10.1", false), ("unstable", false)]
        {
            assert_eq!(is_unsupported(version), too_old, "{version}");
        }
        assert_eq!(info_field("# Server\r\nredis_version:7.0.15\r\nredis_mode:x\r\n", "redis_version"), Some("7.0.15"));
        assert_eq!(info_field("maxmemory_human:0B\r\nmaxmemory:5\r\n", "maxmemory"), Some("5"));
        assert_eq!(info_field("", "maxmemory"), None);
    }
}
