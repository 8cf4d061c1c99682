//! What the tests of pages rely on without noticing.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use std::{fs, path::Path};

use axum::{Router, response::Html, routing::get};
use tower_lock_testkit::{
    app::serve,
    browser::{Browser, keys},
    skipped,
    wait::until,
};

const PAGE: &str = r##"<!doctype html><title>markup</title>
<style>@media (prefers-color-scheme: dark) { body { background: rgb(1, 2, 3) } }</style>
<script>document.title = "script"; console.error("a message")</script>
<h1>Doors</h1><div style="width: 700px">wide</div>
<form action="/"><label>Name <input name="name"></label><button>Open</button></form>"##;

fn is_available() -> bool {
    if !Browser::is_available() {
        skipped("the tests of the browser", "chromium or chromedriver");
    }
    Browser::is_available()
}

async fn page() -> String {
    format!("http://{}/", serve(Router::new().route("/", get(async || Html(PAGE)))).await)
}

/// The processes that name this folder in their arguments.
fn processes_of(folder: &Path) -> usize {
    let folder = folder.to_str().expect("text");
    let processes = fs::read_dir("/proc").expect("processes").flatten();
    let arguments = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    arguments.filter(|arguments| String::from_utf8_lossy(arguments).contains(folder)).count()
}

#[tokio::test]
async fn browser_and_its_folder_end_with_a_test_that_panics() {
    if !is_available() {
        return;
    }
    let browser = Browser::start().await;
    let folder = browser.folder().to_owned();
    assert_ne!(processes_of(&folder), 0);
    let test = tokio::spawn(async move {
        browser.open("data:text/html,page").await;
        browser.find("h1").await;
    });
    assert!(test.await.expect_err("no such element").is_panic());
    until("the end of all processes", async || processes_of(&folder) == 0).await;
    assert!(!folder.exists());
}

#[tokio::test]
async fn scripts_of_a_page_run_unless_the_browser_forbids_them() {
    if !is_available() {
        return;
    }
    let page = page().await;
    let browser = Browser::start().await;
    browser.open(&page).await;
    assert_eq!(browser.title().await, "script");
    let log = browser.log().await;
    assert!(log.iter().any(|line| line.contains("a message")), "{log:?}");

    let browser = Browser::without_scripts().await;
    browser.open(&page).await;
    assert_eq!(browser.title().await, "markup");
    browser.find("input").await.type_text("a door").await;
    browser.find("button").await.follow().await;
    assert_eq!(browser.url().await, format!("{page}?name=a+door"));
}

#[tokio::test]
async fn page_has_the_size_the_colours_and_the_keys_of_a_user() {
    if !is_available() {
        return;
    }
    let page = page().await;
    let browser = Browser::start().await;
    browser.resize(400, 300).await;
    browser.open(&page).await;
    assert!(browser.content_size().await.0 > 700);
    let light = browser.find("body").await.style("background-color").await;
    browser.prefer_dark(true).await;
    assert_eq!(browser.find("body").await.style("background-color").await, "rgba(1, 2, 3, 1)");
    browser.prefer_dark(false).await;
    assert_eq!(browser.find("body").await.style("background-color").await, light);
    let parts = browser.accessible_parts().await;
    for part in [("heading", "Doors"), ("textbox", "Name"), ("button", "Open")] {
        assert!(parts.iter().any(|(role, name)| (&**role, &**name) == part), "{part:?}: {parts:?}");
    }
    for key in [keys::TAB, "x", keys::TAB] {
        browser.press(key).await;
    }
    assert_eq!(browser.focused().await.text().await, "Open");
    browser.press(keys::ENTER).await;
    until("the next page", async || browser.url().await.ends_with("?name=x")).await;
}
