//! Listings: which names of a shared Redis are read, and that a page is bounded.

use std::collections::BTreeSet;

use tower_lock::{
    AcquisitionId, LockKey, RedisStore,
    store::{AcquisitionIds, Cursor, IfBusy, ListEntry, ListRequest, LockStore, StoreErrorKind},
};
use tower_lock_testkit::{
    limits,
    store::{StoreExt, open_sink},
};

use crate::support::{self, environment};

async fn acquire(store: &RedisStore, key: &LockKey, id: AcquisitionId) {
    store.acquire_one(support::acquire(key, &id, IfBusy::Enqueue)).await.expect("a reply");
}

/// All entries, and the number of pages.
async fn list(store: &RedisStore, limit: usize, contended_only: bool) -> (Vec<ListEntry>, usize) {
    let (mut entries, mut pages) = (Vec::new(), 0);
    let mut request = ListRequest::new(limit).contended_only(contended_only);
    loop {
        let page = store.list(request.clone()).await.expect("a reply");
        pages += 1;
        entries.extend(page.entries);
        let Some(next) = page.next else { return (entries, pages) };
        request = request.after(next);
    }
}

fn names(entries: &[ListEntry]) -> Vec<&str> {
    let mut names: Vec<_> = entries.iter().map(|entry| entry.key.as_str()).collect();
    names.sort_unstable();
    names
}

#[tokio::test]
async fn listing_reads_only_its_own_prefix_and_locks() {
    let Some(environment) = environment().await else { return };
    let store = environment.direct_store().await;
    let other = limits::redis().prefix("lock2").connect(&environment.redis.url()).await.expect("it is up");
    let ids = AcquisitionIds::new("a", 1);
    for store in [&*store, &other] {
        store.subscribe(open_sink(ids.next().manager()));
    }
    let raw = LockKey::raw("raw{7}").expect("valid");
    for key in [LockKey::from(("own", 1)), raw.clone(), LockKey::hashed(("own", "secret"))] {
        acquire(&store, &key, ids.next()).await;
    }
    let foreign = LockKey::from(("foreign", 1));
    acquire(&other, &foreign, ids.next()).await;
    acquire(&other, &foreign, ids.next()).await;
    // Names of other programs: of another type, not text, and a queue that is not a list.
    environment.command(&["SET", "lock:text", "1"]).await;
    environment.command(&["SET", "other:own:1", "1"]).await;
    environment.command(&["HSET", "lock:broken", "java:7", "1"]).await;
    environment.command(&["SET", "tower-lock:lock:q:{lock:broken}", "1"]).await;

    let hashed = LockKey::hashed(("own", "secret"));
    let (entries, _) = list(&store, 100, false).await;
    assert_eq!(names(&entries), ["own:1", hashed.as_str()]);
    assert!(entries.iter().any(|entry| entry.key == hashed), "an equal key");
    assert_eq!(list(&store, 100, true).await.0, []);

    acquire(&store, &raw, ids.next()).await;
    let (entries, _) = list(&store, 100, true).await;
    assert_eq!(entries.iter().map(|entry| &entry.key).collect::<Vec<_>>(), [&raw], "its queue has the prefix");
    assert!(names(&list(&store, 100, false).await.0).contains(&"raw{7}"));

    // Free, with a waiter.
    environment.command(&["DEL", "raw{7}"]).await;
    acquire(&store, &LockKey::from(("own", 1)), ids.next()).await;
    environment.command(&["DEL", "lock:own:1"]).await;
    let (entries, _) = list(&store, 100, false).await;
    let free = entries.iter().find(|entry| entry.key.as_str() == "own:1").expect("it has a waiter");
    assert_eq!((free.status.holder(), free.status.waiting), (None, 1));

    let error = store.list(ListRequest::new(1).after(Cursor::new("x"))).await.expect_err("not its cursor");
    assert_eq!(error.kind(), StoreErrorKind::Unsupported);
    assert_eq!(error.operation(), "list");
}

/// Each of its keys costs a script.
#[tokio::test]
async fn largest_page_is_read_within_a_call() {
    let Some(environment) = environment().await else { return };
    let store = environment.direct_store().await;
    let fill = "for i = 1, 1000 do redis.call('HSET', 'lock:own:' .. i, 'a:1:1', '1700000000000000') end";
    environment.command(&["EVAL", fill, "0"]).await;
    let page = store.list(ListRequest::new(1000)).await.expect("a reply");
    let (rest, _) = list(&store, 1000, false).await;
    assert!(page.entries.len() > 500, "{} entries", page.entries.len());
    let rest: BTreeSet<_> = rest.iter().map(|entry| entry.key.as_str()).collect();
    assert_eq!(rest.len(), 1000, "`SCAN` may return a key twice");
}

/// A page among 3,000 keys of other programs: its work is bounded, and it may be empty.
#[tokio::test]
async fn page_of_a_large_database_is_bounded() {
    let Some(environment) = environment().await else { return };
    let store = environment.direct_store().await;
    let ids = AcquisitionIds::new("a", 1);
    store.subscribe(open_sink(ids.next().manager()));
    acquire(&store, &LockKey::from(("own", 1)), ids.next()).await;
    let fill = "for i = 1, 3000 do redis.call('SET', 'session:' .. i, i) end";
    environment.command(&["EVAL", fill, "0"]).await;
    let (entries, pages) = list(&store, 10, false).await;
    assert_eq!(names(&entries), ["own:1"]);
    assert!(pages > 3, "{pages} pages of at most 100 scans of 10 keys, twice");
    let [scans] = environment.calls(["scan"]).await;
    assert!(usize::try_from(scans).expect("few") <= pages * 100, "{scans} scans");
}
