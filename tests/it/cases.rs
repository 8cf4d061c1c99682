//! The two cases, as programs of their own over real HTTP and a database.

use std::{
    env,
    path::PathBuf,
    process::{ExitStatus, Output, Stdio},
};

use axum::{
    body::Body,
    http::{Method, Request},
};
use futures_util::future::join_all;
use http_body_util::BodyExt;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    sync::OnceCell,
};

use crate::support::soon;

/// The example, built as the tests are.
async fn example(name: &str) -> Command {
    static BUILT: OnceCell<PathBuf> = OnceCell::const_new();
    let folder = BUILT
        .get_or_init(|| async {
            let built = Command::new(env!("CARGO"))
                .args(["build", "--quiet", "--example", "reward_claim", "--example", "stock_sale"])
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .status()
                .await
                .expect("cargo runs");
            assert!(built.success(), "the examples do not build");
            let tests = env::current_exe().expect("a path");
            let target = tests.ancestors().nth(3).expect("target/debug/deps/it");
            target.join("debug/examples")
        })
        .await;
    let mut command = Command::new(folder.join(name));
    command.env_remove("DATABASE_URL").env("PORT", "0").kill_on_drop(true);
    command
}

async fn run(mut command: Command) -> Output {
    soon("the end of the program", command.output()).await.expect("it starts")
}

struct Service {
    child: Child,
    url: String,
}

impl Service {
    async fn start(mut command: Command) -> Self {
        let mut child = command.arg("--serve").stdout(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let line = soon("a first line", lines.next_line()).await.expect("text").expect("a line");
        let url =
            line.strip_prefix("listening on ").unwrap_or_else(|| panic!("not where it listens: {line}")).to_owned();
        // What it says later is read and forgotten: a full pipe would stop it.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Self { child, url }
    }

    async fn ask(&self, method: Method, path: &str, body: Value) -> (u16, Value) {
        let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url))
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()))
            .expect("a request");
        let answer = soon("an answer", client.request(request)).await.expect("it serves");
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.expect("a body").to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    async fn at_once(&self, times: usize, path: &str, body: Value) -> Vec<u16> {
        let mut statuses: Vec<_> = join_all((0..times).map(|_| self.ask(Method::POST, path, body.clone())))
            .await
            .into_iter()
            .map(|(status, _)| status)
            .collect();
        statuses.sort_unstable();
        statuses
    }

    async fn terminate(mut self) -> ExitStatus {
        let pid = self.child.id().expect("it runs");
        assert!(
            Command::new("sh").args(["-c", &format!("kill -TERM {pid}")]).status().await.expect("sh runs").success()
        );
        soon("its end", self.child.wait()).await.expect("it ends")
    }
}

#[tokio::test]
async fn five_claims_of_one_family_give_one_record_under_the_layer_and_more_without() {
    let mut command = example("reward_claim").await;
    command.arg("--demo");
    let output = run(command).await;
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{table}");
    let row =
        |how: &str| table.lines().find(|line| line.trim_start().starts_with(how)).unwrap_or_else(|| panic!("{table}"));
    assert!(row("under the layer").contains(" 1 × 201 claimed, 4 × 409 refused at once "), "{table}");
    for wrong in ["without a lock", "lock taken after the check"] {
        assert!(row(wrong).contains(" 5 × 201 claimed "), "{table}");
    }
    assert!(table.contains("A sixth claim, later, gets the record that is there: 200 {"), "{table}");
}

#[tokio::test]
async fn ten_buyers_of_five_items_end_at_zero_under_the_layer_and_below_without() {
    let mut command = example("stock_sale").await;
    command.arg("--demo");
    let output = run(command).await;
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{table}");
    assert!(table.contains("under the layer   0                 5 × 200 sold, 5 × 409 sold out"), "{table}");
    assert!(table.contains("without a lock    -5"), "{table}");
}

/// By hand: created, refused, found again; and a file lasts over a restart that ends cleanly.
#[tokio::test]
async fn the_reward_service_does_what_its_readme_says() {
    let file = env::temp_dir().join(format!("tower-lock-reward-{}.db", std::process::id()));
    let start = || async {
        let mut command = example("reward_claim").await;
        command.env("DATABASE_URL", format!("sqlite://{}", file.display()));
        Service::start(command).await
    };
    let service = start().await;
    let claim = json!({ "family_id": 1, "reward_type": 1 });
    assert_eq!(service.at_once(10, "/rewards/claim", claim.clone()).await, [vec![201], vec![409; 9]].concat());
    let (status, record) = service.ask(Method::POST, "/rewards/claim", claim.clone()).await;
    assert_eq!((status, &record["family_id"], &record["reward_type"]), (200, &json!(1), &json!(1)));
    let other = json!({ "family_id": 1, "reward_type": 2 });
    assert_eq!(service.ask(Method::POST, "/rewards/claim", other).await.0, 201);
    assert_eq!(service.ask(Method::POST, "/rewards/claim", json!({ "family_id": "one" })).await.0, 422);
    assert_eq!(service.ask(Method::GET, "/rewards/claim", Value::Null).await.0, 405);
    assert!(service.terminate().await.success(), "SIGTERM is a clean end");

    let service = start().await;
    assert_eq!(service.ask(Method::POST, "/rewards/claim", claim).await, (200, record.clone()));
    let (_, records) = service.ask(Method::GET, "/rewards?family_id=1", Value::Null).await;
    assert_eq!((records.as_array().map(Vec::len), &records[0]), (Some(2), &record));
    assert!(service.terminate().await.success());
    for ending in ["", "-wal", "-shm"] {
        drop(std::fs::remove_file(format!("{}{ending}", file.display())));
    }
}

#[tokio::test]
async fn the_shop_does_what_its_readme_says() {
    let service = Service::start(example("stock_sale").await).await;
    let count =
        async |id| service.ask(Method::GET, &format!("/goods/{id}"), Value::Null).await.1["good_counts"].clone();
    assert_eq!((count(1).await, count(2).await), (json!(5), json!(5)));
    assert_eq!(service.at_once(8, "/goods/1/sell", Value::Null).await, [vec![200; 5], vec![409; 3]].concat());
    assert_eq!((count(1).await, count(2).await), (json!(0), json!(5)));
    let (status, body) = service.ask(Method::POST, "/goods/1/sell", Value::Null).await;
    assert_eq!((status, body), (409, json!({ "error": "sold out" })), "the shop's own word");
    assert_eq!(service.ask(Method::POST, "/goods/9/sell", Value::Null).await.0, 404);
    assert_eq!(service.ask(Method::POST, "/goods/x/sell", Value::Null).await.0, 400);
    assert!(service.terminate().await.success());
}

#[tokio::test]
async fn what_is_set_wrongly_is_said() {
    for (variable, value, says) in
        [("PORT", "http", "PORT=http"), ("DATABASE_URL", "mysql://shop", "DATABASE_URL=mysql://shop")]
    {
        let mut command = example("reward_claim").await;
        command.env(variable, value);
        let output = run(command).await;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(says), "{text}");
    }
    let mut command = example("stock_sale").await;
    command.arg("--what");
    let output = run(command).await;
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("usage: [--demo | --serve]"));
}
