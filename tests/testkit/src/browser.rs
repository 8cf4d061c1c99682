//! A browser without a window, for tests of pages.

use std::{
    fmt, fs,
    net::SocketAddr,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::{
    http::Http1,
    process::{Process, ReservedPort, TempFolder, find, is_running, local},
    wait::{until, until_blocking},
};

/// A Chromium without a window and with a profile of its own, which ends on drop. A `chromedriver`
/// steers it. All hosts below `.test` are this machine.
///
/// The environment variables `CHROMEDRIVER=/path` and `CHROMIUM=/path` select other programs.
#[derive(Debug)]
pub struct Browser {
    driver: Process,
    chromium: u32,
    /// The path of all commands.
    session: String,
    port: ReservedPort,
    folder: TempFolder,
}

/// A part of the page that a [`Browser`] shows.
#[derive(Clone)]
pub struct Element<'a> {
    browser: &'a Browser,
    path: String,
}

/// The keys of a keyboard that are no text.
pub mod keys {
    /// The next element that takes keys.
    pub const TAB: &str = "\u{E004}";
    /// Activates an element.
    pub const ENTER: &str = "\u{E007}";
}

/// The name of an id of an element, in the standard of WebDriver.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

// === impl Browser ===

impl Browser {
    /// Returns whether `chromedriver` and `chromium` exist on this machine.
    #[must_use]
    pub fn is_available() -> bool {
        find(Some("CHROMEDRIVER"), "chromedriver").is_some() && chromium().is_some()
    }

