//! Connecting: what is missing, and what the error says.

use std::{
    fs,
    net::Ipv4Addr,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
};
use tower_lock::{
    LockKey, LockManager,
    store::{
        AcquireReply, ConnectError, Credentials, IfBusy, LockStore, PostgresConnectError, ReleaseReply, RenewReply,
        StoreErrorKind,
    },
};

use tower_lock_testkit::{
    Direction, Proxy, limits,
    locks::key,
    log::Log,
    wait::{soon, until},
};

use crate::support::{Caller, LONG, environment, own_environment};

#[tokio::test]
async fn database_without_tables_names_the_migration() {
    let Some(environment) = environment().await else { return };
    let url = environment.url();
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
    let url = environment.url();
    let connect = || environment.builder().migrate(true).connect(&url);
    for store in join_all([connect(), connect(), connect(), connect()]).await {
        store.expect("the tables are there");
    }
}

#[tokio::test]
async fn url_of_a_manager_may_name_a_database() {
    let Some(environment) = environment().await else { return };
    let url = format!("{}?schema={}", environment.url(), environment.schema);
    until("no tables", async || {
        let error = LockManager::connect(&url).await.map(drop).expect_err("no tables");
        matches!(error, ConnectError::Postgres(PostgresConnectError::NoTables { .. }))
    })
    .await;
    let (url, mut locks) = (format!("{url}&migrate=true"), None);
    until("a connection", async || {
        locks = LockManager::connect(&url).await.ok();
        locks.is_some()
    })
    .await;
    let locks = locks.expect("connected").build();
    locks.lock(("k",)).await.expect("free").release().await.expect("held");
    assert_eq!(environment.value("SELECT count(*) FROM {schema}.locks").await, 1, "in the schema of the URL");
}

#[tokio::test]
async fn tables_of_another_program_are_not_used() {
    let Some(environment) = environment().await else { return };
    environment.execute("CREATE SCHEMA {schema}; CREATE TABLE {schema}.locks (id int)").await;
    for migrate in [false, true] {
        let builder = environment.builder().migrate(migrate);
        let error = builder.connect(&environment.url()).await.expect_err("other tables");
        let is_of_another =
            matches!(&error, PostgresConnectError::OtherTables { found, .. } if found == "another program");
        assert!(is_of_another, "{error:?}");
    }
    let migration = environment.builder().migration().expect("a name");
    let error = environment.client().await.batch_execute(&migration).await.expect_err("it changes nothing");
    assert!(format!("{error:?}").contains("another program"), "{error:?}");
}

/// The first server of the URL accepts connections, and never replies.
/// Guarantee: G6.
#[tokio::test]
async fn silent_first_address_leaves_time_for_the_next() {
    let Some(environment) = environment().await else { return };
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let silent = silent.local_addr().expect("bound");
    environment.store().await;
    let url = environment.url().replace('@', &format!("@{silent},"));
    let builder = environment.builder().connect_timeout(limits::OUTAGE);
    let store = Arc::new(builder.connect(&url).await.expect("the second one replies"));
    let locks = LockManager::new(Arc::clone(&store));
    drop(locks.try_lock(("k",)).await.expect("free"));
    locks.health().await.expect("messages, too");
}

/// Refuses each session with settings, and passes the others on.
async fn refuse_settings(pooler: TcpListener, server: u16, code: &'static str) {
    while let Ok((mut client, _)) = pooler.accept().await {
        tokio::spawn(async move {
            let length = client.read_u32().await?;
            let mut start = vec![0; length as usize - 4];
            client.read_exact(&mut start).await?;
            if start.windows(8).any(|bytes| bytes == b"options\0") {
                let error = format!("SFATAL\0C{code}\0Mno settings\0\0");
                client.write_u8(b'E').await?;
                client.write_u32(4 + u32::try_from(error.len()).expect("short")).await?;
                return client.write_all(error.as_bytes()).await;
            }
            let mut upstream = TcpStream::connect((Ipv4Addr::LOCALHOST, server)).await?;
            upstream.write_u32(length).await?;
            upstream.write_all(&start).await?;
            copy_bidirectional(&mut client, &mut upstream).await.map(drop)
        });
    }
}

