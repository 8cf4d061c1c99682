//! Connecting: what is missing, and what the error says.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::select;
use tower_lock::{
    LockKey, LockManager,
    store::{ConnectError, IfBusy, LockStore, PostgresConnectError, ReleaseReply, RenewReply, StoreErrorKind},
};

use tower_lock_testkit::{
    Direction, Proxy,
    log::Log,
    wait::{soon, until},
};

use crate::support::{Caller, LONG, PATIENCE, environment, own_environment};

#[tokio::test]
async fn database_without_tables_names_the_migration() {
    let Some(environment) = environment().await else { return };
    let url = environment.server().url();
    let connect = async |migrate| environment.builder().migrate(migrate).connect(&url).await;
    let error = connect(false).await.expect_err("no tables");
    assert!(matches!(error, PostgresConnectError::NoTables { .. }), "{error:?}");
    assert!(format!("{error:?}").contains("`.migrate(true)`"), "{error:?}");
    connect(true).await.expect("it makes them");
    connect(true).await.expect("it keeps them");
    connect(false).await.expect("they are there");
    environment.execute(&environment.builder().migration().expect("a name")).await;
    connect(false).await.expect("the text may be executed again");
}

#[tokio::test]
async fn instances_that_start_together_make_the_tables_once() {
    let Some(environment) = environment().await else { return };
    let stores = join_all((0..8).map(|_| environment.store())).await;
    assert_eq!(stores.len(), 8);
}

#[tokio::test]
async fn url_of_a_manager_may_name_a_database() {
    let Some(environment) = environment().await else { return };
    let url = format!("{}?schema={}&migrate=true", environment.server().url(), environment.schema);
    let locks = LockManager::connect(&url).await.expect("it is up").build();
    locks.lock(("k",)).await.expect("free").release().await.expect("held");
    assert_eq!(environment.value("SELECT count(*) FROM {schema}.locks").await, 1, "in the schema of the URL");
    let error = LockManager::connect("postgres://ann:s3cret@127.0.0.1:1/app").await.map(|_| ()).expect_err("no server");
    assert!(matches!(error, ConnectError::Postgres(PostgresConnectError::Unreachable { .. })), "{error:?}");
    assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
}

#[tokio::test]
async fn tables_of_another_program_are_not_used() {
    let Some(environment) = environment().await else { return };
    environment.execute("CREATE SCHEMA {schema}; CREATE TABLE {schema}.locks (id int)").await;
    for migrate in [false, true] {
        let builder = environment.builder().migrate(migrate);
        let error = builder.connect(&environment.server().url()).await.expect_err("other tables");
        let is_of_another =
            matches!(&error, PostgresConnectError::OtherTables { found, .. } if found == "another program");
        assert!(is_of_another, "{error:?}");
    }
    let migration = environment.builder().migration().expect("a name");
    let error = environment.client().await.batch_execute(&migration).await.expect_err("it changes nothing");
    assert!(format!("{error:?}").contains("another program"), "{error:?}");
}

#[tokio::test]
async fn missing_rights_are_named_as_statements() {
    let Some(environment) = own_environment(&[]).await else { return };
    environment.execute("CREATE ROLE app LOGIN PASSWORD 's3cret'").await;
    let url = environment.server().url_of("app:s3cret");
    let connect = async |migrate| environment.builder().migrate(migrate).connect(&url).await;
    let grant = |error| match error {
        PostgresConnectError::MissingRights { grant, .. } => grant,
        other => panic!("{other:?}"),
    };
    let create = grant(connect(true).await.expect_err("it may not make tables"));
    assert_eq!(create, "GRANT CREATE ON DATABASE \"postgres\" TO \"app\"");
    environment.store().await;
    let missing = connect(false).await.expect_err("it may not use them");
    assert!(!format!("{missing:?}").contains("s3cret"), "{missing:?}");
    environment.execute(&grant(missing)).await;
    let store = std::sync::Arc::new(connect(false).await.expect("all rights"));
    let caller = Caller::new(&store, "a");
    caller.granted(&LockKey::from(("k",)), &caller.id(), LONG).await;
}

/// A function whose arguments match better hides one of the system, also in `public`, where every
/// user may create them before PostgreSQL 15.
///
/// Guarantee: G1.
#[tokio::test]
async fn functions_of_another_user_are_not_called() {
    let Some(environment) = own_environment(&[]).await else { return };
    for function in [
        "hashtextextended(text, int) RETURNS bigint",
        "obj_description(regclass, text) RETURNS text",
        "unnest(text[]) RETURNS SETOF text",
        "cardinality(text[]) RETURNS int",
        "times(bigint, interval) RETURNS interval",
    ] {
        let body = "LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'called'; END $$";
        environment.execute(&format!("CREATE FUNCTION public.{function} {body}")).await;
    }
    environment
        .execute("CREATE OPERATOR public.* (FUNCTION = public.times, LEFTARG = bigint, RIGHTARG = interval)")
        .await;
    let store = environment.store().await;
    let (caller, key) = (Caller::new(&store, "a"), LockKey::from(("k",)));
    let id = caller.id();
    caller.granted(&key, &id, LONG).await;
    assert_eq!(caller.renew(&key, &id).await, RenewReply::Extended);
    assert_eq!(caller.release(&key, &id, Duration::ZERO).await, ReleaseReply::Freed);
}