    /// Starts a browser.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub async fn start() -> Self {
        Self::start_with(&json!({})).await
    }

    /// Starts a browser that runs no script of a page.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub async fn without_scripts() -> Self {
        Self::start_with(&json!({ "profile.managed_default_content_settings.javascript": 2 })).await
    }

    async fn start_with(preferences: &Value) -> Self {
        let (folder, port) = (TempFolder::create(), ReservedPort::new());
        let driver = find(Some("CHROMEDRIVER"), "chromedriver").expect("check `Browser::is_available` first");
        let driver = Process::start(Self::command(driver, &folder, &port)).expect("a driver");
        let address = local(port.number());
        until("a driver that accepts connections", async || TcpStream::connect(address).await.is_ok()).await;
        let options = json!({
            "binary": chromium().expect("check `Browser::is_available` first"),
            // Root can have no sandbox. The browser ends with the pipe, and so with the driver.
            "args": ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars",
                "--host-resolver-rules=MAP *.test 127.0.0.1", "--lang=en-US", "--remote-debugging-pipe", format!("--user-data-dir={}/profile", folder.path().display())],
            "prefs": preferences,
        });
        let wanted = json!({ "goog:chromeOptions": options, "goog:loggingPrefs": { "browser": "ALL" } });
        let session = json!({ "capabilities": { "alwaysMatch": wanted } });
        let session = send(address, "POST", "/session", &session).await.expect("a session");
        let chromium = session["capabilities"]["goog:processID"].as_u64().expect("a process");
        Self {
            driver,
            chromium: chromium.try_into().expect("a process id"),
            session: format!("/session/{}", text(&session["sessionId"])),
            port,
            folder,
        }
    }

    /// The browser is in the process group of its driver, and writes to this folder only.
    fn command(driver: PathBuf, folder: &TempFolder, port: &ReservedPort) -> Command {
        let log = fs::File::create(folder.path().join("log")).expect("a file");
        let mut command = Process::command(driver);
        let variables = ["HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"];
        command
            .args([format!("--port={}", port.number()), "--log-level=WARNING".to_owned()])
            .envs(variables.map(|name| (name, folder.path())))
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        command
    }

    /// The folder to which the browser writes.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Opens a page and waits until it is loaded.
    pub async fn open(&self, url: &str) {
        self.post("/url", json!({ "url": url })).await;
    }

    /// Loads the page again.
    pub async fn reload(&self) {
        self.post("/refresh", json!({})).await;
    }

    /// The address of the page.
    pub async fn url(&self) -> String {
        text(&self.get("/url").await)
    }

    /// The title of the page.
    pub async fn title(&self) -> String {
        text(&self.get("/title").await)
    }

    /// The page as markup, as it is now.
    pub async fn source(&self) -> String {
        text(&self.get("/source").await)
    }

    /// The text of the page, as it is shown.
    pub async fn text(&self) -> String {
        self.find("body").await.text().await
    }

    /// The first element that this CSS selector matches.
    ///
    /// # Panics
    ///
    /// Panics if there is none.
    pub async fn find(&self, selector: &str) -> Element<'_> {
        match self.find_all(selector).await.into_iter().next() {
            Some(element) => element,
            None => panic!("no {selector} on {}:\n{}", self.url().await, self.source().await),
        }
    }

    /// All elements that this CSS selector matches.
    ///
    /// # Panics
    ///
    /// Panics if the selector is none.
    pub async fn find_all(&self, selector: &str) -> Vec<Element<'_>> {
        let found = self.post("/elements", json!({ "using": "css selector", "value": selector })).await;
        found.as_array().expect("a list").iter().map(|element| self.element(element)).collect()
    }

    /// The element that takes the keys.
    pub async fn focused(&self) -> Element<'_> {
        let element = self.get("/element/active").await;
        self.element(&element)
    }

    fn element(&self, id: &Value) -> Element<'_> {
        Element { browser: self, path: format!("/element/{}", text(&id[ELEMENT])) }
    }

    /// Presses a key, of text or of [`keys`], and releases it.
    pub async fn press(&self, key: &str) {
        let actions = ["keyDown", "keyUp"].map(|kind| json!({ "type": kind, "value": key }));
        self.post("/actions", json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": actions }] })).await;
    }

    /// Sends the next commands to a frame of the page, by its number.
    pub async fn enter_frame(&self, number: usize) {
        self.post("/frame", json!({ "id": number })).await;
    }

    /// Shows pages in this size from now on, in pixels.
    pub async fn resize(&self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// Shows pages as users want them that chose dark colours, or light ones.
    pub async fn prefer_dark(&self, is_dark: bool) {
        let value = if is_dark { "dark" } else { "light" };
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": value }] });
        self.devtools("Emulation.setEmulatedMedia", features).await;
    }

    /// The width and the height of the page, with those parts that need scrolling.
    pub async fn content_size(&self) -> (u64, u64) {
        let metrics = self.devtools("Page.getLayoutMetrics", json!({})).await;
        let side = |name| metrics["cssContentSize"][name].as_u64().expect("pixels");
        (side("width"), side("height"))
    }

    /// What a reader of the page without a screen gets: the role and the name of each part that has
    /// both.
    ///
    /// # Panics
    ///
    /// Panics if the browser has no such list.
    pub async fn accessible_parts(&self) -> Vec<(String, String)> {
        let tree = self.devtools("Accessibility.getFullAXTree", json!({})).await;
        let nodes = tree["nodes"].as_array().expect("a list").iter();
        let part = |node: &Value| {
            Some((node["role"]["value"].as_str()?.to_owned(), node["name"]["value"].as_str()?.to_owned()))
        };
        nodes.filter_map(part).filter(|(_, name)| !name.is_empty()).collect()
    }

    /// The messages of the browser since the last call: errors of scripts, refused content.
    ///
    /// # Panics
    ///
    /// Panics if the browser has no log.
    pub async fn log(&self) -> Vec<String> {
        let log = self.post("/se/log", json!({ "type": "browser" })).await;
        log.as_array().expect("a list").iter().map(|entry| text(&entry["message"])).collect()
    }

    /// A picture of the visible part of the page, as PNG in Base64.
    pub async fn screenshot(&self) -> String {
        text(&self.get("/screenshot").await)
    }

    /// The result of a command of the protocol of the developer tools.
    pub async fn devtools(&self, command: &str, parameters: Value) -> Value {
        self.post("/goog/cdp/execute", json!({ "cmd": command, "params": parameters })).await
    }

    async fn get(&self, path: &str) -> Value {
        let reply = self.reply("GET", path, &Value::Null).await;
        reply.unwrap_or_else(|error| panic!("GET {path}: {error}"))
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let reply = self.reply("POST", path, &body).await;
        reply.unwrap_or_else(|error| panic!("POST {path} {body}: {error}"))
    }

    async fn reply(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        send(local(self.port.number()), method, &format!("{}{path}", self.session), body).await
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let group = i32::try_from(self.driver.pid()).ok().and_then(Pid::from_raw).expect("a process");
        let _ = kill_process_group(group, Signal::KILL);
        // It would write to the folder while that is removed.
        until_blocking(|| !is_running(self.chromium));
    }
}

// === impl Element ===

impl Element<'_> {
    /// Clicks on it.
    pub async fn click(&self) {
        self.post("/click", json!({})).await;
    }

    /// Clicks on it, and waits for the page that this opens. A click alone returns before that if
    /// another process of the browser shows the page.
    pub async fn follow(&self) {
        self.click().await;
        let path = format!("{}/name", self.path);
        until("another page", async || self.browser.reply("GET", &path, &Value::Null).await.is_err()).await;
    }

    /// Types text into it.
    pub async fn type_text(&self, text: &str) {
        self.post("/value", json!({ "text": text })).await;
    }

    /// Its text, as it is shown.
    pub async fn text(&self) -> String {
        text(&self.get("/text").await)
    }

    /// An attribute of its markup.
    pub async fn attribute(&self, name: &str) -> Option<String> {
        self.get(&format!("/attribute/{name}")).await.as_str().map(str::to_owned)
    }

    /// A property of its style, as the browser computes it.
    pub async fn style(&self, property: &str) -> String {
        text(&self.get(&format!("/css/{property}")).await)
    }

    async fn get(&self, path: &str) -> Value {
        self.browser.get(&format!("{}{path}", self.path)).await
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        self.browser.post(&format!("{}{path}", self.path), body).await
    }
}

impl fmt::Debug for Element<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)
    }
}

impl PartialEq for Element<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.path == other.path
    }
}

fn chromium() -> Option<PathBuf> {
    find(Some("CHROMIUM"), "chromium").or_else(|| find(None, "google-chrome"))
}

fn text(value: &Value) -> String {
    value.as_str().expect("text").to_owned()
}

/// Sends a command to a driver. An error is the text of the reply.
async fn send(address: SocketAddr, method: &str, path: &str, body: &Value) -> Result<Value, String> {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let mut wire = Http1::connect(address).await;
    let length = body.len();
    wire.write(format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {length}\r\n\r\n{body}")).await;
    let reply = wire.reply(false).await;
    let json: Value = serde_json::from_slice(&reply.body).expect("JSON");
    if reply.status == 200 { Ok(json["value"].clone()) } else { Err(json["value"].to_string()) }
}
