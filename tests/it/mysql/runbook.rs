//! The statements of the guide for operators, and the rights that it names.

use std::{sync::Arc, time::Duration};

use mysql_async::{Conn, Error, Row, prelude::Queryable};
use tower_lock::{LockKey, LockManager, MysqlStore, store::MysqlConnectError};
use tower_lock_testkit::wait::soon;

use crate::support::own_environment;

const GUIDE: &str = include_str!("../../../docs/guide/mysql-in-production.md");

/// The statements of the guide, for each block.
fn blocks() -> [Vec<String>; 9] {
    let statements = |text: &str| {
        let lines = text.lines().filter(|line| !line.starts_with("--")).collect::<Vec<_>>().join("\n");
        lines.split(';').map(|statement| statement.trim().to_owned()).filter(|text| !text.is_empty()).collect()
    };
    // The last statement has a `;` in its texts.
    let texts: Vec<_> = GUIDE.split("```sql\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    let last = texts.len() - 1;
    let block = |(n, text): (usize, &&str)| {
        if n == last { vec![text.trim().trim_end_matches(';').to_owned()] } else { statements(text) }
    };
    let blocks: Vec<_> = texts.iter().enumerate().map(block).collect();
    blocks.try_into().expect("rights, of application, holder, holders, permits, records, revocation, open, end")
}

/// The rows of a statement, as texts.
async fn rows(session: &mut Conn, statement: &str) -> Vec<Vec<String>> {
    let rows: Vec<Row> = session.query(statement).await.unwrap_or_else(|error| panic!("{statement}: {error}"));
    let text = |row: &Row, n| row.get::<Option<String>, _>(n).flatten().unwrap_or_default();
    rows.iter().map(|row| (0..row.len()).map(|n| text(row, n)).collect()).collect()
}

fn number(result: Result<(), Error>) -> Option<u16> {
    match result {
        Err(Error::Server(error)) => Some(error.code),
        other => other.map(|()| None).expect("an error of the server"),
    }
}

/// Guarantee: G1.
#[tokio::test]
async fn statements_of_the_mysql_guide_show_and_free_a_lock() {
    let Some(environment) = own_environment(&[]).await else { return };
    let [rights, of_application, holder, holders, permits, records, revocation, open, end] = blocks();
    let mut operator = environment.session().await;
    for user in ["migrator", "locks", "app"] {
        environment.run(&mut operator, &format!("CREATE USER {user}")).await;
    }
    for statement in &rights {
        environment.run(&mut operator, statement).await;
    }
    drop(MysqlStore::builder().migrate(true).connect(&environment.url_of("migrator")).await.expect("all rights"));
    for statement in &of_application {
        environment.run(&mut operator, statement).await;
    }
    let store = Arc::new(MysqlStore::connect(&environment.url_of("locks")).await.expect("all rights"));
    let locks = LockManager::builder(Arc::clone(&store)).instance("api-7f3").lease(Duration::from_secs(3)).build();
    let key = LockKey::from(("reward", 7, "daily"));
    let guard = locks.lock(key.clone()).await.expect("free");
    let id = guard.held_lock().acquisition_id().to_string();

    // The application may check the lock, and nothing else.
    let mut app = Conn::from_url(environment.url_of("app")).await.expect("a session");
    app.query_drop("START TRANSACTION").await.expect("begun");
    let check = format!("CALL tower_lock_check_fence('{}', {}, '{id}')", key.as_str(), guard.fencing_token().as_u64());
    app.query_drop(check).await.expect("it is held");
    for (statement, refused) in [
        ("SELECT * FROM tower_lock_locks", 1142),
        ("UPDATE tower_lock_fences SET fence = 0", 1142),
        ("CALL tower_lock_force_release('reward:7:daily', 0, NULL)", 1370),
        ("CALL tower_lock_release('reward:7:daily', 'x', 0, NULL, NULL, 0)", 1370),
    ] {
        assert_eq!(number(app.query_drop(statement).await), Some(refused), "{statement}");
    }

    let shown = rows(&mut operator, &holder[0]).await;
    let [row] = &shown[..] else { panic!("{shown:?}") };
    assert!(row[0] == id && ["1", "2", "3"].contains(&&*row[3]), "{row:?}");
    let all = rows(&mut operator, &holders[0]).await;
    assert!(all.len() == 1 && all[0][0] == "reward:7:daily" && all[0][1] == id, "{all:?}");
    let permit = locks.permit(("export", 7), 4).await.expect("free");
    let shown = rows(&mut operator, &permits[0]).await;
    assert!(shown.len() == 1 && shown[0][0] == "export:7" && shown[0][1].ends_with("/4"), "{shown:?}");
    permit.release().await.expect("held");
    assert_eq!(rows(&mut operator, &records[0]).await.len(), 0);
    let transactions = rows(&mut operator, &open[0]).await;
    assert!(transactions.iter().any(|row| row[0] == app.id().to_string()), "{transactions:?}");

    let revoked = rows(&mut operator, &revocation[0]).await;
    assert_eq!(revoked[0][..2], ["revoked".to_owned(), format!("[\"{id}\"]")]);
    assert_eq!(rows(&mut operator, &revocation[1]).await[0][0], "free", "nobody has that permit");
    soon("it notices", guard.held_lock().lost()).await;
    // The transaction that has checked the lock before keeps its key.
    locks.try_lock(key.clone()).await.expect_err("it is kept");
    app.query_drop("ROLLBACK").await.expect("ended");
    locks.lock(key).await.expect("free").release().await.expect("held");

    drop((guard, locks, store));
    for row in rows(&mut operator, &end[0]).await {
        environment.run(&mut operator, row[0].trim_end_matches(';')).await;
    }
    let error = MysqlStore::connect(&environment.url_of("locks")).await.expect_err("nothing is left");
    assert!(matches!(error, MysqlConnectError::Migration { found: 0, .. }), "{error:?}");
}
