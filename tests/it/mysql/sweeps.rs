//! Rows of keys that are no longer used.

use mysql_async::prelude::Queryable;
use tower_lock::LockKey;

use crate::support::environment;

/// The fences of a key rise over its sweep. A row that a call or a transaction of the application
/// has locked stays.
///
/// Guarantee: G11.
#[tokio::test]
async fn sweep_deletes_rows_and_fences_rise() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    let keys: Vec<_> = ["idle", "checked", "locked", "held"].map(|name| LockKey::from((name,))).into();
    let mut tokens = Vec::new();
    for key in &keys[..3] {
        let guard = locks.lock(key.clone()).await.expect("free");
        tokens.push(guard.fencing_token());
        guard.release().await.expect("up");
    }
    let _held = locks.lock(keys[3].clone()).await.expect("free");
    // As if it were two minutes later, and the fences were of a clock that was ahead.
    environment.admin("UPDATE {p}_locks SET since_us = since_us - 120000000, fence = fence + 3600000000").await;
    environment.admin("UPDATE {p}_fences SET fence = fence + 3600000000").await;
    let mut sessions = [environment.session().await, environment.session().await];
    environment.admin("INSERT INTO {p}_records SELECT lock_key, '', '', '', 1 FROM {p}_locks").await;
    let locked = [(0, "fences", "checked"), (1, "locks", "locked"), (1, "records", "held")];
    for session in &mut sessions {
        environment.run(session, "START TRANSACTION").await;
    }
    for (session, table, key) in locked {
        let read = format!("SELECT 1 FROM {{p}}_{table} WHERE lock_key = '{key}' LOCK IN SHARE MODE");
        environment.run(&mut sessions[session], &read).await;
    }
    let call = format!("CALL {}_sweep('', 100)", environment.prefix);
    let swept: Option<(Option<String>, u64)> = environment.session().await.query_first(call).await.expect("a reply");
    assert_eq!(swept, Some((None, 3)), "the only page, and the records that are not locked");
    for table in ["locks", "fences"] {
        let left = format!("SELECT GROUP_CONCAT(lock_key ORDER BY lock_key) FROM {{p}}_{table}");
        assert_eq!(environment.value::<String>(&left, 0).await, "checked,held,locked", "{table}");
    }
    for session in &mut sessions {
        environment.run(session, "COMMIT").await;
    }
    let again = locks.lock(keys[0].clone()).await.expect("free");
    assert!(again.fencing_token().as_u64() > tokens[0].as_u64() + (3_600_000_000 << 10), "above the floor");
}
