//! The examples as processes: HTTP services with a database, a job, and a gRPC service.

use std::process::Output;

use axum::http::Method;
use futures_util::future::join_all;
use serde_json::{Value, json};
use sqlx::{AnyConnection, Connection};
use support::database::Dialect;
use tokio::process::Command;
use tower_lock_testkit::wait::soon;

use crate::services::{Databases, File, Service, example};

async fn run(mut command: Command) -> Output {
    soon("the end of the program", command.output()).await.expect("it starts")
}

/// The picture of a demo, which `scripts/demo_picture.py` draws, has the rows of its table.
fn assert_drawn(picture: &str, table: &str) {
    let texts = |class: &str| -> Vec<_> {
        let class = format!("class=\"{class}\"");
        let parts = picture.split(class.as_str()).skip(1);
        parts.filter_map(|part| part.split_once('>')?.1.split('<').next()).collect()
    };
    let (title, rows) = table.split_once("\n  ─").expect("a rule");
    let rows = rows.lines().skip(1).take_while(|row| !row.is_empty());
    let names: Vec<_> = rows.filter_map(|row| row.trim_start().split("   ").next()).collect();
    assert_eq!(texts("name"), names, "run scripts/demo_picture.py");
    assert!(texts("title").iter().all(|text| title.contains(text)), "run scripts/demo_picture.py: {title}");
}

#[tokio::test]
async fn concurrent_claims_give_one_record_only_with_the_layer() {
    let mut command = example("reward_claim").await;
    command.arg("--demo");
    let output = run(command).await;
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{table}");
    let row =
        |how: &str| table.lines().find(|line| line.trim_start().starts_with(how)).unwrap_or_else(|| panic!("{table}"));
    assert!(row("under the layer").contains(" 1 × 201 claimed, 4 × 409 rejected at once "), "{table}");
    assert!(row("with one Idempotency-Key").contains(" 1 × 201 claimed, 4 × 201 replayed "), "{table}");
    for wrong in ["without a lock", "lock acquired after the check"] {
        assert!(row(wrong).contains(" 5 × 201 claimed "), "{table}");
    }
    assert!(table.contains("A sixth claim, later, gets the existing record: 200 {"), "{table}");
    assert_drawn(include_str!("../../docs/demo.svg"), &table);
}

#[tokio::test]
async fn concurrent_buyers_oversell_only_without_the_layer() {
    let mut command = example("stock_sale").await;
    command.arg("--demo");
    let output = run(command).await;
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{table}");
    assert!(table.contains("under the layer   0                 5 × 200 sold, 5 × 409 sold out"), "{table}");
    assert!(table.contains("without a lock    -5"), "{table}");
}

#[tokio::test]
async fn circle_of_transfers_is_complete_only_with_all_keys() {
    let mut command = example("transfer").await;
    command.arg("--demo");
    let output = run(command).await;
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{table}");
    let row = |how: &str| {
        let line = table.lines().find_map(|line| line.trim_start().strip_prefix(how));
        let cells = line.unwrap_or_else(|| panic!("{table}")).trim_start().split("   ").map(str::trim);
        cells.filter(|cell| !cell.is_empty()).take(2).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(row("under the layer"), ["500", "5 × 200 done"], "{table}");
    let [money, responses] = &row("without a lock")[..] else { panic!("{table}") };
    assert!(money != "500" && responses == "5 × 200 done", "{table}");
    let [money, responses] = &row("one lock after the other")[..] else { panic!("{table}") };
    assert!(money == "500" && responses.ends_with(" × 409 timed out"), "{table}");
    assert_drawn(include_str!("../../docs/transfer.svg"), &table);
}

/// Guarantee: G22.
#[tokio::test]
async fn completions_stay_within_each_limit() {
    let mut command = example("gateway").await;
    command.arg("--demo");
    let output = run(command).await;
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{table}");
    assert!(table.contains("6 at once      6 × 200 served, 6 × 429 no permit"), "{table}");
    assert!(table.contains("After an upgrade of the first tenant from 2 to 4 (204 No Content), 4 of"), "{table}");
    assert_drawn(include_str!("../../docs/gateway.svg"), &table);
}

/// Guarantee: G25.
#[tokio::test]
async fn newest_message_of_a_session_is_answered() {
    let mut command = example("agent").await;
    command.arg("--demo");
    let output = run(command).await;
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{table}");
    assert_drawn(include_str!("../../docs/agent.svg"), &table);
}

/// Guarantee: G23.
#[tokio::test]
async fn readers_of_a_document_see_no_half_of_a_write() {
    for url in Databases::new("document").await.urls() {
        let mut command = example("document").await;
        command.arg("--demo").env("DATABASE_URL", url);
        let output = run(command).await;
        let table = String::from_utf8(output.stdout).expect("text");
        assert!(output.status.success(), "{table}");
        assert!(table.contains("readers together   0            9 × 200"), "{table}");
    }
}

/// Guarantee: G24.
#[tokio::test]
async fn document_has_one_editor_at_a_time() {
    let output = run(example("edit_lock").await).await;
    let steps = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success() && steps.contains("Cid opens it, too"), "{steps}");
}

