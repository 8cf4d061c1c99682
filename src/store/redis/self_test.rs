//! Checks of a server before it is used: version, permissions, pub/sub.

use std::{collections::HashMap, sync::Arc};

use deadpool_redis::redis::{Cmd, Value, cmd, from_redis_value, make_extension_error};
use tokio::{sync::Notify, time::timeout};
use tracing::warn;

use super::{
    error::{CallError, RedisConnectError},
    topology::{connection::Terms, endpoint::Subscriptions, server::Server, socket::OnMessage},
    wire::{self, SelfTestReport},
};
use crate::{
    process,
    store::{error::escape_control, remote::settings},
};

pub(in crate::store) type SelfTestError = settings::SelfTestError<RedisConnectError>;

/// Executes every command that locks need. Returns the connection for messages and the server's
/// clock.
pub(super) async fn self_test(
    server: &Server,
    mut on_message: OnMessage,
) -> Result<(Subscriptions, i64), SelfTestError> {
    let timeouts = server.timeouts;
    let failed = |error| server.test_failed(error);
    let id = check_connections(server).await?;
    let channel = channel_of(server, &id);
    let test_message = Arc::<Notify>::default();
    let on_test_message = {
        let (channel, test_message) = (channel.clone(), Arc::clone(&test_message));
        move |to: &[u8], payload: &[u8]| match to == channel.as_bytes() {
            true => test_message.notify_one(),
            false => on_message(to, payload),
        }
    };
    let subscriptions = server.subscribe(Box::new(on_test_message)).await.map_err(failed)?;
    match timeout(timeouts.call, subscriptions.subscribe(std::slice::from_ref(&channel))).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) if error.code() == Some("NOPERM") => {
            return Err(server.permission_denied(vec![escape_control(&format!("SUBSCRIBE: {error}"))]));
        }
        Ok(Err(error)) => return Err(failed(error.into())),
        Err(_) => return Err(failed(CallError::NoReply)),
    }
    let SelfTestReport { now, receivers, .. } = run_script(server, &id).await?;
    let received = timeout(timeouts.call, test_message.notified()).await.is_ok();
    // Before the message counts as lost: the connection may have broken, and a retry has another.
    timeout(timeouts.call, subscriptions.unsubscribe(&[channel]))
        .await
        .map_err(|_| failed(CallError::NoReply))?
        .map_err(|error| failed(error.into()))?;
    if !received || receivers == 0 {
        let address = server.address.clone();
        return Err(RedisConnectError::PubSubUnavailable { address, receivers, received }.into());
    }
    Ok((subscriptions, now))
}

/// The same without messages, for a store that has none. Returns the server's clock.
pub(in crate::store) async fn self_test_without_messages(server: &Server) -> Result<i64, SelfTestError> {
    let id = check_connections(server).await?;
    Ok(run_script(server, &id).await?.now)
}

/// Waits for the connections, and checks the server. Returns the id of the test.
async fn check_connections(server: &Server) -> Result<String, SelfTestError> {
    let failed = |error| server.test_failed(error);
    // Connecting may take longer than a call.
    for connection in server.connections() {
        connection.link.ready().await.map_err(|error| failed(error.into()))?;
    }
    check_server(server).await?;
    Ok(format!("{:016x}", process::random_bits()))
}

/// Executes the script of the test, by its text and by its hash: after a restart of the server the
/// text is needed, too.
async fn run_script(server: &Server, id: &str) -> Result<SelfTestReport, SelfTestError> {
    let Server { release_conn, renew_conn, min_replicas, timeouts, keyspace, .. } = server;
    let failed = |error| server.test_failed(error);
    let lock = keyspace.test_lock(id, server.topology.any_slot().unwrap_or(0));
    let call = keyspace.self_test(&lock, &channel_of(server, id), "1 hello");
    let run = async |command: &Cmd| {
        // On the connection that is not yet in use.
        release_conn.command(command, timeouts.call_deadline()).await.map_err(failed)
    };
    let parse = |reply| wire::parse_self_test(&reply).map_err(|error| failed(error.into()));
    if server.is_cluster() {
        // Without permission for it, the renewal of a key that moves would be the first to need it.
        run(&cmd("ASKING")).await?;
    }
    // Only the first run reports an invalid fence, because it replaces it.
    let first = parse(run(&call.eval()).await?)?;
    let second = parse(run(&call.eval_sha()).await?)?;
    if let Some(first) = second.refused.first() {
        // A known error, such as that of a replica or of full memory, has a hint of its own.
        let message = first.split_once(": ").map_or(first.as_str(), |(_, message)| message);
        let (code, detail) = message.split_once(' ').unwrap_or((message, ""));
        let is_known = !matches!(code, "ERR" | "NOPERM");
        return Err(if is_known {
            failed(make_extension_error(code.to_owned(), Some(detail.to_owned())).into())
        } else {
            server.permission_denied(second.refused)
        });
    }
    if min_replicas.is_some() {
        let terms = Terms { min_replicas: *min_replicas, ..Terms::default() };
        let reply = renew_conn.call(&[call], terms, timeouts.call_deadline()).await;
        reply.map_err(failed)?.1.map_err(|missing| failed(missing.into()))?;
    }
    if let Some(found) = &first.invalid_fence {
        server.warn_fence_replaced(found);
    }
    Ok(second)
}

/// The channel of the test with this id.
fn channel_of(server: &Server, id: &str) -> String {
    server.keyspace.inbox(&format!("self-test:{id}"))
}

