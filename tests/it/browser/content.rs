//! What the pages show of texts that clients choose.

use tower_lock::LockKey;
use tower_lock_testkit::{Connection, RedisServer, limits, skipped};

use super::support::{Fleet, is_installed, window};

/// Keys that a client chose, and what a page shows of each.
fn keys() -> [(String, String); 5] {
    let own = |key: &str| (key.to_owned(), key.to_owned());
    [
        own("<script>document.title = 'stolen'</script>"),
        own(r#""><img src=x onerror="document.title = 'stolen'">"#),
        own("' autofocus onfocus='document.title = 1"),
        ("user:\u{202e}nimda\u{2066}".to_owned(), r"user:\u{202e}nimda\u{2066}".to_owned()),
        ("é".repeat(500), format!("{}…", "é".repeat(128))),
    ]
}

#[tokio::test]
async fn keys_of_clients_are_text_in_all_views() {
    let Some(window) = window().await else { return };
    let (browser, fleet) = (&window.browser, Fleet::in_memory().await);
    let mut guards = Vec::new();
    for (key, _) in keys() {
        guards.push(fleet.first.lock(LockKey::raw(key).expect("a key")).await.expect("free"));
    }
    for (path, title) in [("", "Locks of web-1:"), ("/keys", "All keys – Locks")] {
        browser.open(&fleet.url(path)).await;
        assert!(browser.title().await.starts_with(title), "{}", browser.title().await);
        let mut shown = Vec::new();
        for key in browser.find_all("tbody th bdi").await {
            shown.push(key.text().await);
        }
        let mut wanted = keys().map(|(_, shown)| shown);
        shown.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(shown, wanted, "{path}");
        assert_eq!(browser.find_all("script, img, [onfocus], [autofocus]").await, [], "{path}");
    }
    for (number, (_, wanted)) in keys().iter().enumerate() {
        browser.open(&fleet.url("")).await;
        browser.find_all("tbody th a").await[number].follow().await;
        assert_eq!(browser.title().await, "One key – Locks");
        assert_eq!(browser.find("#key bdi").await.text().await, *wanted);
        assert!(browser.find("#answer").await.text().await.starts_with("Held by web-1"), "another key: {wanted}");
        assert_eq!(browser.find_all("script, img, [onfocus], [autofocus]").await, [], "{wanted}");
    }
    assert_eq!(browser.log().await, Vec::<String>::new());
}

/// Another program on the same Redis chose the name of the holder.
#[tokio::test]
async fn name_of_a_foreign_holder_is_text_in_all_views() {
    if is_installed() && !RedisServer::is_available() {
        return skipped("the console on Redis", "redis-server");
    }
    let Some(window) = window().await else { return };
    let (browser, redis) = (&window.browser, RedisServer::start().await);
    let store = async || limits::redis().connect(&redis.url()).await.expect("it is up");
    let fleet = Fleet::on(store().await, store().await).await;
    let name = r#"</title><script>document.title = "stolen"</script>"#;
    let mut client = Connection::open(redis.address()).await.expect("it listens");
    client.command(&["HSET", "{order}", &format!("{name}:1"), "1"]).await.expect("a reply");
    client.command(&["PEXPIRE", "{order}", "60000"]).await.expect("a reply");
    browser.open(&fleet.url("/key?raw=1&name=%7Border%7D")).await;
    assert_eq!(browser.title().await, "One key – Locks");
    let holder = browser.find("#holders tbody tr").await.text().await;
    assert!(holder.contains(&format!("{name}:1")), "{holder}");
    let label = browser.find("#holders button").await.attribute("aria-label").await;
    assert_eq!(label, Some(format!("Revoke {name}:1")));
    assert_eq!(browser.find_all("script").await, []);
    browser.find("#holders button").await.follow().await;
    assert!(browser.find("#done").await.text().await.starts_with("Revoked from 1 holder."));
    assert_eq!(browser.log().await, Vec::<String>::new());
}

/// The policy of the page lets its own style apply, and the page asks for nothing else.
#[tokio::test]
async fn style_applies_and_the_policy_refuses_nothing() {
    let Some(window) = window().await else { return };
    let (browser, fleet) = (&window.browser, Fleet::in_memory().await);
    let _held = fleet.second.lock(("order", 1)).await.expect("free");
    for path in ["", "/keys", "/key?name=order%3A1", "/no-such-page"] {
        browser.open(&fleet.url(path)).await;
        assert_eq!(browser.find("nav").await.style("display").await, "flex", "{path}");
    }
    let log: Vec<_> = browser.log().await.into_iter().filter(|line| !line.contains("404 (Not Found)")).collect();
    assert_eq!(log, Vec::<String>::new());
}