#[tokio::test]
async fn nightly_mail_is_sent_once_only_with_a_record() {
    let output = run(example("nightly_mail").await).await;
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{table}");
    // The mails per customer, and the outcome of the job on each instance.
    let row = |how: &str| {
        let line =
            table.lines().find_map(|line| line.trim_start().strip_prefix(how)).unwrap_or_else(|| panic!("{table}"));
        let (mails, instances) = line.trim_start().split_once(' ').expect("three columns");
        (mails, instances.trim_start().split(", ").collect::<Vec<_>>())
    };
    assert_eq!(row("without a lock "), ("3", vec!["sent 3"; 3]), "{table}");
    let (mails, instances) = row("try_lock  ");
    // The second mail is sent if the jobs overlap; the third one never is.
    assert!(["2", "3"].contains(&mails), "{table}");
    assert!(instances.iter().filter(|instance| **instance == "sent 3").count() > 1, "{table}");
    assert_eq!(row("once "), ("1", vec!["sent 3", "left it to another", "left it to another"]));
    let (mails, mut instances) = row("once; the first one fails ");
    assert_eq!((mails, instances.remove(0)), ("1", "failed"), "{table}");
    instances.sort_unstable();
    assert_eq!(instances, ["left it to another", "sent 3"], "{table}");
}

/// Guarantee: G18.
#[tokio::test]
async fn payment_is_made_once_although_its_process_crashes() {
    for url in Databases::new("payment").await.urls() {
        payment_is_made_once(&url, None).await;
    }
    // In a file of its own.
    payment_is_made_once("", None).await;
}

/// The locks, the records and the payments are in one database, and nothing else is needed.
///
/// Guarantee: G18.
#[tokio::test]
async fn payment_is_made_once_with_nothing_but_a_database() {
    let databases = Databases::new("payment-alone").await;
    for url in [databases.postgres(), databases.mysql()].into_iter().flatten() {
        payment_is_made_once(url, Some(&format!("{url}?migrate=true"))).await;
    }
}

/// The process crashes after its commit, and before its record.
pub(crate) async fn payment_is_made_once(database: &str, redis: Option<&str>) {
    let mut command = example("idempotent_payment").await;
    if !database.is_empty() {
        command.env("DATABASE_URL", database);
    }
    command.envs(redis.map(|url| ("LOCK_URL", url)));
    let output = run(command).await;
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{database}: {table}{}", String::from_utf8_lossy(&output.stderr));
    let row = |how: &str| {
        let line = table.lines().find_map(|line| line.trim_start().strip_prefix(how));
        line.unwrap_or_else(|| panic!("{table}")).split_whitespace().collect::<Vec<_>>()
    };
    assert_eq!(row("a record alone "), ["2", "none", "201"], "{database}");
    assert_eq!(row("the answer in the transaction "), ["1", "none", "201", "replayed"], "{database}");
}

