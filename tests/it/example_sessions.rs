//! One request at a time per session: the order of the lock layer and the session layer, and keys
//! from cookies of untrusted clients.

use std::{pin::Pin, time::Duration};

use axum::{
    Router,
    http::{Request, header::COOKIE},
    routing::post,
};
use tokio::time::{Instant, sleep};
use tower_lock::{LockKey, LockLayer, LockManager, key};
use tower_sessions::{
    MemoryStore, SessionStore,
    session::{Id, Record},
    session_store,
};

#[allow(dead_code, reason = "the layers of the example")]
#[path = "../../examples/per_session.rs"]
mod per_session;

type Reply<'a, T> = Pin<Box<dyn Future<Output = session_store::Result<T>> + Send + 'a>>;

/// A session store behind a slow network: a save takes longer than the handler.
#[derive(Clone, Debug, Default)]
struct SlowStore(MemoryStore);

const SAVE: Duration = Duration::from_millis(200);

impl SessionStore for SlowStore {
    fn create<'a, 'b, 'r>(&'a self, record: &'b mut Record) -> Reply<'r, ()>
    where
        'a: 'r,
        'b: 'r,
    {
        self.0.create(record)
    }

    fn save<'a, 'b, 'r>(&'a self, record: &'b Record) -> Reply<'r, ()>
    where
        'a: 'r,
        'b: 'r,
    {
        Box::pin(async {
            sleep(SAVE).await;
            self.0.save(record).await
        })
    }

    fn load<'a, 'b, 'r>(&'a self, id: &'b Id) -> Reply<'r, Option<Record>>
    where
        'a: 'r,
        'b: 'r,
    {
        self.0.load(id)
    }

    fn delete<'a, 'b, 'r>(&'a self, id: &'b Id) -> Reply<'r, ()>
    where
        'a: 'r,
        'b: 'r,
    {
        self.0.delete(id)
    }
}

async fn items(app: &Router) -> u32 {
    per_session::items_in_cart(app).await.expect("seven responses")
}

/// Of five concurrent requests each reads the same number.
#[tokio::test(start_paused = true)]
async fn concurrent_requests_of_a_session_lose_updates() {
    assert_eq!(items(&per_session::app_without_lock(SlowStore::default())).await, 3);
}

#[tokio::test(start_paused = true)]
async fn lock_outside_of_the_session_layer_loses_no_update() {
    let locks = LockManager::in_memory();
    assert_eq!(items(&per_session::app(&locks, SlowStore::default())).await, 7);
    assert_eq!(locks.held_count(), 0);
}

/// The next request starts when the handler has responded, before the session is saved.
#[tokio::test(start_paused = true)]
async fn lock_inside_of_the_session_layer_loses_updates() {
    let locks = LockManager::in_memory();
    let lock = LockLayer::new(&locks, key::from_parts(per_session::session_key)).wait(Duration::from_secs(5));
    let route = post(per_session::add).route_layer(lock).route_layer(per_session::sessions(SlowStore::default()));
    assert!(items(&Router::new().route("/cart", route)).await < 7);
}

#[tokio::test(start_paused = true)]
async fn sessions_do_not_wait_for_each_other() {
    let app = per_session::app(&LockManager::in_memory(), SlowStore::default());
    let cookie = async || per_session::send(&app, None).await.expect("a session").0.expect("a cookie");
    let (one, two) = (cookie().await, cookie().await);
    let began = Instant::now();
    let send = |cookie: &str| {
        let (app, cookie) = (app.clone(), cookie.to_owned());
        async move { per_session::send(&app, Some(&cookie)).await.expect("a response").1 }
    };
    assert_eq!(tokio::join!(send(&one), send(&two)), ("2".to_owned(), "2".to_owned()));
    assert!(began.elapsed() < SAVE * 2, "{:?}", began.elapsed());
}

fn key_of(cookies: &[&str]) -> Option<LockKey> {
    let mut request = Request::builder();
    for cookie in cookies {
        request = request.header(COOKIE, *cookie);
    }
    per_session::session_key(&request.body(()).expect("a request").into_parts().0)
}

/// The session layer ignores such ids, and starts a new session.
#[test]
fn request_without_a_valid_session_id_needs_no_lock() {
    let id = Id::default().to_string();
    let long = format!("id={}", "A".repeat(10_000));
    let padded = format!("id={id}A");
    for cookies in [&[][..], &["theme=dark"], &["id="], &["id=%00"], &["id"], &[&long], &[&padded], &[&id]] {
        assert_eq!(key_of(cookies), None, "{cookies:?}");
    }
}

#[test]
fn session_key_is_short_and_does_not_show_the_id() {
    let (id, other) = (Id::default().to_string(), Id::default().to_string());
    let key = key_of(&[&format!("theme=dark; id={id}")]).expect("a key");
    assert!(key.as_str().starts_with("session:") && !key.as_str().contains(&id), "{key}");
    assert!(key.as_str().len() < 100, "{key}");
    assert_ne!(key_of(&[&format!("id={other}")]), Some(key.clone()));
    // Of several cookies the session layer reads the last one.
    assert_eq!(key_of(&[&format!("id={other}; id={id}")]), Some(key.clone()));
    assert_eq!(key_of(&[&format!("id={other}"), &format!("id={id}")]), Some(key));
}