/// The token of a cloud opens no connection after its end.
#[tokio::test]
async fn each_connect_asks_for_user_and_password() {
    let Some(environment) = own_environment(&[]).await else { return };
    environment.execute("ALTER ROLE {user} PASSWORD 'first'").await;
    let hba = environment.server().data().join("pg_hba.conf");
    let rules = fs::read_to_string(&hba).expect("readable");
    fs::write(&hba, environment.named("host all {user} all password\n") + &rules).expect("writable");
    environment.execute("SELECT pg_reload_conf()").await;
    let refused = async || match environment.builder().connect(&environment.url()).await {
        Err(error) => format!("{error:?}").contains("requires a password, and the URL has none"),
        Ok(_) => false,
    };
    until("passwords count", refused).await;
    let token = Arc::new(Mutex::new(Some("first")));
    let (user, current) = (environment.named("{user}"), Arc::clone(&token));
    let credentials = move || {
        let (user, token) = (user.clone(), *current.lock().expect("no panic"));
        async move { Ok(Credentials::new(user, token.ok_or("no token")?)) }
    };
    let builder = || environment.builder().call_timeout(limits::SHORT).credentials(credentials.clone());
    let url = environment.url().replace(&environment.named("{user}@"), "");
    let locks = LockManager::new(environment.connect(builder(), &url).await);
    locks.try_lock(key()).await.expect("free").release().await.expect("held");
    environment.execute("ALTER ROLE {user} PASSWORD 'second'").await;
    environment.kill_sessions("true").await;
    let fails_with = async |text: &str| {
        let failed = locks.try_lock(key()).await.err().map(|error| format!("{error:?}"));
        failed.is_some_and(|error| error.contains(text))
    };
    until("the first one opens none", async || fails_with("are the user and the password correct?").await).await;
    *token.lock().expect("no panic") = None;
    until("the function fails", async || fails_with("the function `credentials` failed: no token").await).await;
    *token.lock().expect("no panic") = Some("second");
    until("the next one counts", async || locks.health().await.is_ok()).await;
    locks.try_lock(key()).await.expect("free").release().await.expect("held");
    let error = builder().connect(&environment.url()).await.expect_err("two users");
    assert!(
        matches!(&error, PostgresConnectError::InvalidUrl(defect) if defect.contains("`credentials`")),
        "{error:?}"
    );
}

/// Each pooler has a code of its own for it.
#[tokio::test]
async fn pooler_that_refuses_settings_is_used_without_them() {
    let Some(environment) = environment().await else { return };
    environment.store().await;
    for code in ["08P01", "0A000", "22023", "42704", "28000"] {
        let pooler = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let port = pooler.local_addr().expect("bound").port();
        let pooling = tokio::spawn(refuse_settings(pooler, environment.server().port(), code));
        let url = environment.url().replace(&environment.server().port().to_string(), &port.to_string());
        environment.builder().connect(&url).await.expect(code);
        pooling.abort();
    }
}

/// `?schema=public`, as in URLs of other programs: their objects are neither used nor changed.
#[tokio::test]
async fn schema_with_objects_of_another_program_is_refused() {
    for object in ["TABLE {schema}.orders (id int)", "FUNCTION {schema}.total() RETURNS int LANGUAGE sql AS 'SELECT 1'"]
    {
        let Some(environment) = environment().await else { return };
        environment.execute(&format!("CREATE SCHEMA {{schema}}; CREATE {object}")).await;
        let name = if object.starts_with("TABLE") { "orders" } else { "total" };
        for migrate in [false, true] {
            let builder = environment.builder().migrate(migrate);
            let error = builder.connect(&environment.url()).await.expect_err("of another program");
            let names_it = |found: &str| found == format!("another program (`{name}`)");
            assert!(matches!(&error, PostgresConnectError::OtherTables { found, .. } if names_it(found)), "{error:?}");
        }
        let migration = environment.builder().migration().expect("a name");
        let error = environment.client().await.batch_execute(&migration).await.expect_err("it changes nothing");
        assert!(format!("{error:?}").contains(&format!("has `{name}` of another program")), "{error:?}");
    }
}

