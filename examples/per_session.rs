//! One request at a time per session: two requests that change one session lose no update.
//!
//! ```sh
//! cargo run --features sessions --example per_session
//! ```
//!
//! The session layer of `tower-sessions` saves a session after the handler has responded. The lock
//! layer therefore belongs outside of it, and its key comes from the session cookie.

use std::{convert::Infallible, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{
        Request,
        header::{COOKIE, SET_COOKIE},
        request::Parts,
    },
    routing::post,
};
use http_body_util::BodyExt;
use tokio::time::sleep;
use tower::ServiceExt;
use tower_lock::{LockKey, LockLayer, LockManager, key};
use tower_sessions::{
    MemoryStore, Session, SessionManagerLayer, SessionStore,
    cookie::Cookie,
    session::{Error, Id},
};

/// The name of the session cookie.
const SESSION_COOKIE: &str = "id";

/// How long the handler works between its read and its write of the session.
const WORK: Duration = Duration::from_millis(50);

/// The key of a request: its session id. A request without a valid id needs no lock, because the
/// session layer starts a new session for it.
fn session_key(head: &Parts) -> Option<LockKey> {
    let headers = head.headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
    let cookies = headers.flat_map(Cookie::split_parse_encoded).flatten();
    // Of several cookies the session layer reads the last one.
    let id: Id = cookies.filter(|cookie| cookie.name() == SESSION_COOKIE).last()?.value().parse().ok()?;
    // Hashed, because a session id is a secret, and a key is in logs and in the store.
    Some(LockKey::hashed(("session", id.to_string())))
}

/// Adds one item to the cart of the session.
async fn add(session: Session) -> Result<String, String> {
    let items: u32 = session.get("items").await.map_err(text)?.unwrap_or(0);
    sleep(WORK).await;
    session.insert("items", items + 1).await.map_err(text)?;
    Ok((items + 1).to_string())
}

#[allow(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn text(error: Error) -> String {
    error.to_string()
}

/// A route whose requests run one at a time for each session.
fn app<S: SessionStore + Clone>(locks: &LockManager, store: S) -> Router {
    let one_at_a_time = LockLayer::new(locks, key::from_parts(session_key)).wait(Duration::from_secs(5));
    // The last one is the outermost: the lock is held until the session is saved.
    Router::new().route("/cart", post(add).route_layer(sessions(store)).route_layer(one_at_a_time))
}

fn app_without_lock<S: SessionStore + Clone>(store: S) -> Router {
    Router::new().route("/cart", post(add).route_layer(sessions(store)))
}

fn sessions<S: SessionStore + Clone>(store: S) -> SessionManagerLayer<S> {
    // Not `Secure`, because this example has no TLS.
    SessionManagerLayer::new(store).with_name(SESSION_COOKIE).with_secure(false)
}

/// Adds an item with one request, then five items with concurrent ones, then one more. Returns how
/// many items the cart has at the end.
async fn items_in_cart(app: &Router) -> Result<u32, Box<dyn std::error::Error>> {
    let (cookie, _) = send(app, None).await?;
    let cookie = cookie.ok_or("no session cookie")?;
    let five = || send(app, Some(&cookie));
    tokio::try_join!(five(), five(), five(), five(), five())?;
    let (_, items) = send(app, Some(&cookie)).await?;
    Ok(items.parse()?)
}

/// Returns the session cookie that the response sets, and its body.
async fn send(app: &Router, cookie: Option<&str>) -> Result<(Option<String>, String), Box<dyn std::error::Error>> {
    let mut request = Request::post("/cart");
    if let Some(cookie) = cookie {
        request = request.header(COOKIE, cookie);
    }
    let response: Result<_, Infallible> = app.clone().oneshot(request.body(Body::empty())?).await;
    let (head, body) = response?.into_parts();
    if !head.status.is_success() {
        return Err(head.status.to_string().into());
    }
    let cookie = head.headers.get(SET_COOKIE).map(|cookie| cookie.to_str().map(str::to_owned)).transpose()?;
    Ok((cookie, String::from_utf8(body.collect().await?.to_bytes().into())?))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("Seven requests of one session, five of them at the same time, add an item each:\n");
    let without = items_in_cart(&app_without_lock(MemoryStore::default())).await?;
    println!("  without a lock                {without} items");
    let with = items_in_cart(&app(&LockManager::in_memory(), MemoryStore::default())).await?;
    println!("  one at a time per session     {with} items");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use tokio::time::Instant;
    use tower_sessions::{session::Record, session_store};

    use super::*;

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
        items_in_cart(app).await.expect("seven responses")
    }

    /// Of five concurrent requests each reads the same number.
    #[tokio::test(start_paused = true)]
    async fn concurrent_requests_of_a_session_lose_updates() {
        assert_eq!(items(&app_without_lock(SlowStore::default())).await, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn lock_outside_of_the_session_layer_loses_no_update() {
        let locks = LockManager::in_memory();
        assert_eq!(items(&app(&locks, SlowStore::default())).await, 7);
        assert_eq!(locks.held_count(), 0);
    }

    /// The next request starts when the handler has responded, before the session is saved.
    #[tokio::test(start_paused = true)]
    async fn lock_inside_of_the_session_layer_loses_updates() {
        let locks = LockManager::in_memory();
        let lock = LockLayer::new(&locks, key::from_parts(session_key)).wait(Duration::from_secs(5));
        let route = post(add).route_layer(lock).route_layer(sessions(SlowStore::default()));
        assert!(items(&Router::new().route("/cart", route)).await < 7);
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_do_not_wait_for_each_other() {
        let app = app(&LockManager::in_memory(), SlowStore::default());
        let cookie = async || send(&app, None).await.expect("a session").0.expect("a cookie");
        let (one, two) = (cookie().await, cookie().await);
        let began = Instant::now();
        let send = |cookie: &str| {
            let (app, cookie) = (app.clone(), cookie.to_owned());
            async move { send(&app, Some(&cookie)).await.expect("a response").1 }
        };
        assert_eq!(tokio::join!(send(&one), send(&two)), ("2".to_owned(), "2".to_owned()));
        assert!(began.elapsed() < SAVE * 2, "{:?}", began.elapsed());
    }

    fn key_of(cookies: &[&str]) -> Option<LockKey> {
        let mut request = Request::builder();
        for cookie in cookies {
            request = request.header(COOKIE, *cookie);
        }
        session_key(&request.body(()).expect("a request").into_parts().0)
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
}