/// The sessions of a role may have another isolation level, or be read-only.
#[tokio::test]
async fn settings_of_a_role_are_overridden() {
    let Some(environment) = own_environment(&[]).await else { return };
    let role = "CREATE ROLE app LOGIN SUPERUSER; ALTER ROLE app SET default_transaction_isolation = 'serializable';
        ALTER ROLE app SET default_transaction_read_only = on";
    environment.execute(role).await;
    let url = environment.server().url_of("app");
    environment.builder().migrate(true).connect(&url).await.expect("the store sets them");
}

#[tokio::test]
async fn standby_is_refused_and_a_promoted_one_is_used() {
    let Some(environment) = own_environment(&[]).await else { return };
    let store = environment.store().await;
    environment.server().restart_as_standby().await;
    let url = environment.server().url();
    let error = environment.builder().connect_timeout(PATIENCE).connect(&url).await;
    assert!(matches!(error, Err(PostgresConnectError::Standby { .. })), "{error:?}");
    let (caller, key) = (Caller::new(&store, "a"), LockKey::from(("k",)));
    let kind = async || caller.acquire(&key, &caller.id(), LONG, IfBusy::Fail).await.map_err(|error| error.kind());
    // The connections are those of before the restart.
    let _ = kind().await;
    assert_eq!(kind().await, Err(StoreErrorKind::Failover));
    assert_eq!(store.health().await.map_err(|error| error.kind()), Err(StoreErrorKind::Failover));
    environment.execute("SELECT pg_promote()").await;
    caller.granted(&key, &caller.id(), LONG).await;
}

/// As a pooler does: what the calls send does not arrive there.
#[tokio::test]
async fn events_url_to_another_server_is_refused() {
    let (Some(environment), Some(other)) = (environment().await, own_environment(&[]).await) else { return };
    let builder = environment.builder().migrate(true);
    let error = builder.events_url(other.server().url()).connect(&environment.server().url()).await;
    assert!(matches!(error, Err(PostgresConnectError::EventsUnavailable { .. })), "{error:?}");
}

#[tokio::test]
async fn error_of_the_connection_for_messages_names_its_address() {
    let Some(environment) = environment().await else { return };
    let builder = environment.builder().migrate(true);
    let builder = builder.events_url("postgres://ann:s3cret@127.0.0.1:1/app");
    let error = builder.connect(&environment.server().url()).await.expect_err("no server");
    let text = format!("{error:?}");
    assert!(matches!(error, PostgresConnectError::Unreachable { .. }), "{text}");
    assert!(text.contains("127.0.0.1:1:") && !text.contains("s3cret"), "{text}");
}

#[tokio::test]
async fn connection_that_breaks_during_the_test_is_no_pooler() {
    let Some(environment) = own_environment(&[]).await else { return };
    let proxy = Proxy::start_raw((Ipv4Addr::LOCALHOST, environment.server().port()).into()).await;
    // The message is under way for so long.
    proxy.all().delay(Direction::Down, Duration::from_millis(300));
    let builder = environment.builder().migrate(true).connect_timeout(5 * PATIENCE);
    let builder = builder.events_url(format!("postgres://postgres@{}/postgres", proxy.address()));
    let url = environment.server().url();
    let connecting = tokio::spawn(async move { builder.connect(&url).await });
    const SENT: &str =
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_catalog.pg_notify%' AND state = 'idle'";
    until("a message is sent", async || environment.value(SENT).await == 1).await;
    proxy.all().cut();
    proxy.all().heal();
    soon("a retry", connecting).await.expect("runs").expect("the next connection works");
}

#[tokio::test]
async fn key_that_the_database_cannot_have_fails_alone() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let key = LockKey::raw("a\0b").expect("a name");
    let error = caller.acquire(&key, &caller.id(), LONG, IfBusy::Fail).await.expect_err("no text has it");
    assert_eq!(error.kind(), StoreErrorKind::InvalidKey);
    assert_eq!(store.inspect(key).await.map_err(|error| error.kind()), Err(StoreErrorKind::InvalidKey));
    caller.granted(&LockKey::raw("a b").expect("a name"), &caller.id(), LONG).await;
    store.health().await.expect("it works");
}

#[tokio::test]
async fn setting_that_loses_data_in_a_crash_is_logged() {
    let Some(environment) = own_environment(&["fsync=off", "synchronous_commit=off"]).await else { return };
    let log = Log::default();
    let guard = log.listen();
    environment.store().await;
    for setting in ["`fsync=off`", "`synchronous_commit=off`"] {
        until(setting, async || log.text().contains(setting)).await;
    }
    drop(guard);
}

