//! Checks of a server before it is used: version, role, tables, rights, messages.

use std::sync::Arc;

use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};
use tokio_postgres::{
    error::SqlState,
    types::{ToSql, Type},
};
use tracing::warn;

use super::{
    connection::{Connector, column, query},
    error::{CallError, PostgresConnectError},
    messages::PgListener,
    schema::{FUNCTIONS, VERSION, function_names},
};
use crate::{
    process,
    store::{
        database::{self, replies::only},
        remote::{link::LinkError, settings},
    },
};

type Server = database::Server<Connector>;

pub(super) type SelfTestError = settings::SelfTestError<PostgresConnectError>;

const SERVER: &str = "SELECT current_setting('server_version_num')::int8, current_setting('server_version'), \
    pg_is_in_recovery(), current_setting('transaction_isolation'), current_setting('fsync'), \
    current_setting('synchronous_commit'), current_user::text, current_database()::text, \
    current_setting('server_encoding')";

/// The comment of the table of locks, whether all rights are there, the number of the functions,
/// a role that could replace them, which the user of the store has no reason to trust, and the name
/// of something in the schema. Of the catalog, which needs no right. No row: there is no schema.
const TABLES: &str = "SELECT locks.oid IS NOT NULL, pg_catalog.obj_description(locks.oid, 'pg_class'), \
    pg_catalog.has_schema_privilege(n.oid, 'USAGE'), \
    coalesce((SELECT pg_catalog.bool_and(pg_catalog.has_table_privilege(t.oid, p.right)) \
        FROM pg_catalog.pg_class t, \
            pg_catalog.unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p (\"right\") \
        WHERE t.relnamespace = n.oid AND t.relname IN ('locks', 'waiters', 'records', 'floor')), false) \
    AND (SELECT pg_catalog.bool_and(pg_catalog.has_function_privilege(f.oid, 'EXECUTE')) \
        FROM pg_catalog.pg_proc f WHERE f.pronamespace = n.oid AND f.proname = ANY ($2)), \
    coalesce((SELECT pg_catalog.max(substring(pg_catalog.obj_description(f.oid, 'pg_proc') FROM '[0-9]+$')::int8) \
        FROM pg_catalog.pg_proc f WHERE f.pronamespace = n.oid AND f.proname = 'check_fence'), 0), \
    (SELECT pg_catalog.min(r.rolname::text) FROM pg_catalog.pg_roles r \
        WHERE NOT r.rolsuper AND NOT pg_catalog.pg_has_role(r.oid, 'MEMBER') AND (r.oid = n.nspowner \
            OR r.oid IN (SELECT t.relowner FROM pg_catalog.pg_class t WHERE t.relnamespace = n.oid) \
            OR r.oid IN (SELECT f.proowner FROM pg_catalog.pg_proc f WHERE f.pronamespace = n.oid))), \
    coalesce((SELECT pg_catalog.min(c.relname::text) FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid), \
        (SELECT pg_catalog.min(f.proname::text) FROM pg_catalog.pg_proc f WHERE f.pronamespace = n.oid)) \
    FROM pg_catalog.pg_namespace n \
    LEFT JOIN pg_catalog.pg_class locks ON locks.relnamespace = n.oid AND locks.relname = 'locks' \
    WHERE n.nspname = $1";

