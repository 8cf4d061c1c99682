//! Keys from named fields: different spellings give one key, or are rejected.

use std::convert::Infallible;

use axum::{
    Form, Json, Router,
    body::Body,
    extract::{Path, Query, Request as AnyRequest},
    http::{Method, Request, Response, StatusCode},
    routing::{any, post},
};
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::{Value, json};
use tower::{Layer, ServiceExt, service_fn};
use tower_lock::{
    HeldLock, LockKey, LockLayer, LockManager, Rejection,
    key::{self, FieldProblem, KeyPart, PartWriter},
    middleware::RequestBody,
    test_util::StoreOp,
};
use tower_lock_testkit::{
    app::{post_json, problem_type, send, text},
    locks::store_and_locks,
    wait::soon,
};

const JSON: &str = "application/json";
const FORM: &str = "application/x-www-form-urlencoded";

#[derive(Clone)]
struct TenantId(u64);

impl KeyPart for TenantId {
    fn write(&self, part: &mut PartWriter<'_>) {
        self.0.write(part);
    }
}

async fn show_key(lock: HeldLock) -> String {
    lock.key().to_string()
}

fn layered(layer: LockLayer<impl tower_lock::key::KeySource>) -> Router {
    Router::new().route("/o/{id}", any(show_key).layer(layer))
}

