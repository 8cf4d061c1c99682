//! The examples with several instances of the service, which share one Redis and one database.

use std::process::Output;

use axum::http::Method;
use futures_util::{
    StreamExt,
    future::{join, join_all},
    stream::FuturesUnordered,
};
use serde_json::{Value, json};
use sqlx::{AnyConnection, ConnectOptions, Connection, any::AnyConnectOptions};
use support::database::Dialect;
use tokio::time::sleep;
use tower_lock_testkit::{
    RedisServer, Reply, skipped,
    wait::{ms, soon, until},
};

use crate::{
    programs::payment_is_made_once,
    services::{Databases, File, Service, example},
};

/// An example, three times.
struct Instances {
    services: Vec<Service>,
}

impl Instances {
    /// Starts all at once, so that they also create the same tables concurrently.
    async fn start(name: &str, [locks, database]: &[String; 2]) -> Self {
        let start = async || {
            let mut command = example(name).await;
            command.env("LOCK_URL", locks).env("DATABASE_URL", database);
            Service::start(command).await
        };
        Self { services: join_all([start(), start(), start()]).await }
    }

    /// Distributes visitors over the instances.
    fn of(&self, visitor: usize) -> &Service {
        &self.services[visitor % self.services.len()]
    }

    /// The response, which is the same at all instances.
    async fn response_of_all(&self, path: &str) -> Value {
        let responses =
            join_all(self.services.iter().map(|service| service.request(Method::GET, path, Value::Null))).await;
        assert!(responses.iter().all(|response| *response == responses[0]), "{path}: {responses:?}");
        assert_eq!(responses[0].0, 200, "{path}");
        responses[0].1.clone()
    }

    async fn terminate(self) {
        for service in self.services {
            assert!(service.terminate().await.success(), "SIGTERM is a clean end");
        }
    }
}

/// The job of one instance, started by its timer.
async fn nightly_mail([locks, database]: &[String; 2], night: &str, mail_server: &str) -> Output {
    let mut command = example("nightly_mail").await;
    command.args(["--once", night]).env("MAIL_SERVER", mail_server);
    command.env("LOCK_URL", locks).env("DATABASE_URL", database);
    soon("the end of the job", command.output()).await.expect("it starts")
}

/// The outputs, sorted.
fn outputs<const N: usize>(runs: [Output; N]) -> [String; N] {
    let mut outputs = runs.map(|run| {
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        String::from_utf8(run.stdout).expect("text")
    });
    outputs.sort_unstable();
    outputs
}

/// The number of mails per customer.
async fn mails(database: &str, night: &str) -> Vec<(String, i64)> {
    let mut connection = AnyConnection::connect(database).await.expect("a database");
    let count = "SELECT customer, COUNT(*) FROM mail WHERE night = ? GROUP BY customer ORDER BY customer";
    let mails = sqlx::query_as(&connection.sql(count)).bind(night).fetch_all(&mut connection).await.expect("a table");
    connection.close().await.expect("a connection");
    mails
}

/// The `type` of a problem.
fn problem_type(code: &str) -> Value {
    format!("https://docs.rs/tower-lock/latest/tower_lock/problem/#{code}").into()
}

async fn redis(test: &str) -> Option<RedisServer> {
    if !RedisServer::is_available() {
        skipped(test, "redis-server");
        return None;
    }
    Some(RedisServer::start().await)
}

/// Servers of all instances.
struct Deployments {
    _redis: RedisServer,
    _databases: [Databases; 2],
    /// The URLs of the locks and of the database.
    urls: Vec<[String; 2]>,
}

impl Deployments {
    /// Locks in Redis with each database, and nothing but a MySQL.
    async fn new(test: &str) -> Option<Self> {
        let redis = redis(test).await?;
        let databases = [Databases::new(test).await, Databases::new(&format!("{test}-alone")).await];
        let mut urls: Vec<_> = databases[0].urls().into_iter().map(|url| [redis.url(), url]).collect();
        urls.extend(databases[1].mysql().map(|url| [format!("{url}?migrate=true"), url.to_owned()]));
        Some(Self { _redis: redis, _databases: databases, urls })
    }
}

/// Blocks writes to the database until it is dropped; reads go on.
struct WriteBlocker(AnyConnection);

impl WriteBlocker {
    async fn of(database: &str) -> Self {
        let options: AnyConnectOptions = database.parse().expect("a database");
        let mut connection = options.connect().await.expect("a database");
        let stop = match connection.backend_name() {
            "MySQL" => "LOCK TABLES lock_fence READ, family_reward_record READ",
            "PostgreSQL" => "BEGIN; LOCK TABLE lock_fence, family_reward_record IN EXCLUSIVE MODE",
            _ => "BEGIN IMMEDIATE",
        };
        sqlx::raw_sql(stop).execute(&mut connection).await.expect("writes blocked");
        Self(connection)
    }

