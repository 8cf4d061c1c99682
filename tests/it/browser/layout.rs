//! How the pages look on a small screen and in the dark, and what a screen reader says.

use tower_lock::LockKey;

use super::support::{Fleet, window};

#[tokio::test]
async fn page_of_400_pixels_does_not_scroll_sideways() {
    let Some(window) = window().await else { return };
    let (browser, fleet) = (&window.browser, Fleet::in_memory().await);
    browser.resize(400, 800).await;
    let long = "0123456789".repeat(30);
    let _long = fleet.first.lock(LockKey::raw(&*long).expect("a key")).await.expect("free");
    let _short = fleet.first.lock(("order", 7)).await.expect("free");
    let pages = ["", "/keys", "/key?name=order%3A7", &format!("/key?raw=1&name={long}"), "/no-such-page"];
    for path in pages {
        browser.open(&fleet.url(path)).await;
        assert_eq!(browser.content_size().await.0, 400, "{path}");
    }
}

#[tokio::test]
async fn dark_mode_changes_the_colours() {
    let Some(window) = window().await else { return };
    let (browser, fleet) = (&window.browser, Fleet::in_memory().await);
    let _held = fleet.first.lock(("order", 7)).await.expect("free");
    browser.open(&fleet.url("/key?name=order%3A7")).await;
    let colours = async || {
        let (text, link) =
            (browser.find("body").await.style("color").await, browser.find("a").await.style("color").await);
        (text, link, browser.find("nav").await.style("background-color").await, browser.screenshot().await)
    };
    browser.prefer_dark(false).await;
    let light = colours().await;
    browser.prefer_dark(true).await;
    let dark = colours().await;
    assert_eq!((&*light.0, &*dark.0), ("rgba(0, 0, 0, 1)", "rgba(255, 255, 255, 1)"));
    assert_ne!((light.1, light.2, light.3), (dark.1.clone(), dark.2.clone(), dark.3.clone()));
}

#[tokio::test]
async fn screen_reader_gets_headings_heads_and_labels() {
    let Some(window) = window().await else { return };
    let (browser, fleet) = (&window.browser, Fleet::in_memory().await);
    let held = fleet.first.lock(("order", 7)).await.expect("free");
    let revoke = format!("Revoke {}", held.held_lock().acquisition_id());
    let pages = [
        ("", vec![("heading", "Held"), ("table", "Held by this process, oldest first")]),
        ("/keys", vec![("heading", "All keys"), ("heading", "Keys in use"), ("table", "Keys in use")]),
        (
            "/key?name=order%3A7",
            vec![("heading", "One key"), ("table", "Holders"), ("button", "Revoke all holders"), ("button", &revoke)],
        ),
    ];
    for (path, parts) in pages {
        browser.open(&fleet.url(path)).await;
        let found = browser.accessible_parts().await;
        let on_all = [("navigation", "Console"), ("textbox", "Key"), ("checkbox", "raw"), ("button", "Open")];
        let heads = [("columnheader", "Held for")];
        for part in parts.into_iter().chain(on_all).chain(heads) {
            assert!(found.iter().any(|(role, name)| (&**role, &**name) == part), "{path}: no {part:?}: {found:?}");
        }
        // Each column and each row says what it is.
        assert_eq!(browser.find_all("td:first-child, thead th:not([scope]), tbody th:not([scope])").await, []);
        assert_eq!(browser.find("html").await.attribute("lang").await.as_deref(), Some("en"));
    }
}
