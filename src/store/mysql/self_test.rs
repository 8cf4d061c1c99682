//! Checks of a server before it is used: version, role, settings, tables, rights.

use std::collections::HashMap;

use mysql_async::Row;
use tokio::time::Instant;
use tracing::warn;

use super::{
    connection::{Connector, query},
    error::{CallError, MysqlConnectError, code},
    schema::{PROCEDURES, VERSION},
};
use crate::store::{
    database::{self, Row as _},
    remote::settings,
};

type SelfTestError = settings::SelfTestError<MysqlConnectError>;
type Server = database::Server<Connector>;

const VARIABLES: &str = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'read_only', 'super_read_only', \
    'log_bin', 'binlog_format', 'wsrep_on', 'group_replication_single_primary_mode', \
    'group_replication_group_name', 'innodb_flush_log_at_trx_commit', 'sync_binlog')";

/// Checks the server. Makes the tables, or replaces older procedures, if `migrate` is set. From
/// then on `connector` connects to these tables alone.
pub(super) async fn self_test(server: &Server, migrate: bool, connector: &Connector) -> Result<(), SelfTestError> {
    check_server(server, &read(server, VARIABLES).await?)?;
    let found = check_tables(server).await?;
    // Newer ones have the same calls.
    if found.is_none_or(|found| found < PROCEDURES) {
        if !migrate {
            let (address, prefix) = (server.address.clone(), server.schema.prefix.clone());
            return Err(MysqlConnectError::Migration { address, prefix, found: found.unwrap_or(0) }.into());
        }
        let deadline = Instant::now() + server.timeouts.connect;
        for statement in server.schema.statements(found.is_some_and(|found| found > 0)) {
            match query(&server.main_conn, &statement, deadline).await {
                // Another instance has made the procedure at the same time.
                Err(error) if error.driver().and_then(code) == Some(1304) => {}
                executed => drop(executed.map_err(|error| test_failed(server, error))?),
            }
        }
    }
    let rows = read(server, &server.schema.call("self_test", &[])).await?;
    connector.pin_tables(server.schema.prefix.clone(), rows.first().and_then(|row| row.text(0)).unwrap_or_default());
    Ok(())
}

fn check_server(server: &Server, variables: &[Row]) -> Result<(), SelfTestError> {
    let pair = |row: &Row| Some((row.text(0)?.to_ascii_lowercase(), row.text(1)?));
    let variables: HashMap<_, _> = variables.iter().filter_map(pair).collect();
    let value = |name: &str| variables.get(name).map_or("", String::as_str);
    let is_on = |name| ["ON", "1"].contains(&value(name));
    let version = value("version");
    let mut numbers = version.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let defect = if number < if version.contains("MariaDB") { (10, 6) } else { (8, 0) } {
        format!("its version is {version}, but at least MySQL 8.0 or MariaDB 10.6 is required")
    } else if is_on("read_only") || is_on("super_read_only") {
        // It may be promoted soon.
        let defect = "it is a replica, or `read_only`: connect to the primary server".to_owned();
        return Err(SelfTestError { error: unsuitable(server, defect), is_transient: true });
    } else if is_on("wsrep_on")
        || !value("group_replication_group_name").is_empty() && !is_on("group_replication_single_primary_mode")
    {
        "it is one of several primaries (Galera, Group Replication), which do not see each other's row locks: use a \
         server of its own, or a single primary"
            .to_owned()
    } else if is_on("log_bin") && value("binlog_format") == "STATEMENT" {
        "`binlog_format` is STATEMENT, with which READ COMMITTED cannot write: set it to ROW or MIXED".to_owned()
    } else {
        for (setting, matters) in [("innodb_flush_log_at_trx_commit", true), ("sync_binlog", is_on("log_bin"))] {
            let (address, value) = (server.address.clone(), value(setting).to_owned());
            if matters && value != "1" {
                server.background.log(move || {
                    warn!(
                        target: "tower_lock",
                        "MySQL at {address} has `{setting}={value}`: a crash of the server loses the newest locks and \
                         records, and then two holders of one key can overlap",
                    );
                });
            }
        }
        return Ok(());
    };
    Err(unsuitable(server, defect).into())
}

/// What is there under the names of the tables and the procedures: the number of the procedures.
/// No object of another program is touched. `None`: there are no tables.
async fn check_tables(server: &Server) -> Result<Option<u32>, SelfTestError> {
    let (mut found, mut has_tables) = (0, false);
    for row in read(server, &server.schema.objects()).await? {
        let [name, comment, engine] = [0, 1, 2].map(|column| row.text(column).unwrap_or_default());
        let number = comment.strip_prefix("tower-lock procedures ").and_then(|number| number.parse().ok());
        let defect = if number.is_none() && comment != VERSION {
            format!("`{name}` is not of {VERSION}, but of another program or version: choose another prefix")
        } else if !["", "InnoDB"].contains(&&*engine) {
            format!("the engine of `{name}` is not InnoDB: ALTER TABLE {name} ENGINE = InnoDB")
        } else {
            has_tables |= !engine.is_empty();
            found = found.max(number.unwrap_or(0));
            continue;
        };
        return Err(unsuitable(server, defect).into());
    }
    Ok(has_tables.then_some(found))
}

async fn read(server: &Server, statement: &str) -> Result<Vec<Row>, SelfTestError> {
    let rows = query(&server.main_conn, statement, server.timeouts.call_deadline()).await;
    rows.map_err(|error| test_failed(server, error))
}

fn unsuitable(server: &Server, defect: String) -> MysqlConnectError {
    MysqlConnectError::UnsuitableServer { address: server.address.clone(), defect }
}

fn test_failed(server: &Server, error: CallError) -> SelfTestError {
    let (number, address) = (error.driver().and_then(code), server.address.clone());
    // The server names user and right.
    if matches!(number, Some(1044 | 1142 | 1143 | 1227 | 1370)) {
        let prefix = &server.schema.prefix;
        let grant = format!(
            "{error}. GRANT SELECT, INSERT, UPDATE, DELETE, EXECUTE ON the database, or on the tables and procedures that \
             begin with `{prefix}`; for `.migrate(true)` also CREATE, CREATE ROUTINE and ALTER ROUTINE"
        );
        return MysqlConnectError::MissingRights { address, grant }.into();
    }
    let (is_transient, source) = (error.is_transient(), error.with_hint(&address));
    SelfTestError { error: MysqlConnectError::Unreachable { address, source }, is_transient }
}
