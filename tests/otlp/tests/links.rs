//! Two processes export their traces to a collector.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use axum::{Json, Router, extract::State, routing::post};
use serde_json::{Value, json};
use tower_lock_testkit::{Process, RedisServer, app::serve, skipped};

type Exported = Arc<Mutex<Vec<Value>>>;

/// A span `lock`, as the collector has it.
struct Seen {
    trace: Value,
    span: Value,
    links: Vec<[Value; 2]>,
    attributes: BTreeMap<String, Value>,
}

impl Seen {
    fn of(span: &Value) -> Self {
        let list = |name: &str| span[name].as_array().cloned().unwrap_or_default();
        let attribute = |pair: Value| {
            let value = pair["value"].as_object()?.values().next()?.clone();
            Some((pair["key"].as_str()?.to_owned(), value))
        };
        Self {
            trace: span["traceId"].clone(),
            span: span["spanId"].clone(),
            links: list("links").iter().map(|link| [link["traceId"].clone(), link["spanId"].clone()]).collect(),
            attributes: list("attributes").into_iter().filter_map(attribute).collect(),
        }
    }

    /// An integer is a text in JSON.
    fn number(&self, name: &str) -> f64 {
        let value = &self.attributes[name];
        value.as_f64().or_else(|| value.as_str()?.parse().ok()).unwrap_or_else(|| panic!("{name} is {value}"))
    }
}

#[tokio::test]
async fn each_long_wait_is_linked_to_the_section_before_it() {
    if std::process::Command::new("redis-server").arg("--version").output().is_err() {
        return skipped("each_long_wait_is_linked_to_the_section_before_it", "redis-server is not there");
    }
    let (redis, exported) = (RedisServer::start().await, Exported::default());
    let collect = async |State(exported): State<Exported>, Json(request): Json<Value>| {
        exported.lock().expect("whole").push(request);
        Json(json!({}))
    };
    let address = serve(Router::new().route("/v1/traces", post(collect)).with_state(Arc::clone(&exported))).await;
    let collector = format!("http://{address}/v1/traces");
    let services = [("/reports", "40"), ("/claims", "25")].map(|(route, work)| {
        let mut command = Process::command(env!("CARGO_BIN_EXE_tower-lock-otlp-test"));
        command.args([&redis.url(), &collector, route, work]);
        Process::start(command).expect("it starts")
    });
    for service in &services {
        assert!(service.end().await.success());
    }
    let exported = exported.lock().expect("whole");
    let scopes = exported.iter().flat_map(|request| request["resourceSpans"].as_array().into_iter().flatten());
    let spans = scopes.flat_map(|scope| scope["scopeSpans"].as_array().into_iter().flatten());
    let spans = spans.flat_map(|scope| scope["spans"].as_array().into_iter().flatten());
    let mut seen: Vec<_> = spans.filter(|span| span["name"] == "lock").map(Seen::of).collect();
    assert_eq!(seen.len(), 24, "all requests of both");
    // Fencing tokens have the order of the sections.
    seen.sort_by(|a, b| a.number("fence").total_cmp(&b.number("fence")));
    let mut over_processes = 0;
    for pair in seen.windows(2) {
        let [before, waiter] = pair else { unreachable!("pairs") };
        if waiter.number("wait_ms") < 10.0 {
            assert_eq!(waiter.links, [[(); 2]; 0].map(|_| [Value::Null, Value::Null]), "a short wait");
            continue;
        }
        assert_eq!(waiter.links, [[before.trace.clone(), before.span.clone()]], "{:?}", waiter.attributes);
        assert_eq!(waiter.attributes["blocked_by_route"], before.attributes["route"]);
        let (blocked, held) = (waiter.number("blocked_for_ms"), before.number("hold_ms"));
        assert!(blocked <= held + 1.0, "blocked for {blocked} ms by a section of {held} ms");
        over_processes += u32::from(waiter.attributes["route"] != before.attributes["route"]);
    }
    assert!(over_processes > 0, "no section of one process was followed by one of the other");
}