/// Checks the server. Makes the tables, or replaces older functions, if `migrate` is set. From then
/// on `calls` connects to these tables alone. Returns whether messages arrive. `events`: the
/// address for them, if the user has chosen another one.
pub(super) async fn self_test(
    server: &Server,
    migrate: bool,
    calls: &Connector,
    events: Option<&Connector>,
) -> Result<bool, SelfTestError> {
    let (user, database) = check_server(server).await?;
    let found = check_tables(server, &user).await?;
    // Newer ones have the same calls.
    if found.is_none_or(|found| found < FUNCTIONS) {
        let (address, schema) = (server.address.clone(), server.schema.name.clone());
        let missing = match found {
            None => PostgresConnectError::NoTables { address, schema },
            Some(found) => PostgresConnectError::OlderFunctions { address, schema, found },
        };
        if !migrate {
            return Err(missing.into());
        }
        execute_migration(server, &user, &database, missing).await?;
        check_tables(server, &user).await?;
    }
    let failed = |error| test_failed(&server.address, error);
    let deadline = server.timeouts.call_deadline();
    let id = query(&server.main_conn, &server.schema.tables_id(), &[], deadline).await.map_err(failed)?;
    calls.pin_tables(server.schema.tables_id(), column(only(&id).map_err(failed)?, 0).map_err(failed)?);
    let arrives = message_arrives(server, events.unwrap_or(calls)).await?;
    if let Some(events) = events.filter(|_| !arrives) {
        return Err(PostgresConnectError::EventsUnavailable { address: events.address.clone() }.into());
    }
    if !arrives {
        let address = server.address.clone();
        server.background.log(move || {
            warn!(
                target: "tower_lock",
                "messages of PostgreSQL at {address} do not arrive, as behind a pooler: waiters poll, which is slower. \
                 Set `events_url` to the address of the server itself",
            );
        });
    }
    Ok(arrives)
}

/// Returns the user and the database.
async fn check_server(server: &Server) -> Result<(String, String), SelfTestError> {
    let failed = |error| test_failed(&server.address, error);
    let deadline = server.timeouts.call_deadline();
    let rows = query(&server.main_conn, SERVER, &[], deadline).await.map_err(failed)?;
    let row = only(&rows).map_err(failed)?;
    let text = |index| column::<&str>(row, index).map(str::to_owned).map_err(failed);
    let address = || server.address.clone();
    if column::<i64>(row, 0).map_err(failed)? < 130_000 {
        return Err(PostgresConnectError::UnsupportedVersion { address: address(), version: text(1)? }.into());
    }
    if column(row, 2).map_err(failed)? {
        // It may be promoted soon.
        return Err(SelfTestError { error: PostgresConnectError::Standby { address: address() }, is_transient: true });
    }
    let (level, user, encoding) = (text(3)?, text(6)?, text(8)?);
    if encoding != "UTF8" {
        return Err(PostgresConnectError::Encoding { address: address(), encoding }.into());
    }
    if level != "read committed" {
        return Err(PostgresConnectError::IsolationLevel { address: address(), user, level }.into());
    }
    for (setting, value) in [("fsync", text(4)?), ("synchronous_commit", text(5)?)] {
        if value == "off" {
            let address = address();
            server.background.log(move || {
                warn!(
                    target: "tower_lock",
                    "PostgreSQL at {address} has `{setting}=off`: a crash of the server loses the newest locks and \
                     records, and then two holders of one key can overlap",
                );
            });
        }
    }
    Ok((user, text(7)?))
}

/// Whether the tables are there, of this version and with all rights. Returns the number of the
/// functions.
async fn check_tables(server: &Server, user: &str) -> Result<Option<u32>, SelfTestError> {
    let failed = |error| test_failed(&server.address, error);
    let (address, schema) = (|| server.address.clone(), || server.schema.name.clone());
    let deadline = server.timeouts.call_deadline();
    let functions: Vec<_> = function_names().collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 2] =
        [(&server.schema.name, Type::TEXT), (&functions, Type::TEXT_ARRAY)];
    let rows = query(&server.main_conn, TABLES, &parameters, deadline).await;
    let rows = rows.map_err(failed)?;
    let Some(row) = rows.first() else { return Ok(None) };
    let has_tables: bool = column(row, 0).map_err(failed)?;
    if let Some(name) = column::<Option<&str>>(row, 6).map_err(failed)?.filter(|_| !has_tables) {
        let found = format!("another program (`{name}`)");
        return Err(PostgresConnectError::OtherTables { address: address(), schema: schema(), found }.into());
    }
    if let Some(owner) = column::<Option<&str>>(row, 5).map_err(failed)? {
        let (user, owner) = (user.to_owned(), owner.to_owned());
        return Err(PostgresConnectError::OtherOwner { address: address(), schema: schema(), user, owner }.into());
    }
    if !has_tables {
        return Ok(None);
    }
    let found: Option<&str> = column(row, 1).map_err(failed)?;
    if found != Some(VERSION) {
        let found = found.filter(|found| found.starts_with("tower-lock ")).unwrap_or("another program").to_owned();
        return Err(PostgresConnectError::OtherTables { address: address(), schema: schema(), found }.into());
    }
    if !(column(row, 2).map_err(failed)? && column(row, 3).map_err(failed)?) {
        let (user, schema) = (user.to_owned(), schema());
        let grant = format!(
            "GRANT USAGE ON SCHEMA {schema} TO \"{user}\"; \
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO \"{user}\"; \
             GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO \"{user}\""
        );
        return Err(PostgresConnectError::MissingRights { address: address(), user, grant }.into());
    }
    Ok(Some(u32::try_from(column::<i64>(row, 4).map_err(failed)?).unwrap_or(u32::MAX)))
}