#[tokio::test]
async fn grpc_client_gets_grpc_status_codes() {
    let output = run(example("grpc_status").await).await;
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{table}");
    for (what, status, pushback) in [
        ("the first of two", 0, "none"),
        ("the second, rejected at once", 10, "a time"),
        ("wait timed out", 10, "a time"),
        ("without a number", 3, "none"),
        ("longer than max_hold", 2, "never"),
        ("revoked by an operator", 2, "never"),
        ("instance is shutting down", 14, "a time"),
    ] {
        let row = table.lines().find_map(|line| line.trim_start().strip_prefix(what)).expect(what);
        let mut cells = row.split_whitespace();
        assert_eq!(cells.next(), Some("200"), "{table}");
        assert_eq!(cells.next(), Some(status.to_string().as_str()), "{table}");
        let said = match cells.next().expect("a column") {
            "-" => "none",
            "-1" => "never",
            ms => ms.parse::<u64>().map_or("nothing that is known", |_| "a time"),
        };
        assert_eq!(said, pushback, "{table}");
        // A message for each but a success.
        assert_eq!(cells.next() == Some("-"), status == 0, "{table}");
    }
}

/// They check their own responses.
#[tokio::test]
async fn small_examples_succeed() {
    for name in ["per_route", "plain_tower"] {
        let output = run(example(name).await).await;
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[cfg(feature = "console")]
#[tokio::test]
async fn operator_finds_the_holder_of_a_lock_and_revokes_it() {
    let output = run(example("console").await).await;
    let steps = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{steps}");
    assert!(steps.contains("ann revokes") && steps.contains("200 OK, \"revoked\""), "{steps}");
}

#[cfg(feature = "sessions")]
#[tokio::test]
async fn session_keeps_every_item_only_with_a_lock() {
    let output = run(example("per_session").await).await;
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{table}");
    assert!(table.contains("one at a time per session     7 items"), "{table}");
    assert!(!table.contains("without a lock                7 items"), "{table}");
}

/// Step by step: created, rejected, found again; and the file survives a clean restart.
#[tokio::test]
async fn reward_example_does_what_its_page_describes() {
    let file = File::new("reward");
    let start = || async {
        let mut command = example("reward_claim").await;
        command.env("DATABASE_URL", file.url());
        Service::start(command).await
    };
    let service = start().await;
    let claim = json!({ "family_id": 1, "reward_type": 1 });
    assert_eq!(service.at_once(10, "/rewards/claim", claim.clone()).await, [vec![201], vec![409; 9]].concat());
    let (status, record) = service.request(Method::POST, "/rewards/claim", claim.clone()).await;
    assert_eq!((status, &record["family_id"], &record["reward_type"]), (200, &json!(1), &json!(1)));
    let other = json!({ "family_id": 1, "reward_type": 2 });
    assert_eq!(service.request(Method::POST, "/rewards/claim", other).await.0, 201);
    assert_eq!(service.request(Method::POST, "/rewards/claim", json!({ "family_id": "one" })).await.0, 422);
    assert_eq!(service.request(Method::GET, "/rewards/claim", Value::Null).await.0, 405);
    assert!(service.terminate().await.success(), "SIGTERM is a clean end");

    let service = start().await;
    assert_eq!(service.request(Method::POST, "/rewards/claim", claim).await, (200, record.clone()));
    let (_, records) = service.request(Method::GET, "/rewards?family_id=1", Value::Null).await;
    assert_eq!((records.as_array().map(Vec::len), &records[0]), (Some(2), &record));
    assert!(service.terminate().await.success());
}

#[tokio::test]
async fn shop_example_does_what_its_page_describes() {
    let service = Service::start(example("stock_sale").await).await;
    let count =
        async |id| service.request(Method::GET, &format!("/goods/{id}"), Value::Null).await.1["good_counts"].clone();
    assert_eq!((count(1).await, count(2).await), (json!(5), json!(5)));
    assert_eq!(service.at_once(8, "/goods/1/sell", Value::Null).await, [vec![200; 5], vec![409; 3]].concat());
    assert_eq!((count(1).await, count(2).await), (json!(0), json!(5)));
    let (status, body) = service.request(Method::POST, "/goods/1/sell", Value::Null).await;
    assert_eq!((status, body), (409, json!({ "error": "sold out" })), "the response of the shop");
    assert_eq!(service.request(Method::POST, "/goods/9/sell", Value::Null).await.0, 404);
    assert_eq!(service.request(Method::POST, "/goods/x/sell", Value::Null).await.0, 400);
    assert!(service.terminate().await.success());
}

#[tokio::test]
async fn transfer_example_does_what_its_page_describes() {
    let service = Service::start(example("transfer").await).await;
    let pay = async |from: i64, to: i64, amount: i64| {
        let transfer = json!({ "from": from, "to": to, "amount": amount });
        service.request(Method::POST, "/transfers", transfer).await
    };
    assert_eq!(pay(1, 2, 30).await, (200, json!({ "from": 70, "to": 130 })));
    // The order in which the locks are acquired is not that of the transfer.
    let both = join_all([pay(2, 1, 10), pay(1, 2, 10)]).await;
    assert!(both.iter().all(|(status, _)| *status == 200), "{both:?}");
    for (from, to, amount, status, error) in [
        (1, 2, 71, 409, "the balance is too small"),
        (1, 1, 10, 422, "the accounts must be different"),
        (1, 2, 0, 422, "the amount must be positive"),
        (1, 2, -10, 422, "the amount must be positive"),
        (1, 9, 10, 404, "there is no such account"),
    ] {
        let (actual, body) = pay(from, to, amount).await;
        let text = body["error"].as_str().unwrap_or_default();
        assert!(actual == status && text.contains(error), "{from} to {to}, {amount}: {actual} {body}");
    }
    assert_eq!(service.request(Method::POST, "/transfers", json!({ "from": 1 })).await.0, 422);
    for (id, balance) in [(1, 70), (2, 130), (3, 100)] {
        let account = service.request(Method::GET, &format!("/accounts/{id}"), Value::Null).await;
        assert_eq!(account, (200, json!({ "id": id, "balance": balance })));
    }
    assert!(service.terminate().await.success());
}

/// A holder with a later token of either account has written.
#[tokio::test]
async fn transfer_checks_the_fence_of_both_accounts() {
    for url in Databases::new("transfer").await.urls() {
        let mut command = example("transfer").await;
        command.env("DATABASE_URL", &url);
        let service = Service::start(command).await;
        for (late, from, to) in [(1, 1, 2), (4, 3, 4)] {
            let mut database = AnyConnection::connect(&url).await.expect(&url);
            let insert = database.sql("INSERT INTO lock_fence (lock_key, token) VALUES (?, ?)");
            let fence = sqlx::query(&insert).bind(format!("account:{late}")).bind(i64::MAX);
            fence.execute(&mut database).await.expect("a table");
            database.close().await.expect("a connection");
            let transfer = json!({ "from": from, "to": to, "amount": 10 });
            let (status, body) = service.request(Method::POST, "/transfers", transfer).await;
            assert_eq!(status, 503, "{url}: {body}");
            for id in [from, to] {
                let account = service.request(Method::GET, &format!("/accounts/{id}"), Value::Null).await;
                assert_eq!(account, (200, json!({ "id": id, "balance": 100 })), "{url}");
            }
        }
        assert!(service.terminate().await.success());
    }
}

#[tokio::test]
async fn invalid_settings_are_reported() {
    let redis = |says| if cfg!(feature = "redis") { says } else { "add `--features redis`" };
    let postgres = |says| if cfg!(feature = "postgres") { says } else { "add `--features postgres`" };
    let mysql = |says| if cfg!(feature = "mysql") { says } else { "add `--features mysql`" };
    for (variable, value, says) in [
        ("PORT", "http", "PORT=http"),
        ("DATABASE_URL", "oracle://user:secret@shop", "DATABASE_URL=oracle:"),
        ("DATABASE_URL", "postgres://user:secret@127.0.0.1:1/shop", postgres("refused")),
        ("LOCK_URL", "postgres://user:secret@127.0.0.1:1/shop", postgres("LOCK_URL: could not connect to PostgreSQL")),
        (
            "LOCK_URL",
            "http://user:secret@shop",
            "LOCK_URL: invalid URL of a lock store: its scheme is none of `memory`",
        ),
        ("LOCK_URL", "redis://user:secret@shop?protocol=resp3", redis("LOCK_URL: invalid Redis URL: a parameter")),
        ("LOCK_URL", "mysql://user:secret@127.0.0.1:1/shop", mysql("LOCK_URL: could not connect to MySQL")),
        // No server listens there.
        ("DATABASE_URL", "mysql://user:secret@127.0.0.1:1/shop", mysql("refused")),
        ("REDIS_URL", "redis://user:secret@127.0.0.1:1", redis("refused")),
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
    let mut command = example("nightly_mail").await;
    command.arg("--once");
    let output = run(command).await;
    assert!(
        !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("usage: [--demo | --once NIGHT]")
    );
}