/// Another program may add objects to the schema: they need no right, and keep theirs.
#[tokio::test]
async fn function_of_another_program_in_the_schema_is_left_alone() {
    const COUNT: &str = "SELECT count(*) FROM pg_proc WHERE pronamespace = '{schema}'::regnamespace \
        AND proname = 'total' AND proacl IS NULL";
    let Some(environment) = environment().await else { return };
    environment.store().await;
    environment
        .execute(
            "CREATE FUNCTION {schema}.total() RETURNS int LANGUAGE sql AS 'SELECT 1'; \
             COMMENT ON FUNCTION {schema}.check_fence(text, bigint, text) IS 'tower-lock functions 0'",
        )
        .await;
    environment.builder().migrate(true).connect(&environment.url()).await.expect("older functions are replaced");
    assert_eq!(environment.value(COUNT).await, 1, "every user may execute it, as before");
}

#[tokio::test]
async fn missing_rights_are_named_as_statements() {
    let Some(environment) = environment().await else { return };
    environment.execute("CREATE ROLE app_{user} LOGIN PASSWORD 's3cret'").await;
    let url = environment.server().url_of(&environment.named("app_{user}:s3cret"));
    let connect = async |migrate| environment.builder().migrate(migrate).connect(&url).await;
    let grant = |error| match error {
        PostgresConnectError::MissingRights { grant, .. } => grant,
        other => panic!("{other:?}"),
    };
    let create = grant(connect(true).await.expect_err("it may not make tables"));
    assert_eq!(create, environment.named("GRANT CREATE ON DATABASE \"postgres\" TO \"app_{user}\""));
    environment.store().await;
    let missing = connect(false).await.expect_err("it may not use them");
    assert!(!format!("{missing:?}").contains("s3cret"), "{missing:?}");
    environment.execute(&grant(missing)).await;
    let store = Arc::new(connect(false).await.expect("all rights"));
    let caller = Caller::new(&store, "a");
    caller.granted(&LockKey::from(("k",)), &caller.id(), LONG).await;
}

/// A role that makes the schema before the service does could replace each function later.
///
/// Guarantee: G1.
#[tokio::test]
async fn schema_of_a_role_that_is_not_trusted_is_refused() {
    let Some(environment) = environment().await else { return };
    let roles = "CREATE ROLE maker_{user}; CREATE ROLE app_{user} LOGIN;
        GRANT CREATE ON DATABASE postgres TO app_{user}; CREATE SCHEMA {schema} AUTHORIZATION maker_{user};
        GRANT ALL ON SCHEMA {schema} TO app_{user}";
    environment.execute(roles).await;
    let url = environment.server().url_of(&environment.named("app_{user}"));
    let connect = async |migrate| environment.builder().migrate(migrate).connect(&url).await;
    let is_refused = async |migrate| match connect(migrate).await.expect_err("of another owner") {
        PostgresConnectError::OtherOwner { owner, .. } => assert_eq!(owner, environment.named("maker_{user}")),
        other => panic!("{other:?}"),
    };
    is_refused(true).await;
    assert_eq!(
        environment
            .value(
                "SELECT count(*) FROM pg_proc WHERE proname = 'check_fence' AND pronamespace = '{schema}'::regnamespace"
            )
            .await,
        0,
        "nothing was made"
    );
    // The role is trusted, and then a function has another owner.
    environment.execute("GRANT maker_{user} TO app_{user}").await;
    connect(true).await.expect("it is a member");
    environment.execute("CREATE ROLE other_{user}; GRANT ALL ON SCHEMA {schema} TO other_{user}").await;
    for of in ["FUNCTION {schema}.us", "TABLE {schema}.floor"] {
        environment.execute(&format!("ALTER {of} OWNER TO other_{{user}}")).await;
        let text = format!("{:?}", connect(false).await.expect_err("of another owner"));
        assert!(text.contains(&environment.named("GRANT \"other_{user}\" TO \"app_{user}\"")), "{text}");
        environment.execute(&format!("ALTER {of} OWNER TO app_{{user}}")).await;
    }
    connect(false).await.expect("its own");
}