fn percent_encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// The key, or the rejected field with status and reason.
async fn outcome(app: &Router, request: Request<Body>) -> Result<String, (StatusCode, FieldProblem)> {
    let response = send(app, request).await;
    match response.extensions().get() {
        None => {
            assert_eq!(response.status(), StatusCode::OK);
            Ok(text(response).await)
        }
        Some(Rejection::InvalidKey { status, field: Some(field), .. }) => {
            assert_eq!((response.status(), field.status()), (*status, *status));
            Err((*status, field.problem()))
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn one_to_four_fields_of_any_location_make_one_key() {
    let locks = &LockManager::in_memory();
    let request = || {
        Request::post("/o/7?line=3&x=%4B%C3%A4se+1")
            .header("x-tenant", "acme")
            .header("content-type", JSON)
            .extension(TenantId(9))
            .body(Body::from(
                r#"{"family_id": 42, "other": [1, {"family_id": 2}], "reward_type": "gold", "first": true}"#,
            ))
            .expect("a request")
    };
    macro_rules! keys {
        ($($source:expr => $want:expr,)*) => {$(
            let app = layered(LockLayer::new(locks, $source));
            assert_eq!(outcome(&app, request()).await.as_deref(), Ok($want));
        )*};
    }
    keys! {
        key::from_fields("tenant", key::header("X-Tenant")) => "tenant:acme",
        key::from_fields("order", key::path_param("id")) => "order:7",
        key::from_fields("line", key::query_param("line")) => "line:3",
        key::from_fields("cheese", key::query_param("x")) => "cheese:Käse%201",
        key::from_fields("tenant", key::extension::<TenantId>()) => "tenant:9",
        key::from_fields("reward", key::json_field("reward_type")) => "reward:gold",
        key::from_fields("reward", (key::json_field("family_id"), key::json_field("reward_type"))) => "reward:42:gold",
        key::from_fields("reward", (key::json_field("reward_type"), key::json_field("family_id"))) => "reward:gold:42",
        key::from_fields("twice", (key::json_field("first"), key::json_field("first"))) => "twice:true:true",
        key::from_fields("order", (key::header("x-tenant"), key::path_param("id"), key::query_param("line"))) => "order:acme:7:3",
        key::from_fields("all", (key::path_param("id"), key::json_field("family_id"), key::extension::<TenantId>(), key::header("x-tenant"))) => "all:7:42:9:acme",
        key::from_fields("all", (key::extension::<TenantId>(), key::header("x-tenant"), key::query_param("line"), key::json_field("first"))) => "all:9:acme:3:true",
        key::fixed(("nightly", "mail")) => "nightly:mail",
        key::fixed(LockKey::raw("nightly mail").expect("a name")) => "nightly mail",
    }
    let form = Request::post("/o/7").header("content-type", FORM).body(Body::from("a=1&no=%37&row=B%20b"));
    let app = layered(LockLayer::new(
        locks,
        key::from_fields("seat", (key::form_field("row"), key::form_field("no"), key::path_param("id"))),
    ));
    assert_eq!(outcome(&app, form.expect("a request")).await.as_deref(), Ok("seat:B%20b:7:7"));
}

/// All texts of one value in any location give one key, or are rejected.
/// Guarantee: G14.
#[tokio::test(start_paused = true)]
async fn equal_field_texts_give_one_key_or_are_rejected() {
    use FieldProblem::{Empty, NonCanonicalNumber, SurroundingWhitespace};

    let locks = &LockManager::in_memory();
    let uuid = "67e55044-10b1-426f-9247-bb680e5fe0c8";
    let spellings: &[(&str, Result<&str, FieldProblem>)] = &[
        ("1", Ok("1")),
        ("-1", Ok("-1")),
        ("0", Ok("0")),
        ("gold", Ok("gold")),
        ("Gold", Ok("Gold")),
        ("a b", Ok("a%20b")),
        ("a:b", Ok("a%3Ab")),
        ("01", Err(NonCanonicalNumber)),
        ("+1", Err(NonCanonicalNumber)),
        ("-0", Err(NonCanonicalNumber)),
        ("1.0", Err(NonCanonicalNumber)),
        ("1e3", Err(NonCanonicalNumber)),
        ("1e0", Err(NonCanonicalNumber)),
        (".1", Err(NonCanonicalNumber)),
        ("00000000000000000000000000000001", Err(NonCanonicalNumber)),
        ("", Err(Empty)),
        (" ", Err(SurroundingWhitespace)),
        (" 1", Err(SurroundingWhitespace)),
        ("1 ", Err(SurroundingWhitespace)),
        ("1\t", Err(SurroundingWhitespace)),
        (uuid, Ok(uuid)),
        ("67E55044-10b1-426f-9247-BB680E5FE0C8", Ok(uuid)),
        ("67e5504410b1426f9247bb680e5fe0c8", Ok(uuid)),
        ("{67e55044-10b1-426f-9247-bb680e5fe0c8}", Ok(uuid)),
        ("urn:uuid:67e55044-10b1-426f-9247-bb680e5fe0c8", Ok(uuid)),
    ];
    let by_header = layered(LockLayer::new(locks, key::from_fields("n", key::header("x-id"))));
    let by_path = layered(LockLayer::new(locks, key::from_fields("n", key::path_param("id"))));
    let by_query = layered(LockLayer::new(locks, key::from_fields("n", key::query_param("id"))));
    let by_json = layered(LockLayer::new(locks, key::from_fields("n", key::json_field("id"))));
    let by_form = layered(LockLayer::new(locks, key::from_fields("n", key::form_field("id"))));
    for (spelling, want) in spellings {
        let encoded = percent_encoded(spelling);
        let json = json!({ "id": spelling }).to_string();
        let plain = Request::get("/o/x");
        let (get, put, bad, useless) =
            (Method::GET, Method::PUT, StatusCode::BAD_REQUEST, StatusCode::UNPROCESSABLE_ENTITY);
        let request = |method: &Method, uri: String, kind: &str, body: String| {
            let request =
                Request::builder().method(method).uri(uri).header("content-type", kind).body(Body::from(body));
            request.expect("a request")
        };
        // An empty segment matches another route.
        let in_path =
            (!spelling.is_empty()).then(|| (&by_path, request(&get, format!("/o/{encoded}"), "", String::new()), bad));
        let cases = [
            Some((&by_header, plain.header("x-id", *spelling).body(Body::empty()).expect("a request"), bad)),
            in_path,
            Some((&by_query, request(&get, format!("/o/x?a=b&id={encoded}&c"), "", String::new()), bad)),
            Some((&by_json, request(&put, "/o/x".into(), JSON, json), useless)),
            Some((&by_form, request(&put, "/o/x?id=9".into(), FORM, format!("id={encoded}")), useless)),
            Some((&by_form, request(&get, format!("/o/x?id={encoded}"), FORM, "id=9".into()), useless)),
        ];
        for (n, case) in cases.into_iter().enumerate() {
            let Some((app, request, status)) = case else { continue };
            let want = want.map(|part| format!("n:{part}")).map_err(|problem| (status, problem));
            assert_eq!(outcome(app, request).await, want, "{spelling:?}, location {n}");
        }
    }
}

/// Guarantee: G14.
#[tokio::test(start_paused = true)]
async fn missing_and_duplicate_fields_are_rejected() {
    use FieldProblem::{Duplicate, Missing, NotText};

    let locks = &LockManager::in_memory();
    let (bad, useless, ours) =
        (StatusCode::BAD_REQUEST, StatusCode::UNPROCESSABLE_ENTITY, StatusCode::INTERNAL_SERVER_ERROR);
    let app = Router::new()
        .route("/header", any(show_key).layer(LockLayer::new(locks, key::from_fields("n", key::header("x-id")))))
        .route("/query", any(show_key).layer(LockLayer::new(locks, key::from_fields("n", key::query_param("id")))))
        .route("/form", any(show_key).layer(LockLayer::new(locks, key::from_fields("n", key::form_field("id")))))
        .route("/path/{id}", any(show_key).layer(LockLayer::new(locks, key::from_fields("n", key::path_param("id")))))
        .route("/no/{other}", any(show_key).layer(LockLayer::new(locks, key::from_fields("n", key::path_param("id")))))
        .route(
            "/tenant",
            any(show_key).layer(LockLayer::new(locks, key::from_fields("n", key::extension::<TenantId>()))),
        );
    let request = |method: &str, uri: &str, ids: &[&[u8]], body: &'static str| {
        let mut request = Request::builder().method(method).uri(uri);
        for id in ids {
            request = request.header("x-id", *id);
        }
        request.body(Body::from(body)).expect("a request")
    };
    for (method, uri, ids, body, want) in [
        ("GET", "/header", &[][..], "", (bad, Missing)),
        ("GET", "/header", &[&b"1"[..], b"1"][..], "", (bad, Duplicate)),
        ("GET", "/header", &[b"1", b"2"], "", (bad, Duplicate)),
        ("GET", "/header", &[b"\xff"], "", (bad, NotText)),
        ("GET", "/header", &["é".as_bytes()], "", (bad, NotText)),
        ("GET", "/query", &[], "", (bad, Missing)),
        ("GET", "/query?", &[], "", (bad, Missing)),
        ("GET", "/query?ID=1", &[], "", (bad, Missing)),
        ("GET", "/query?id=1&id=1", &[], "", (bad, Duplicate)),
        ("GET", "/query?id=1&i%64=2", &[], "", (bad, Duplicate)),
        ("GET", "/query?id=&id=1", &[], "", (bad, Duplicate)),
        ("GET", "/query?id", &[], "", (bad, FieldProblem::Empty)),
        ("GET", "/query?id=+1", &[], "", (bad, FieldProblem::SurroundingWhitespace)),
        ("POST", "/form", &[], "", (useless, Missing)),
        ("POST", "/form?id=1", &[], "", (useless, Missing)),
        ("GET", "/form", &[], "id=1", (useless, Missing)),
        ("POST", "/form", &[], "id=1&id=1", (useless, Duplicate)),
        ("POST", "/form", &[], "i%64=1&id=2", (useless, Duplicate)),
        ("GET", "/path/%FF", &[], "", (bad, NotText)),
        ("GET", "/no/1", &[], "", (ours, Missing)),
        ("GET", "/tenant", &[], "", (ours, Missing)),
    ] {
        assert_eq!(outcome(&app, request(method, uri, ids, body)).await, Err(want), "{uri} {ids:?} {body}");
    }
    assert_eq!(outcome(&app, request("GET", "/query?id=1&ID=2&x=3&id[]=4", &[], "")).await.as_deref(), Ok("n:1"));
    // Outside of a router no path is matched.
    let service = LockLayer::new(locks, key::from_fields("n", key::path_param("id")))
        .layer(service_fn(|_: Request<RequestBody>| async { Ok::<_, Infallible>(Response::new(Body::empty())) }));
    let response = soon("a response", service.oneshot(Request::new(Body::empty()))).await.expect("infallible");
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
}

/// Guarantee: G14.
#[tokio::test(start_paused = true)]
async fn json_field_is_a_string_an_integer_or_a_bool() {
    use FieldProblem::{
        Duplicate, InvalidJson, Missing, NonCanonicalNumber, NotAnObject, SurroundingWhitespace, WrongType,
    };

    let (store, locks) = store_and_locks();
    let app = layered(LockLayer::new(&locks, key::from_fields("n", key::json_field("id"))));
    for (body, want) in [
        (r#"{"id":1}"#, "n:1"),
        (r#" { "x" : 2.5e3, "\u0069d" : 1 } "#, "n:1"),
        (r#"{"id":"1"}"#, "n:1"),
        (r#"{"id":"\u0031"}"#, "n:1"),
        (r#"{"id":-7}"#, "n:-7"),
        (r#"{"id":0}"#, "n:0"),
        (r#"{"id":9007199254740991}"#, "n:9007199254740991"),
        (r#"{"id":-9007199254740991}"#, "n:-9007199254740991"),
        (r#"{"id":"18446744073709551615"}"#, "n:18446744073709551615"),
        (r#"{"id":true,"ID":1,"x":{"id":2}}"#, "n:true"),
        (r#"{"id":"a\"\\é"}"#, "n:a%22%5Cé"),
    ] {
        assert_eq!(outcome(&app, json_request(body)).await.as_deref(), Ok(want), "{body}");
    }
    let asked = store.on(StoreOp::Acquire).calls();
    for (body, why) in [
        (r#"{"id":1.0}"#, WrongType),
        (r#"{"id":1e0}"#, WrongType),
        (r#"{"id":1E0}"#, WrongType),
        (r#"{"id":-0}"#, WrongType),
        (r#"{"id":0.0}"#, WrongType),
        // A handler that reads `f64` sees one number: 2^53.
        (r#"{"id":9007199254740992}"#, WrongType),
        (r#"{"id":9007199254740993}"#, WrongType),
        (r#"{"id":-9007199254740992}"#, WrongType),
        (r#"{"id":9223372036854775807}"#, WrongType),
        (r#"{"id":-9223372036854775808}"#, WrongType),
        (r#"{"id":18446744073709551616}"#, WrongType),
        (r#"{"id":-9223372036854775809}"#, WrongType),
        (r#"{"id":null}"#, WrongType),
        (r#"{"id":[1]}"#, WrongType),
        (r#"{"id":{"id":1}}"#, WrongType),
        (r#"{"id":"01"}"#, NonCanonicalNumber),
        (r#"{"id":"1.0"}"#, NonCanonicalNumber),
        (r#"{"id":"\u00201"}"#, SurroundingWhitespace),
        (r#"{"id":1,"id":1}"#, Duplicate),
        (r#"{"id":2,"id":1}"#, Duplicate),
        (r#"{"id":1,"\u0069d":2}"#, Duplicate),
        (r#"{"id":null,"id":1}"#, Duplicate),
        (r#"{}"#, Missing),
        (r#"{"Id":1}"#, Missing),
        (r#"[{"id":1}]"#, NotAnObject),
        (r#""id""#, NotAnObject),
        ("null", NotAnObject),
    ] {
        let refused = Err((StatusCode::UNPROCESSABLE_ENTITY, why));
        assert_eq!(outcome(&app, json_request(body)).await, refused, "{body}");
    }
    for body in [
        "",
        "{",
        r#"{"id":1"#,
        r#"{"id":1}}"#,
        r#"{"id":1} {"id":2}"#,
        r#"{"id":01}"#,
        r#"{"id":+1}"#,
        r#"{"id":"\ud800"}"#,
        r#"{'id':1}"#,
        r#"{"id":1,}"#,
        r#"{"id":NaN}"#,
        "\u{feff}{\"id\":1}",
        "id=1",
        "{\"id\":\"a\nb\"}",
    ] {
        let refused = Err((StatusCode::BAD_REQUEST, InvalidJson));
        assert_eq!(outcome(&app, json_request(body)).await, refused, "{body}");
    }
    assert_eq!(store.on(StoreOp::Acquire).calls(), asked, "no store call");
}

fn json_request(body: &'static str) -> Request<Body> {
    Request::post("/o/x").header("content-type", JSON).body(Body::from(body)).expect("a request")
}

/// The locked value is the one that the handler parses, or the handler does not run.
/// Guarantee: G14.
#[tokio::test(start_paused = true)]
async fn parsed_number_in_the_handler_is_the_locked_number() {
    #[derive(Deserialize)]
    struct Id<T> {
        id: T,
    }
    // In a response header: `HEAD` has no body.
    fn seen(lock: &HeldLock, id: i64) -> [(&'static str, String); 2] {
        [("x-locked", lock.key().to_string()), ("x-seen", format!("n:{id}"))]
    }
    let locks = &LockManager::in_memory();
    let by_path = LockLayer::new(locks, key::from_fields("n", key::path_param("id")));
    let by_query = LockLayer::new(locks, key::from_fields("n", key::query_param("id")));
    let by_form = LockLayer::new(locks, key::from_fields("n", key::form_field("id")));
    let by_json = LockLayer::new(locks, key::from_fields("n", key::json_field("id")));
    let app = Router::new()
        .route("/path/{id}", any(|l: HeldLock, Path(id): Path<i64>| async move { seen(&l, id) }).layer(by_path))
        .route("/query", any(|l: HeldLock, Query(q): Query<Id<i64>>| async move { seen(&l, q.id) }).layer(by_query))
        .route("/form", any(|l: HeldLock, Form(f): Form<Id<i64>>| async move { seen(&l, f.id) }).layer(by_form))
        .route("/json", any(|l: HeldLock, Json(j): Json<Id<i64>>| async move { seen(&l, j.id) }).layer(by_json));
    let (mut ran, mut refused) = (0, 0);
    for number in [
        "1",
        "01",
        "+1",
        "1.0",
        "-1",
        "-01",
        "-0",
        "0",
        "00",
        "1e0",
        "%31",
        "%2B1",
        "+%31",
        "1+",
        "18446744073709551617",
    ] {
        let requests = [
            Request::get(format!("/path/{number}")).body(Body::empty()),
            Request::get(format!("/query?id={number}")).body(Body::empty()),
            Request::get(format!("/query?id={number}&id=5")).body(Body::empty()),
            Request::get(format!("/form?id={number}")).header("content-type", FORM).body(Body::from("id=5")),
            Request::post("/form?id=5").header("content-type", FORM).body(Body::from(format!("id={number}"))),
            Request::head("/form?id=5").header("content-type", FORM).body(Body::from(format!("id={number}"))),
            Request::post("/json").header("content-type", JSON).body(Body::from(format!(r#"{{"id":{number}}}"#))),
        ];
        for (n, request) in requests.into_iter().enumerate() {
            let response = send(&app, request.expect("a request")).await;
            if response.status() == StatusCode::OK {
                ran += 1;
                assert_eq!(response.headers()["x-locked"], response.headers()["x-seen"], "{number}, request {n}");
            } else {
                assert!(response.status().is_client_error(), "{number}, request {n}: {}", response.status());
                refused += 1;
            }
        }
    }
    assert!(ran >= 20 && refused >= 50, "{ran} ran, {refused} were refused");
}

#[tokio::test(start_paused = true)]
async fn field_rejection_names_field_and_problem_but_not_value() {
    let (store, locks) = store_and_locks();
    let layer = LockLayer::new(&locks, key::from_fields("n", (key::header("x-tenant"), key::json_field("family_id"))));
    let app = Router::new().route("/", post(show_key).route_layer(layer.clone())).route(
        "/mine",
        post(show_key).route_layer(layer.on_reject(|rejection| {
            let Rejection::InvalidKey { field: Some(field), .. } = rejection else { panic!("{rejection:?}") };
            Response::new(Body::from(format!("{}: {field}", field.name())))
        })),
    );
    let request = |path: &str| {
        let request = Request::post(path).header("x-tenant", "acme").header("content-type", JSON);
        request.body(Body::from(r#"{"family_id":"007"}"#)).expect("a request")
    };
    let response = send(&app, request("/")).await;
    assert_eq!(response.status(), StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    let problem: Value = serde_json::from_str(&text(response).await).expect("JSON");
    assert_eq!((&problem["type"], &problem["outcome"]), (&json!(problem_type("invalid-key")), &json!("not-started")));
    let detail = problem["detail"].as_str().expect("a text");
    assert!(detail.contains("JSON field `family_id`") && detail.contains("non-canonical form"), "{detail}");
    assert!(!detail.contains("007"), "{detail}");
    let want = "family_id: JSON field `family_id` is a number in non-canonical form (leading zero, plus sign, fraction or exponent)";
    assert_eq!(text(send(&app, request("/mine")).await).await, want);
    assert_eq!(store.on(StoreOp::Acquire).calls(), 0, "nothing is locked");
}

#[tokio::test(start_paused = true)]
async fn body_is_read_once_for_all_fields_and_replayed() {
    const BODY: &str = " {\"b\" :\"x\\u0031\",\"a\": 1 ,\"c\":[1.50, \"\\u00e9\"]}\n";

    async fn echo(lock: HeldLock, request: AnyRequest) -> String {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.expect("a body").to_bytes();
        assert_eq!(&body[..], BODY.as_bytes());
        format!("{} {:?}", lock.key(), parts.headers)
    }
    let locks = LockManager::in_memory();
    let fields =
        key::from_fields("n", (key::json_field("a"), key::json_field("b"), key::json_field("a"), key::header("x-a")));
    let app = Router::new().route("/", post(echo).route_layer(LockLayer::new(&locks, fields)));
    let request = Request::post("/").header("x-a", "2").header("content-type", JSON).body(Body::from(BODY));
    let response = text(send(&app, request.expect("a request")).await).await;
    assert_eq!(response, r#"n:1:x1:1:2 {"x-a": "2", "content-type": "application/json"}"#);
}

#[tokio::test(start_paused = true)]
async fn fields_read_the_body_within_the_limit_of_the_route() {
    let (store, locks) = store_and_locks();
    let app = Router::new()
        .route("/", post(show_key).route_layer(LockLayer::new(&locks, key::from_fields("n", key::json_field("id")))))
        .layer(axum::extract::DefaultBodyLimit::max(8));
    assert_eq!(text(post_json(&app, "/", r#"{"id":1}"#).await).await, "n:1");
    let response = post_json(&app, "/", r#"{"id":10}"#).await;
    assert!(matches!(response.extensions().get(), Some(Rejection::BodyTooLarge)));
    assert_eq!(store.on(StoreOp::Acquire).calls(), 1);
}

#[test]
#[should_panic(expected = "\"x tenant\" is not a valid header name")]
fn invalid_header_name_panics_when_routes_are_built() {
    let _ = key::header("x tenant");
}

/// The client may not be the developer: the name of a type is only logged.
#[tokio::test(start_paused = true)]
async fn missing_extension_does_not_reveal_its_type_name() {
    let layer = LockLayer::new(&LockManager::in_memory(), key::from_fields("n", key::extension::<TenantId>()));
    let app = Router::new().route("/", any(show_key).layer(layer));
    let response = send(&app, Request::post("/").body(Body::empty()).expect("a request")).await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let Some(Rejection::InvalidKey { field: Some(field), .. }) = response.extensions().get() else {
        panic!("not typed")
    };
    assert!(field.name().ends_with("TenantId"), "{}", field.name());
    let detail = text(response).await;
    assert!(!detail.contains("TenantId") && detail.contains("Invalid lock key"), "{detail}");
}
