//! Errors of connecting, which say what to do.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use mysql_async::prelude::Queryable;
use tower_lock::{
    LockKey, LockManager, MysqlStore,
    store::{LockStore, RenewReply, RenewRequest},
};
use tower_lock_testkit::caller::{Caller, LONG};

use crate::support::{environment, own_environment};

#[tokio::test]
async fn connect_error_says_what_to_do() {
    let Some(environment) = environment().await else { return };
    let (url, prefix) = (environment.url(), &environment.prefix);
    let error = async |builder: tower_lock::store::MysqlStoreBuilder, url: &str| {
        format!("{:?}", builder.connect(url).await.map(drop).expect_err("no store"))
    };
    let none = || MysqlStore::builder().prefix(prefix);
    let text = error(none(), &url).await;
    assert!(text.contains("has no tables and procedures of tower-lock") && text.contains("`.migrate(true)`"), "{text}");
    let text = error(none(), &environment.server().url("none")).await;
    assert!(text.contains("the URL names a database that does not exist"), "{text}");
    let text = error(none(), &environment.url_of("nobody:s3cret")).await;
    assert!(text.contains("are the user and the password correct?") && !text.contains("s3cret"), "{text}");

    let mut session = environment.session().await;
    session.query_drop(format!("CREATE TABLE {prefix}_locks (id INT)")).await.expect("a table");
    let text = error(none().migrate(true), &url).await;
    assert!(text.contains("is not of tower-lock 1, but of another program"), "{text}");
    session.query_drop(format!("DROP TABLE {prefix}_locks")).await.expect("dropped");

    environment.store().await;
    for statement in ["CREATE USER poor@'127.0.0.1'", "GRANT SELECT, EXECUTE ON app.* TO poor@'127.0.0.1'"] {
        session.query_drop(statement).await.expect("root may");
    }
    let text = error(none(), &environment.url_of("poor")).await;
    assert!(text.contains("lacks a right") && text.contains("GRANT SELECT, INSERT, UPDATE"), "{text}");
    session.query_drop("GRANT SELECT, INSERT, UPDATE, DELETE, EXECUTE ON app.* TO poor@'127.0.0.1'").await.expect("ok");
    let poor = environment.url_of("poor").replace("mysql:", "mariadb:");
    let locks =
        LockManager::connect(&format!("{poor}?prefix={prefix}&connections=2")).await.expect("all rights").build();
    locks.lock(("reward", 7)).await.expect("free").release().await.expect("up");
    locks.health().await.expect("ready");
}

/// Settings of the server that a session can change.
#[tokio::test]
async fn defaults_of_the_server_do_not_matter() {
    let Some(environment) = own_environment(&[]).await else { return };
    environment.store().await;
    for setting in [
        "SET GLOBAL autocommit = 0",
        "SET GLOBAL completion_type = CHAIN",
        "SET GLOBAL sql_safe_updates = 1",
        "SET GLOBAL max_join_size = 10",
        "SET GLOBAL TRANSACTION READ ONLY",
        "SET GLOBAL TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    ] {
        // Not in a transaction of this session.
        environment.admin(setting).await;
    }
    let store = environment.builder().migrate(false).connect(&environment.url()).await;
    let store = Arc::new(store.expect("it is up"));
    let caller = Caller::new(&store, "a");
    for _ in 0..3 {
        let keys: Vec<_> = (0..30).map(|n| (LockKey::from(("key", n)), caller.id())).collect();
        join_all(keys.iter().map(|(key, id)| caller.granted(key, id, LONG))).await;
        let requests = keys.iter().map(|(key, id)| RenewRequest::new(key.clone(), id.clone(), LONG)).collect();
        let renewed = store.renew(requests).await.expect("a reply");
        assert!(renewed.iter().all(|reply| *reply == RenewReply::Extended), "{renewed:?}");
        join_all(keys.iter().map(|(key, id)| caller.release(key, id, Duration::ZERO))).await;
        store.health().await.expect("ready");
    }
}