/// An address that leads to another database, while the process of the locks goes on.
///
/// Guarantee: G1.
#[tokio::test]
async fn tables_of_another_database_are_not_those_of_the_start() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let (caller, key) = (Caller::new(&store, "a"), LockKey::from(("k",)));
    caller.granted(&key, &caller.id(), LONG).await;
    // The same names, and other rows.
    environment.execute("ALTER SCHEMA {schema} RENAME TO former_{schema}").await;
    environment.migrate(&[]).await;
    environment.kill_sessions("true").await;
    let error = caller.acquire(&key, &caller.id(), LONG, IfBusy::Fail).await.expect_err("other tables");
    assert_eq!(error.kind(), StoreErrorKind::Refused, "{error:?}");
    environment.execute("DROP SCHEMA {schema} CASCADE; ALTER SCHEMA former_{schema} RENAME TO {schema}").await;
    until("its own tables are there again", async || {
        let reply = caller.acquire(&key, &caller.id(), LONG, IfBusy::Fail).await;
        assert!(!matches!(reply, Ok(AcquireReply::Granted { .. })), "{reply:?}");
        reply.is_ok()
    })
    .await;
}

#[tokio::test]
async fn database_without_utf8_is_refused() {
    let Some(environment) = environment().await else { return };
    let database = "CREATE DATABASE latin_{user} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0";
    environment.execute(database).await;
    let url = environment.named(&format!("{}/latin_{{user}}", environment.url().trim_end_matches("/postgres")));
    let error = environment.builder().migrate(true).connect(&url).await.expect_err("no text for some keys");
    assert!(matches!(&error, PostgresConnectError::Encoding { encoding, .. } if encoding == "LATIN1"), "{error:?}");
}

/// A function whose arguments match better hides one of the system, also in `public`, where every
/// user may create them before PostgreSQL 15, or in the schema with the name of the user.
///
/// Guarantee: G1.
#[tokio::test]
async fn functions_of_another_user_are_not_called() {
    let Some(environment) = environment().await else { return };
    environment.execute("CREATE SCHEMA {user}").await;
    for function in [
        "hashtextextended(text, int) RETURNS bigint",
        "obj_description(regclass, text) RETURNS text",
        "unnest(text[]) RETURNS SETOF text",
        "cardinality(text[]) RETURNS int",
        "times(bigint, interval) RETURNS interval",
    ] {
        let body = "LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'called'; END $$";
        environment.execute(&format!("CREATE FUNCTION {{user}}.{function} {body}")).await;
    }
    let operator = "CREATE OPERATOR {user}.* (FUNCTION = {user}.times, LEFTARG = bigint, RIGHTARG = interval)";
    environment.execute(operator).await;
    let is_found = environment.client().await.batch_execute("SELECT cardinality('{a}'::text[])").await;
    is_found.expect_err("a call without a schema");
    let store = environment.builder().migrate(true).connect(&environment.url()).await.expect("it is up");
    let (caller, key) = (Caller::new(&Arc::new(store), "a"), LockKey::from(("k",)));
    let id = caller.id();
    caller.granted(&key, &id, LONG).await;
    assert_eq!(caller.renew(&key, &id).await, RenewReply::Extended);
    assert_eq!(caller.release(&key, &id, Duration::ZERO).await, ReleaseReply::Freed);
}

