//! What a page of another origin may do to an operator who opens it.

use axum::{Router, response::Html, routing::get};
use tower_lock_testkit::{app::serve, browser::Browser, log::Log, wait::until};

use super::support::{Fleet, window};

/// A page of a server on another port, under both names of this machine: another site, and another
/// origin of the same site.
async fn foreign_pages(page: String) -> [String; 2] {
    let server = serve(Router::new().route("/", get(async move || Html(page)))).await;
    ["localhost", "127.0.0.1"].map(|host| format!("http://{host}:{}/", server.port()))
}

async fn assert_forbidden(browser: &Browser) {
    assert_eq!(browser.title().await, "Forbidden – Locks");
    let answer = browser.find("#answer").await.text().await;
    assert!(answer.starts_with("The request does not show that it comes from this page."), "{answer}");
}

#[tokio::test]
async fn form_of_another_origin_revokes_nothing() {
    let Some(window) = window().await else { return };
    let (browser, fleet, log) = (&window.browser, Fleet::in_memory().await, Log::default());
    let _listening = log.listen();
    let _request = fleet.order(7).await;
    let revoke = fleet.url("/revoke");
    let page = format!(
        "<!doctype html><form method=post action='{revoke}?name=order%3A7'><button>a prize</button></form>\
         <form method=post action='{revoke}' enctype='text/plain'><input name=name value='order:7'><button>another</button></form>"
    );
    for url in foreign_pages(page).await {
        for button in 0..2 {
            browser.open(&url).await;
            browser.find_all("button").await[button].follow().await;
            assert_forbidden(browser).await;
            fleet.assert_untouched(7, &log).await;
        }
    }
    // The same request from a page of the console.
    browser.open(&fleet.url("/key?name=order%3A7")).await;
    browser.find("#revoke-all button").await.follow().await;
    assert!(browser.find("#done").await.text().await.starts_with("Revoked from 1 holder."));
}

/// Programs send the header `x-tower-lock`. A script of another origin asks the server first.
#[tokio::test]
async fn script_of_another_origin_revokes_nothing() {
    let Some(window) = window().await else { return };
    let (browser, fleet, log) = (&window.browser, Fleet::in_memory().await, Log::default());
    let _listening = log.listen();
    let _request = fleet.order(7).await;
    let revoke = fleet.url("/api/revoke?name=order%3A7");
    let page = format!(
        "<!doctype html><title>attempts</title><script>
         const send = mode => fetch('{revoke}', {{ method: 'POST', mode, headers: {{ 'x-tower-lock': '1' }} }})
             .then(reply => reply.type, () => 'refused');
         Promise.all(['cors', 'no-cors'].map(send)).then(ends => document.title = ends.join());
         </script>"
    );
    for url in foreign_pages(page).await {
        browser.open(&url).await;
        until("the end of the script", async || browser.title().await == "refused,opaque").await;
        fleet.assert_untouched(7, &log).await;
    }
}

/// Browsers send `Sec-Fetch-Site` over HTTPS and to this machine only. The page says so.
#[tokio::test]
async fn plain_http_to_another_host_revokes_nothing() {
    let Some(window) = window().await else { return };
    let (browser, fleet, log) = (&window.browser, Fleet::in_memory().await, Log::default());
    let _listening = log.listen();
    let _request = fleet.order(7).await;
    browser.open(&fleet.url("/key?name=order%3A7").replace("127.0.0.1", "console.test")).await;
    browser.find("#revoke-all button").await.follow().await;
    assert_forbidden(browser).await;
    let answer = browser.find("#answer").await.text().await;
    assert!(answer.contains("A browser shows it over HTTPS, and over HTTP on localhost."), "{answer}");
    fleet.assert_untouched(7, &log).await;
}

#[tokio::test]
async fn link_of_another_origin_fakes_no_confirmation() {
    let Some(window) = window().await else { return };
    let (browser, fleet) = (&window.browser, Fleet::in_memory().await);
    let _request = fleet.order(7).await;
    let page = format!("<!doctype html><a href='{}'>a link</a>", fleet.url("/key?name=order%3A7&amp;done=revoked-9"));
    for url in foreign_pages(page).await {
        browser.open(&url).await;
        browser.find("a").await.follow().await;
        assert_eq!(browser.title().await, "One key – Locks");
        assert_eq!(browser.find_all("#done").await, []);
    }
}

#[tokio::test]
async fn no_frame_shows_the_console() {
    let Some(window) = window().await else { return };
    let (browser, fleet) = (&window.browser, Fleet::in_memory().await);
    let _request = fleet.order(7).await;
    let frame = fleet.url("/key?name=order%3A7");
    for url in foreign_pages(format!("<!doctype html><iframe src='{frame}'></iframe>")).await {
        browser.open(&url).await;
        let is_refused = |log: Vec<String>| log.iter().any(|line| line.contains("frame-ancestors 'none'"));
        until("the refusal in the log", async || is_refused(browser.log().await)).await;
        browser.enter_frame(0).await;
        assert_eq!(browser.find_all("main, form").await, [], "{}", browser.source().await);
    }
}
