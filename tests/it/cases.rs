//! The two cases, as programs of their own over real HTTP and a database.

use std::process::Output;

use axum::http::Method;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::support::{
    examples::{File, Service, example},
    soon,
};

async fn run(mut command: Command) -> Output {
    soon("the end of the program", command.output()).await.expect("it starts")
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
    let file = File::new("reward");
    let start = || async {
        let mut command = example("reward_claim").await;
        command.env("DATABASE_URL", file.url());
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
    for (variable, value, says) in [
        ("PORT", "http", "PORT=http"),
        ("DATABASE_URL", "postgres://user:secret@shop", "DATABASE_URL=postgres:"),
        ("REDIS_URL", "http://user:secret@shop", "REDIS_URL: "),
        // Nobody listens there.
        ("DATABASE_URL", "mysql://user:secret@127.0.0.1:1/shop", "refused"),
        ("REDIS_URL", "redis://user:secret@127.0.0.1:1", "refused"),
    ] {
        let mut command = example("reward_claim").await;
        command.env(variable, value);
        let output = run(command).await;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(says) && !text.contains("secret"), "{text}");
    }
    let mut command = example("stock_sale").await;
    command.arg("--what");
    let output = run(command).await;
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("usage: [--demo | --serve]"));
}