/// The commits of full calls wait for the disk together.
#[tokio::test]
async fn load_opens_connections_up_to_the_limit() {
    let Some(environment) = own_environment(&[]).await else { return };
    let url = environment.server().url();
    let builder = || environment.builder().migrate(true);
    for connections in [2, 65] {
        let error = builder().connections(connections).connect(&url).await.expect_err("out of range");
        assert!(matches!(error, PostgresConnectError::InvalidConnections(_)), "{error:?}");
    }
    let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tower-lock'";
    for connections in [3, 5] {
        until("no connection is open", async || environment.value(open).await == 0).await;
        let store = Arc::new(builder().connections(connections).connect(&url).await.expect("it is up"));
        let caller = Caller::new(&store, "a");
        let acquire_all = async || {
            let keys: Vec<_> = (0..256).map(|n| (LockKey::from(("load", n)), caller.id())).collect();
            join_all(keys.iter().map(|(key, id)| caller.granted(key, id, LONG))).await;
            join_all(keys.iter().map(|(key, id)| caller.release(key, id, Duration::ZERO))).await;
        };
        let key = LockKey::from(("one",));
        let id = caller.id();
        caller.granted(&key, &id, LONG).await;
        caller.release(&key, &id, Duration::ZERO).await;
        // No manager subscribes to messages.
        assert_eq!(environment.value(open).await, 2, "without load");
        let limit = i64::try_from(connections).expect("small") - 1;
        until("connections", async || {
            acquire_all().await;
            let open = environment.value(open).await;
            assert!(open <= limit, "{open} connections");
            open == limit
        })
        .await;
        let other = environment.client().await;
        other.batch_execute("BEGIN; LOCK TABLE tower_lock.locks IN SHARE MODE").await.expect("a lock");
        let watcher = environment.client().await;
        let calls_wait = async {
            let waiting = "SELECT count(*) FROM pg_stat_activity \
                           WHERE application_name = 'tower-lock' AND wait_event_type = 'Lock'";
            until("a call on each", async || {
                let rows = watcher.query(waiting, &[]).await.expect("it is up");
                rows[0].get::<_, i64>(0) == limit - 1
            })
            .await;
        };
        let late: Vec<_> = (0..256).map(|n| (LockKey::from(("late", n)), caller.id())).collect();
        // A call waits for the lock timeout at most.
        let calls = async {
            loop {
                join_all(late.iter().map(|(key, id)| caller.acquire(key, id, LONG, IfBusy::Enqueue))).await;
            }
        };
        select! {
            () = calls_wait => {}
            () = calls => {}
        }
        other.batch_execute("COMMIT").await.expect("it may end");
    }
}

#[tokio::test]
async fn tls_requires_a_trusted_certificate_of_the_host() {
    let Some(environment) = own_environment(&[]).await else { return };
    let server = environment.server();
    // Executed by the server, in the folder of its data.
    let certificate = "COPY (SELECT 1) TO PROGRAM 'openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 \
        -nodes -keyout server.key -out server.crt -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost \
        -addext basicConstraints=critical,CA:false 2>&1'";
    let made = environment.client().await.batch_execute(certificate).await;
    if made.is_err() {
        return tower_lock_testkit::skipped("TLS", "openssl");
    }
    environment.execute("ALTER SYSTEM SET ssl = on").await;
    environment.execute("SELECT pg_reload_conf()").await;
    until("it has TLS", async || {
        environment.value("SELECT count(*) FROM pg_settings WHERE name = 'ssl' AND setting = 'on'").await == 1
    })
    .await;
    let roots = server.data().join("server.crt");
    let trusted = format!("sslrootcert={}", roots.display());
    let connect = async |host: &str, parameters: &str| {
        let url = server.url().replace("127.0.0.1", host);
        let builder = environment.builder().migrate(true);
        builder.connect(&format!("{url}?{parameters}")).await
    };
    for (host, parameters) in [
        ("localhost", "sslmode=require".to_owned()),
        ("127.0.0.1", format!("sslmode=require&{trusted}")),
        ("127.0.0.1", format!("sslmode=verify-full&{trusted}")),
    ] {
        let error = connect(host, &parameters).await.expect_err(&parameters);
        let text = format!("{error:?}");
        assert!(text.contains("certificate") && text.contains("`sslrootcert`"), "{host} {parameters}: {text}");
    }
    let error = connect("localhost", "sslmode=require&sslrootcert=/none").await.expect_err("no file");
    assert!(matches!(error, PostgresConnectError::NoRoots(_)), "{error:?}");
    for mode in ["require", "verify-ca", "verify-full"] {
        let store = connect("localhost", &format!("sslmode={mode}&{trusted}")).await.expect(mode);
        let encrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
            WHERE ssl AND application_name = 'tower-lock'";
        assert!(environment.value(encrypted).await > 0, "{mode}");
        let locks = LockManager::new(store);
        locks.lock(("k",)).await.expect("free").release().await.expect("held");
    }
    connect("127.0.0.1", "sslmode=prefer").await.expect("without TLS");
}