impl SelfTestError {
    /// The error of a call or a connect at this address.
    pub(super) fn unreachable(error: CallError, address: String, user: &str) -> Self {
        if matches!(error.of_connect(), CallError::Redis(refusal) if refusal.code() == Some("NOPERM")) {
            let (user, refusals) = (user.to_owned(), vec![error.to_string()]);
            return RedisConnectError::PermissionDenied { address, user, refusals }.into();
        }
        let is_transient = error.kind().is_transient();
        let source = error.with_hint(None, user);
        Self { error: RedisConnectError::Unreachable { address, source }, is_transient }
    }
}

impl Server {
    pub(super) fn test_failed(&self, error: CallError) -> SelfTestError {
        SelfTestError::unreachable(self.seen_by_cluster(error), self.address.clone(), &self.user)
    }

    fn permission_denied(&self, mut refusals: Vec<String>) -> SelfTestError {
        let (address, user) = (self.address.clone(), self.user.clone());
        for refusal in refusals.iter_mut().filter(|refusal| ["key", "channel"].iter().any(|of| refusal.contains(of))) {
            *refusal += &format!(" (the ACL needs `{}`)", self.keyspace.acl_patterns());
        }
        RedisConnectError::PermissionDenied { address, user, refusals }.into()
    }
}

/// Checks the version, the eviction policy and the persistence, by `INFO`: managed servers have no
/// `CONFIG`.
async fn check_server(server: &Server) -> Result<(), SelfTestError> {
    let warn = |message: &'static str| {
        server.background.log(move || warn!(target: "tower_lock", "Redis: {message}"));
    };
    let Server { acquire_conn, timeouts, .. } = server;
    let section = async |name| match acquire_conn.command(cmd("INFO").arg(name), timeouts.call_deadline()).await {
        Ok(info) => Ok(from_redis_value::<String>(info).unwrap_or_default()),
        Err(CallError::Redis(error)) if error.code() == Some("NOPERM") => Ok(String::new()),
        Err(error) => Err(server.test_failed(error)),
    };
    let (info, memory, persistence) =
        (section("server").await?, section("memory").await?, section("persistence").await?);
    let is_cluster = server_mode(&info).map(|mode| mode == "cluster");
    match (is_cluster, server.is_cluster()) {
        (Some(true), false) => return Err(RedisConnectError::IsCluster { address: server.address.clone() }.into()),
        (Some(false), true) => return Err(RedisConnectError::NotCluster { address: server.address.clone() }.into()),
        _ => {}
    }
    check_version(&info, &server.address)?;
    if info_field(&info, "redis_version").is_none() {
        warn("its version cannot be read (`INFO server`): at least Redis 7.0 is required");
    }
    let policy = info_field(&memory, "maxmemory_policy").unwrap_or("noeviction");
    if policy != "noeviction" && info_field(&memory, "maxmemory").is_some_and(|max| max != "0") {
        warn(
            "its `maxmemory-policy` evicts keys when memory is short, and an evicted lock has two holders: use `noeviction`",
        );
    }
    if info_field(&persistence, "aof_enabled") == Some("1") && default_user_lacks_permissions(server).await {
        warn(
            "with `appendonly` it loses locks and records at a restart, because its default user lacks permissions, which \
             the load of the file needs: `user default off ~* &* +@all`",
        );
    }
    Ok(())
}

/// On load the server checks the writes of scripts against its default user, also one that is off.
/// `false`: most users may not read that.
async fn default_user_lacks_permissions(server: &Server) -> bool {
    let rules = cmd("ACL").arg("GETUSER").arg("default").take();
    let reply = server.acquire_conn.command(&rules, server.timeouts.call_deadline()).await;
    let rules = reply.ok().and_then(|reply| from_redis_value::<HashMap<String, Value>>(reply).ok());
    let has = |rules: &HashMap<String, Value>, name, expected: &str| {
        rules.get(name).is_none_or(|rule| matches!(rule, Value::BulkString(rule) if *rule == expected.as_bytes()))
    };
    rules.is_some_and(|rules| !(has(&rules, "commands", "+@all") && has(&rules, "keys", "~*")))
}

/// `standalone`, `cluster` or `sentinel`.
pub(in crate::store) fn server_mode(info: &str) -> Option<&str> {
    // Valkey has the first name, and Redis the second.
    info_field(info, "server_mode").or_else(|| info_field(info, "redis_mode"))
}

pub(in crate::store) fn info_field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Fails if the version is older than 7.0. An unreadable one is not.
pub(super) fn check_version(info: &str, address: &str) -> Result<(), RedisConnectError> {
    match info_field(info, "redis_version").filter(|version| is_unsupported(version)) {
        None => Ok(()),
        Some(version) => {
            let (address, version) = (address.to_owned(), escape_control(version));
            Err(RedisConnectError::UnsupportedVersion { address, version })
        }
    }
}

fn is_unsupported(version: &str) -> bool {
    version.split('.').next().and_then(|major| major.parse::<u32>().ok()).is_some_and(|major| major < 7)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_before_7_are_too_old_and_unknown_ones_pass() {
        for (version, unsupported) in
            [("6.2.14", true), ("7.0.15", false), ("7.2.4", false), ("10.1", false), ("unstable", false)]
        {
            assert_eq!(is_unsupported(version), unsupported, "{version}");
        }
        assert_eq!(info_field("# Server\r\nredis_version:7.0.15\r\nredis_mode:x\r\n", "redis_version"), Some("7.0.15"));
        assert_eq!(info_field("maxmemory_human:0B\r\nmaxmemory:5\r\n", "maxmemory"), Some("5"));
        assert_eq!(info_field("", "maxmemory"), None);
    }
}