/// The sessions of a role may have another isolation level, or be read-only.
#[tokio::test]
async fn settings_of_a_role_are_overridden() {
    let Some(environment) = environment().await else { return };
    let role = "ALTER ROLE {user} SET default_transaction_isolation = 'serializable';
        ALTER ROLE {user} SET default_transaction_read_only = on";
    environment.execute(role).await;
    environment.builder().migrate(true).connect(&environment.url()).await.expect("the store sets them");
}

#[tokio::test]
async fn standby_is_refused_and_a_promoted_one_is_used() {
    let Some(environment) = own_environment(&[]).await else { return };
    let store = environment.store().await;
    environment.server().restart_as_standby().await;
    until("it is refused", async || {
        // It may be promoted soon: this is retried.
        let error = environment.builder().connect_timeout(limits::SHORT).connect(&environment.url()).await;
        matches!(error.expect_err("a standby"), PostgresConnectError::Standby { .. })
    })
    .await;
    let (caller, key) = (Caller::new(&store, "a"), LockKey::from(("k",)));
    // The connections are those of before the restart.
    until("a failover", async || {
        let reply = caller.acquire(&key, &caller.id(), LONG, IfBusy::Fail).await;
        reply.is_err_and(|error| error.kind() == StoreErrorKind::Failover)
    })
    .await;
    assert_eq!(store.health().await.map_err(|error| error.kind()), Err(StoreErrorKind::Failover));
    environment.execute("SELECT pg_promote()").await;
    caller.granted(&key, &caller.id(), LONG).await;
}

/// What the calls send does not arrive there, as at a pooler.
#[tokio::test]
async fn events_url_to_another_database_is_refused() {
    let Some(environment) = environment().await else { return };
    environment.store().await;
    let other = format!("{}/template1", environment.url().trim_end_matches("/postgres"));
    until("it is refused", async || {
        let builder = environment.builder().call_timeout(limits::SHORT).events_url(&other);
        let error = builder.connect(&environment.url()).await.expect_err("no message arrives");
        matches!(error, PostgresConnectError::EventsUnavailable { .. })
    })
    .await;
}

#[tokio::test]
async fn error_of_the_connection_for_messages_names_its_address() {
    let Some(environment) = environment().await else { return };
    environment.store().await;
    until("it is refused", async || {
        let builder = environment.builder().connect_timeout(limits::SHORT);
        let builder = builder.events_url("postgres://ann:s3cret@127.0.0.1:1/app");
        let error = builder.connect(&environment.url()).await.expect_err("no server");
        let text = format!("{error:?}");
        assert!(matches!(error, PostgresConnectError::Unreachable { .. }) && !text.contains("s3cret"), "{text}");
        text.contains("127.0.0.1:1:")
    })
    .await;
}