/// Executes the migration.
async fn execute_migration(
    server: &Server,
    user: &str,
    database: &str,
    missing: PostgresConnectError,
) -> Result<(), SelfTestError> {
    let call = server.main_conn.ready().await;
    call.map_err(|error| test_failed(&server.address, error.into()))?;
    let deadline = Instant::now() + server.timeouts.connect;
    match query(&server.main_conn, &server.schema.migration(), &[], deadline).await {
        Err(error) if code(&error) == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            let PostgresConnectError::NoTables { address, .. } = missing else { return Err(missing.into()) };
            let grant = format!("GRANT CREATE ON DATABASE \"{database}\" TO \"{user}\"");
            Err(PostgresConnectError::MissingRights { address, user: user.to_owned(), grant }.into())
        }
        // "Tuple concurrently updated": another session has changed the rights of a function.
        Err(error) if code(&error) == Some(&SqlState::INTERNAL_ERROR) => {
            Err(SelfTestError { is_transient: true, ..test_failed(&server.address, error) })
        }
        made => made.map(drop).map_err(|error| test_failed(&server.address, error)),
    }
}

/// Whether a message of the connection for calls arrives. A pooler passes it to another client.
async fn message_arrives(server: &Server, events: &Connector) -> Result<bool, SelfTestError> {
    let failed = |error| test_failed(&events.address, error);
    let channel = format!("self-test:{:016x}", process::random_bits());
    let received = Arc::<Notify>::default();
    let on_message = {
        let (channel, received) = (channel.clone(), Arc::clone(&received));
        Box::new(move |to: &str, _: &str| {
            if to == channel {
                received.notify_one();
            }
        })
    };
    let opened = timeout(server.timeouts.connect, PgListener::open(events, on_message)).await;
    let listener = opened.unwrap_or(Err(LinkError::ConnectTimeout.into())).map_err(failed)?;
    let channels = [channel];
    let execute = async |command| {
        let executed = timeout(server.timeouts.call, listener.execute(command, &channels)).await;
        executed.unwrap_or(Err(LinkError::NoReply.into())).map_err(failed)
    };
    execute("LISTEN").await?;
    let deadline = server.timeouts.call_deadline();
    let text = format!("tower-lock:{}", channels[0]);
    let notified =
        query(&server.synced_conns.take(), "SELECT pg_catalog.pg_notify($1, '')", &[(&text, Type::TEXT)], deadline)
            .await;
    notified.map_err(|error| test_failed(&server.address, error))?;
    let arrives = timeout(server.timeouts.call, received.notified()).await.is_ok();
    // Before the message counts as lost: the connection may have broken, and a retry has another.
    // The session of a pooler goes on without the channel.
    execute("UNLISTEN").await?;
    Ok(arrives)
}

/// The code of an error of the server.
fn code(error: &CallError) -> Option<&SqlState> {
    error.driver().and_then(|error| error.code())
}

fn test_failed(address: &str, error: CallError) -> SelfTestError {
    let is_transient = error.is_transient();
    let (address, source) = (address.to_owned(), error.with_hint(address));
    SelfTestError { error: PostgresConnectError::Unreachable { address, source }, is_transient }
}