    async fn end(self) {
        self.0.close().await.expect("a connection");
    }
}

#[tokio::test]
async fn claims_at_three_instances_are_each_paid_once() {
    const FAMILIES: usize = 6;
    const MEMBERS: usize = 5;
    let Some(deployments) = Deployments::new("instances-reward").await else { return };
    for urls in &deployments.urls {
        let url = &urls[1];
        let instances = Instances::start("reward_claim", urls).await;
        let body = |family: usize| json!({ "family_id": family, "reward_type": 1 });
        let claim = async |visitor: usize, family: usize| {
            let (status, record) = instances.of(visitor).request(Method::POST, "/rewards/claim", body(family)).await;
            (family, status, record)
        };

        // The one granted claim of each family stays until all others have a response.
        let blocker = WriteBlocker::of(url).await;
        let mut claims: FuturesUnordered<_> =
            (0..FAMILIES * MEMBERS).map(|n| claim(n / FAMILIES, n % FAMILIES)).collect();
        let mut refused = vec![0; FAMILIES];
        for _ in 0..FAMILIES * (MEMBERS - 1) {
            let (family, status, response) = soon("a refusal", claims.next()).await.expect("more claims");
            assert_eq!((status, &response["type"]), (409, &problem_type("locked")), "{url}: {response}");
            refused[family] += 1;
        }
        assert_eq!(refused, [MEMBERS - 1; FAMILIES], "{url}");
        blocker.end().await;
        let mut paid = vec![Value::Null; FAMILIES];
        while let Some((family, status, record)) = claims.next().await {
            assert_eq!((status, &record["family_id"]), (201, &json!(family)), "{url}: {record}");
            paid[family] = record;
        }
        drop(claims);

        for (family, record) in paid.iter().enumerate() {
            assert_eq!(
                instances.response_of_all(&format!("/rewards?family_id={family}")).await,
                json!([record]),
                "{url}"
            );
        }
        join_all(paid.iter().enumerate().map(async |(family, record)| {
            for visitor in 0..3 {
                assert_eq!(claim(visitor, family).await, (family, 200, record.clone()), "{url}: later");
            }
        }))
        .await;
        instances.terminate().await;
    }
}

#[tokio::test]
async fn buyers_at_three_instances_never_oversell() {
    const BUYERS: usize = 12;
    let Some(deployments) = Deployments::new("instances-stock").await else { return };
    for urls in &deployments.urls {
        let url = &urls[1];
        let instances = Instances::start("stock_sale", urls).await;
        assert_eq!(instances.response_of_all("/goods/1").await["good_counts"], 5, "{url}");
        let buy = |buyer: usize| instances.of(buyer).request(Method::POST, "/goods/1/sell", Value::Null);
        let mut sold = Vec::new();
        for (status, response) in join_all((0..BUYERS).map(buy)).await {
            match status {
                200 => sold.push(response["good_counts"].as_i64().expect("the remaining stock")),
                _ => assert_eq!((status, response), (409, json!({ "error": "sold out" })), "{url}"),
            }
        }
        sold.sort_unstable();
        assert_eq!(sold, [0, 1, 2, 3, 4], "{url}: each sale removes one item");
        assert_eq!(instances.response_of_all("/goods/1").await["good_counts"], 0, "{url}");
        assert_eq!(instances.response_of_all("/goods/2").await["good_counts"], 5, "{url}");
        instances.terminate().await;
    }
}

/// Each transfer is written in full, and none waits for another one in a circle.
#[tokio::test]
async fn transfers_at_three_instances_lose_no_money() {
    let Some(deployments) = Deployments::new("instances-transfer").await else { return };
    for urls in &deployments.urls {
        let url = &urls[1];
        let instances = Instances::start("transfer", urls).await;
        let (mut balances, mut transfers) = ([100; 5], Vec::new());
        // In a circle they run one after the other: few enough for a wait of the example.
        for from in 0..5 {
            // In both directions.
            for to in [(from + 1) % 5, (from + 4) % 5] {
                let amount = 1 + transfers.len() % 7;
                balances[from] -= amount;
                balances[to] += amount;
                transfers.push(json!({ "from": from + 1, "to": to + 1, "amount": amount }));
            }
        }
        let pay = |(n, transfer)| instances.of(n).request(Method::POST, "/transfers", transfer);
        for (status, response) in join_all(transfers.into_iter().enumerate().map(pay)).await {
            assert_eq!(status, 200, "{url}: {response}");
        }
        for (n, balance) in balances.into_iter().enumerate() {
            let path = format!("/accounts/{}", n + 1);
            assert_eq!(instances.response_of_all(&path).await["balance"], balance, "{url}: {path}");
        }
        instances.terminate().await;
    }
}