#[tokio::test]
async fn connection_that_breaks_during_the_test_is_no_pooler() {
    let Some(environment) = environment().await else { return };
    environment.store().await;
    let proxy = Proxy::start_raw((Ipv4Addr::LOCALHOST, environment.server().port()).into()).await;
    // The message is under way for so long.
    proxy.all().delay(Direction::Down, limits::SHORT);
    let builder = environment.builder().call_timeout(4 * limits::SHORT);
    let builder = builder.events_url(format!("postgres://postgres@{}/postgres", proxy.address()));
    let url = environment.url();
    let connecting = tokio::spawn(async move { builder.connect(&url).await });
    const SENT: &str = "SELECT count(*) FROM pg_stat_activity \
        WHERE usename = '{user}' AND query LIKE 'SELECT pg_catalog.pg_notify%' AND state = 'idle'";
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
    let Some(environment) = environment().await else { return };
    environment.execute("ALTER ROLE {user} SET synchronous_commit = off").await;
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
    let Some(environment) = environment().await else { return };
    environment.store().await;
    let url = environment.url();
    let builder = || environment.builder();
    for connections in [2, 65] {
        let error = builder().connections(connections).connect(&url).await.expect_err("out of range");
        assert!(matches!(error, PostgresConnectError::InvalidConnections(_)), "{error:?}");
    }
    let open = "SELECT count(*) FROM pg_stat_activity WHERE usename = '{user}' AND application_name = 'tower-lock'";
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
        until("the connections without load", async || environment.value(open).await == 3).await;
        let limit = i64::try_from(connections).expect("small");
        until("connections", async || {
            acquire_all().await;
            let open = environment.value(open).await;
            assert!(open <= limit, "{open} connections");
            open == limit
        })
        .await;
        let other = environment.client().await;
        environment.run(&other, "BEGIN; LOCK TABLE {schema}.locks IN SHARE MODE").await;
        let late: Vec<_> = (0..256).map(|n| (LockKey::from(("late", connections, n)), caller.id())).collect();
        let calls = join_all(late.iter().map(|(key, id)| caller.granted(key, id, LONG)));
        let end = async {
            // One on each connection for acquires.
            environment.sessions_wait(limit - 2).await;
            environment.run(&other, "COMMIT").await;
        };
        tokio::join!(calls, end);
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
        let url = environment.url().replace("127.0.0.1", host);
        environment.builder().migrate(true).connect(&format!("{url}?{parameters}")).await
    };
    let other_host = "for another host name";
    for (host, parameters, hint) in [
        ("localhost", "sslmode=require".to_owned(), "`sslrootcert`"),
        ("127.0.0.1", format!("sslmode=require&{trusted}"), other_host),
        ("127.0.0.1", format!("sslmode=verify-full&{trusted}"), other_host),
    ] {
        let error = connect(host, &parameters).await.expect_err(&parameters);
        let text = format!("{error:?}");
        assert!(text.contains("certificate") && text.contains(hint), "{host} {parameters}: {text}");
    }
    for mode in ["require", "verify-ca", "verify-full"] {
        let store = connect("localhost", &format!("sslmode={mode}&{trusted}")).await.expect(mode);
        let encrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
            WHERE ssl AND application_name = 'tower-lock'";
        assert!(environment.value(encrypted).await > 0, "{mode}");
        let locks = LockManager::new(store);
        locks.lock(("k",)).await.expect("free").release().await.expect("held");
    }
    connect("127.0.0.1", "sslmode=prefer").await.expect("without TLS");

    // With a certificate of the client, which the server requires from now on.
    environment.execute("ALTER SYSTEM SET ssl_ca_file = 'server.crt'").await;
    let file = |name: &str| server.data().join(name);
    let rules = fs::read_to_string(file("pg_hba.conf")).expect("a file");
    let of_tls = "hostssl all all all trust clientcert=verify-ca\n";
    fs::write(file("pg_hba.conf"), format!("{of_tls}{rules}")).expect("a file");
    environment.execute("SELECT pg_reload_conf()").await;
    until("it requires a certificate", async || {
        connect("localhost", &format!("sslmode=require&{trusted}"))
            .await
            .is_err_and(|error| format!("{error:?}").contains("certificate"))
    })
    .await;
    let certificate = format!("sslcert={}&sslkey={}", file("server.crt").display(), file("server.key").display());
    let store = connect("localhost", &format!("sslmode=verify-full&{trusted}&{certificate}")).await.expect("by files");
    LockManager::new(store).lock(("k",)).await.expect("free").release().await.expect("held");
    let read = |name: &str| fs::read(file(name)).expect("a file");
    let url = format!("{}?sslmode=verify-full", environment.url().replace("127.0.0.1", "localhost"));
    let builder = environment.builder().tls_roots(read("server.crt"));
    let error = builder.clone().connect(&url).await.expect_err("no certificate");
    assert!(format!("{error:?}").contains("certificate"), "{error:?}");
    let store = builder.tls_client_certificate(read("server.crt"), read("server.key")).connect(&url).await;
    LockManager::new(store.expect("by texts")).lock(("k",)).await.expect("free").release().await.expect("held");
}
