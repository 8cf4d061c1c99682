//! The way of an operator from the list of keys to a revocation.

use tower_lock::LockKey;
use tower_lock_testkit::{
    RedisServer,
    browser::{Browser, keys},
    limits,
    log::Log,
    skipped,
    wait::{soon, until},
};

use super::support::{Fleet, audits, is_installed, window, window_without_scripts};

/// An operator looks for the order 7 of another process, and revokes its lock.
async fn revoke(browser: &Browser, fleet: &Fleet) {
    let log = Log::default();
    let _listening = log.listen();
    let request = fleet.order(7).await;
    browser.open(&fleet.url("")).await;
    browser.find("nav a[href$='/keys']").await.follow().await;
    let row = browser.find("#keys tbody tr").await.text().await;
    assert!(row.starts_with("order:7 web-2"), "{row}");
    browser.find("#keys tbody a").await.follow().await;
    let answer = browser.find("#answer").await.text().await;
    assert!(answer.starts_with("Held by web-2 for ") && answer.ends_with("You may revoke it."), "{answer}");
    fleet.assert_untouched(7, &log).await;

    browser.find("#revoke-all button").await.follow().await;
    let done = browser.find("#done").await.text().await;
    assert!(done.starts_with("Revoked from 1 holder."), "{done}");
    fleet.assert_lost(request).await;
    let answer = browser.find("#answer").await.text().await;
    assert!(answer.starts_with("Without a holder, and blocked for another "), "{answer}");

    // The confirmation is a page of its own.
    browser.reload().await;
    let audits = audits(&log);
    let [audit] = &audits[..] else { panic!("one revocation: {audits:?}") };
    for part in ["operator=\"ada\"", "key=\"order:7\"", "reply=\"revoked\""] {
        assert!(audit.contains(part), "{part}: {audit}");
    }
}

#[tokio::test]
async fn operator_revokes_a_lock_without_scripts() {
    let Some(window) = window_without_scripts().await else { return };
    revoke(&window.browser, &Fleet::in_memory().await).await;
}

#[tokio::test]
async fn operator_revokes_a_lock_on_redis() {
    if is_installed() && !RedisServer::is_available() {
        return skipped("the console on Redis", "redis-server");
    }
    let Some(window) = window().await else { return };
    let redis = RedisServer::start().await;
    let store = async || limits::redis().connect(&redis.url()).await.expect("it is up");
    let fleet = Fleet::on(store().await, store().await).await;
    revoke(&window.browser, &fleet).await;
    assert_eq!(window.browser.log().await, Vec::<String>::new());
}

#[tokio::test]
async fn one_of_two_readers_is_revoked_and_the_other_stays() {
    let Some(window) = window().await else { return };
    let (browser, fleet) = (&window.browser, Fleet::in_memory().await);
    let (first, second) = (fleet.first.read(("file", 1)).await, fleet.second.read(("file", 1)).await);
    let (first, second) = (first.expect("free"), second.expect("shared"));
    browser.open(&fleet.url("/key?name=file%3A1")).await;
    browser.find("button[aria-label^='Revoke web-2:']").await.follow().await;
    assert!(browser.find("#done").await.text().await.starts_with("Revoked from 1 holder."));
    soon("the loss", second.held_permit().lost()).await;
    let answer = browser.find("#answer").await.text().await;
    assert!(answer.starts_with("Held by web-1 for "), "{answer}");
    first.release().await.expect("not lost");
}

#[tokio::test]
async fn keyboard_alone_reaches_the_button_and_revokes() {
    let Some(window) = window().await else { return };
    let (browser, fleet) = (&window.browser, Fleet::in_memory().await);
    let request = fleet.order(7).await;
    browser.open(&fleet.url("/keys")).await;
    // Past the links and the form of all pages.
    press_until(browser, "order:7").await;
    until("the page of the key", async || browser.title().await.starts_with("One key")).await;
    press_until(browser, "Revoke all holders").await;
    until("the confirmation", async || !browser.find_all("#done").await.is_empty()).await;
    assert!(browser.find("#done").await.text().await.starts_with("Revoked from 1 holder."));
    fleet.assert_lost(request).await;
    assert!(!fleet.is_held(&LockKey::from(("order", 7))).await);
}

/// Goes from element to element until this one has the focus, which must be visible, and activates
/// it.
async fn press_until(browser: &Browser, text: &str) {
    for _ in 0..20 {
        browser.press(keys::TAB).await;
        let focused = browser.focused().await;
        if focused.text().await == text {
            assert_ne!(focused.style("outline-style").await, "none", "no sign of the focus");
            return browser.press(keys::ENTER).await;
        }
    }
    panic!("the keyboard does not reach {text}");
}