/// Guarantee: G18.
#[tokio::test]
async fn nightly_mail_of_three_machines_is_sent_once_per_customer() {
    let Some(deployments) = Deployments::new("instances-mail").await else { return };
    let one_each = ["ann", "bob", "eve"].map(|customer| (customer.to_owned(), 1));
    for (n, urls) in deployments.urls.iter().enumerate() {
        let url = &urls[1];
        // One Redis for all databases.
        let (quiet, rough) = (format!("quiet-{n}"), format!("rough-{n}"));
        let after = async |tenths: u32, night: &str| {
            sleep(tenths * ms(100)).await;
            nightly_mail(urls, night, "up").await
        };
        let runs = join_all([after(0, &quiet), after(1, &quiet), after(2, &quiet)]).await;
        let runs: [Output; 3] = runs.try_into().expect("three");
        assert_eq!(outputs(runs), ["left it to another\n", "left it to another\n", "sent 3 mails\n"], "{url}");
        assert_eq!(
            outputs([after(0, &quiet).await]),
            ["left it to another\n"],
            "{url}: the instances have ended, and the record remains"
        );
        assert_eq!(mails(url, &quiet).await, one_each, "{url}");

        let failed = nightly_mail(urls, &rough, "down").await;
        let error = String::from_utf8_lossy(&failed.stderr);
        assert!(!failed.status.success() && error.contains("the mail server does not reply"), "{url}: {error}");
        let runs = join_all([after(0, &rough), after(1, &rough)]).await;
        let runs: [Output; 2] = runs.try_into().expect("two");
        assert_eq!(outputs(runs), ["left it to another\n", "sent 3 mails\n"], "{url}: at once after a failure");
        assert_eq!(mails(url, &rough).await, one_each, "{url}");
    }
}

/// The retry waits for the lease of the process that has crashed, with any database.
/// Guarantee: G18.
#[tokio::test]
async fn payment_is_made_once_although_a_crash_left_its_lock() {
    let Some(redis) = redis("idempotent_payment with Redis").await else { return };
    payment_is_made_once("", Some(&redis.url())).await;
}

/// Guarantee: G20.
#[tokio::test]
async fn next_process_leads_after_the_leader_is_killed() {
    let Some(redis) = redis("three processes of leader").await else { return };
    let mut command = example("leader").await;
    command.arg("--demo").env("LOCK_URL", redis.url());
    let output = soon("the end of the demo", command.output()).await.expect("it starts");
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{table}");
    // The name, the fencing token, the number of writes.
    let rows = table.lines().map(|line| line.split_whitespace().take(3).collect::<Vec<_>>());
    let terms: Vec<_> = rows.filter(|row| ["ann", "bob", "eve"].contains(row.first().unwrap_or(&""))).collect();
    let [first, second] = &terms[..] else { panic!("{table}") };
    let token = |term: &[&str]| term[1].parse::<i64>().expect("a number");
    assert!(first[0] != second[0] && token(first) < token(second), "{table}");
    assert_eq!(second[2], "20", "{table}");
}

/// A deployment: the process ends by itself, waiters are rejected, and no key stays locked.
/// Guarantee: G2, G6.
#[tokio::test]
async fn terminated_instance_rejects_waiters_and_frees_its_keys() {
    let Some(redis) = redis("a terminated instance").await else { return };
    let file = File::new("instances-stop");
    let mut command = example("stock_sale").await;
    command.env("LOCK_URL", redis.url()).env("DATABASE_URL", file.url());
    let service = Service::start(command).await;

    // The one granted buyer stays.
    let blocker = WriteBlocker::of(&file.url()).await;
    let mut buyers: FuturesUnordered<_> =
        (0..4).map(|_| service.request(Method::POST, "/goods/1/sell", Value::Null)).collect();
    let is_held = async || redis.command(&["EXISTS", "lock:good:1"]).await == Reply::Integer(1);
    let stop = async {
        until("a sale", is_held).await;
        // The service has answered them after it has read the reply of Redis.
        for _ in 0..3 {
            assert_eq!(service.request(Method::GET, "/goods/1", Value::Null).await.0, 200);
        }
        service.signal("TERM").await;
    };
    let rejected = async {
        for _ in 0..3 {
            let (status, response) = soon("a rejection", buyers.next()).await.expect("four buyers");
            assert_eq!((status, &response["type"]), (503, &problem_type("shutting-down")), "{response}");
        }
    };
    join(rejected, stop).await;
    blocker.end().await;
    let (status, response) = soon("the sale", buyers.next()).await.expect("four buyers");
    assert_eq!((status, &response["good_counts"]), (200, &json!(4)), "{response}");
    drop(buyers);
    assert!(service.exit().await.success());
    assert_eq!(redis.command(&["KEYS", "*good*"]).await, Reply::Array(Vec::new()), "no lock, no queue");
}
