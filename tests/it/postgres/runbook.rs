//! The statements of the guide for operators.

use std::{future::IntoFuture, sync::Arc};

use tokio_postgres::{Client, SimpleQueryMessage};
use tower_lock::{LockKey, LockManager};
use tower_lock_testkit::{
    limits,
    wait::{soon, until},
};

use crate::support::environment;

const GUIDE: &str = include_str!("../../../docs/guide/postgres-in-production.md");

/// The SQL of the guide, one text for each block.
fn blocks() -> [&'static str; 7] {
    let blocks: Vec<_> = GUIDE.split("```sql\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    blocks.try_into().expect("rights, vacuum, holder, holders, shares, revocation, transactions")
}

/// The rows of the statements, with their columns.
async fn rows(client: &Client, statements: &str) -> Vec<Vec<String>> {
    let messages = client.simple_query(statements).await.expect(statements);
    let row = |message: &SimpleQueryMessage| match message {
        SimpleQueryMessage::Row(row) => {
            Some((0..row.len()).map(|n| row.get(n).unwrap_or_default().to_owned()).collect())
        }
        _ => None,
    };
    messages.iter().filter_map(row).collect()
}

#[tokio::test]
async fn statements_of_the_guide_show_and_free_a_lock() {
    let Some(mut environment) = environment().await else { return };
    "tower_lock".clone_into(&mut environment.schema);
    let [rights, vacuum, holder, holders, shares, revocation, transactions] = blocks();
    let key = || LockKey::from(("reward", 7, "daily"));
    let owner = environment.store().await;
    let operator = environment.client().await;
    operator.batch_execute("CREATE ROLE locks LOGIN; CREATE ROLE app LOGIN").await.expect("new");
    operator.batch_execute(rights).await.expect("rights");
    operator.batch_execute(vacuum).await.expect("vacuum");
    // The user of the store has the rights that it needs.
    let url = environment.server().url_of("locks");
    let store = Arc::new(limits::postgres().connect(&url).await.expect("all rights"));
    let instance = |name| LockManager::builder(Arc::clone(&store)).instance(name).build();
    let (one, two) = (instance("api-7f3"), instance("api-9c1"));
    let guard = one.lock(key()).await.expect("free");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("queued", async || one.inspect(key()).await.is_ok_and(|status| status.waiting == 1)).await;

    let shown = rows(&operator, holder).await;
    let [row] = &shown[..] else { panic!("{shown:?}") };
    assert!(row[0].starts_with("api-7f3:") && row[3].starts_with("00:00:"), "{row:?}");
    let all = rows(&operator, holders).await;
    assert_eq!(all.len(), 1, "{all:?}");
    assert!(all[0][0] == "reward:7:daily" && all[0][1] == row[0] && all[0][3] == "1", "{all:?}");
    let permit = one.permit(("export", 7), 4).await.expect("free");
    let permits = rows(&operator, shares).await;
    assert_eq!(permits.len(), 1, "{permits:?}");
    assert!(permits[0][0] == "export:7" && permits[0][1].ends_with("/4"), "{permits:?}");
    permit.release().await.expect("held");

    let open = environment.application().await;
    open.batch_execute("BEGIN; SELECT 1").await.expect("a transaction");
    assert!(rows(&operator, transactions).await.iter().any(|row| row[3] == "idle in transaction"));

    let revoked = rows(&operator, revocation).await;
    assert!(revoked[0][0] == "revoked" && revoked[0][1] == format!("{{{}}}", row[0]), "{revoked:?}");
    soon("it is notified", guard.held_lock().lost()).await;
    soon("a grant", waiting).await.expect("runs").expect("a grant").release().await.expect("held");
    drop(owner);
}
