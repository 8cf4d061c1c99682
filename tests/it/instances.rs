//! The two cases once more, with several instances of the service: what they share is one Redis and one database.

use axum::http::Method;
use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use serde_json::{Value, json};
use sqlx::{AnyConnection, ConnectOptions, Connection, any::AnyConnectOptions};
use tower_lock_faults::{RedisServer, skipped};

use crate::support::{
    examples::{Databases, Service, example},
    soon,
};

/// An example, three times.
struct Instances {
    services: Vec<Service>,
}

impl Instances {
    /// All at once, so that they also make the same tables at the same moment.
    async fn start(name: &str, redis: &RedisServer, database: &str) -> Self {
        let start = async || {
            let mut command = example(name).await;
            command.env("REDIS_URL", redis.url()).env("DATABASE_URL", database);
            Service::start(command).await
        };
        Self { services: join_all([start(), start(), start()]).await }
    }

    /// Whoever comes is sent to the next one.
    fn of(&self, visitor: usize) -> &Service {
        &self.services[visitor % self.services.len()]
    }

    /// One that looks everywhere sees the same.
    async fn all_say(&self, path: &str) -> Value {
        let answers = join_all(self.services.iter().map(|service| service.ask(Method::GET, path, Value::Null))).await;
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{path}: {answers:?}");
        assert_eq!(answers[0].0, 200, "{path}");
        answers[0].1.clone()
    }

    async fn terminate(self) {
        for service in self.services {
            assert!(service.terminate().await.success(), "SIGTERM is a clean end");
        }
    }
}

async fn redis(test: &str) -> Option<RedisServer> {
    if !RedisServer::is_available() {
        skipped(test, "redis-server");
        return None;
    }
    Some(RedisServer::start().await)
}

/// While it lives, this database is read and not written to: who would write, waits.
struct Standstill(AnyConnection);

impl Standstill {
    async fn of(database: &str) -> Self {
        sqlx::any::install_default_drivers();
        let options: AnyConnectOptions = database.parse().expect("a database");
        let mut connection = options.connect().await.expect("a database");
        let stop = match connection.backend_name() {
            "MySQL" => "LOCK TABLES lock_fence READ, family_reward_record READ",
            _ => "BEGIN IMMEDIATE",
        };
        sqlx::raw_sql(stop).execute(&mut connection).await.expect("nobody writes");
        Self(connection)
    }

    async fn end(self) {
        self.0.close().await.expect("it is there");
    }
}

#[tokio::test]
async fn thirty_families_claim_at_three_instances_and_each_is_paid_once() {
    const FAMILIES: usize = 30;
    const MEMBERS: usize = 10;
    let Some(redis) = redis("three instances of reward_claim").await else { return };
    let databases = Databases::start("instances-reward").await;
    for url in databases.urls() {
        let instances = Instances::start("reward_claim", &redis, &url).await;
        let body = |family: usize| json!({ "family_id": family, "reward_type": 1 });
        let claim = async |visitor: usize, family: usize| {
            let (status, record) = instances.of(visitor).ask(Method::POST, "/rewards/claim", body(family)).await;
            (family, status, record)
        };

        // The one claim of each family that is let in stays in until all others are answered.
        let standstill = Standstill::of(&url).await;
        let mut claims: FuturesUnordered<_> =
            (0..FAMILIES * MEMBERS).map(|n| claim(n / FAMILIES, n % FAMILIES)).collect();
        let mut refused = vec![0; FAMILIES];
        for _ in 0..FAMILIES * (MEMBERS - 1) {
            let (family, status, answer) = soon("a refusal", claims.next()).await.expect("more claims");
            assert_eq!((status, &answer["type"]), (409, &json!("urn:tower-lock:held")), "{url}: {answer}");
            refused[family] += 1;
        }
        assert_eq!(refused, [MEMBERS - 1; FAMILIES], "{url}");
        standstill.end().await;
        let mut paid = vec![Value::Null; FAMILIES];
        while let Some((family, status, record)) = claims.next().await {
            assert_eq!((status, &record["family_id"]), (201, &json!(family)), "{url}: {record}");
            paid[family] = record;
        }
        drop(claims);

        for (family, record) in paid.iter().enumerate() {
            assert_eq!(instances.all_say(&format!("/rewards?family_id={family}")).await, json!([record]), "{url}");
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
async fn buyers_at_three_instances_are_sold_what_there_is_and_the_rest_are_told() {
    const BUYERS: usize = 12;
    let Some(redis) = redis("three instances of stock_sale").await else { return };
    let databases = Databases::start("instances-stock").await;
    for url in databases.urls() {
        let instances = Instances::start("stock_sale", &redis, &url).await;
        assert_eq!(instances.all_say("/goods/1").await["good_counts"], 5, "{url}");
        let buy = |buyer: usize| instances.of(buyer).ask(Method::POST, "/goods/1/sell", Value::Null);
        let mut sold = Vec::new();
        for (status, answer) in join_all((0..BUYERS).map(buy)).await {
            match status {
                200 => sold.push(answer["good_counts"].as_i64().expect("what is left")),
                _ => assert_eq!((status, answer), (409, json!({ "error": "sold out" })), "{url}"),
            }
        }
        sold.sort_unstable();
        assert_eq!(sold, [0, 1, 2, 3, 4], "{url}: each left one less");
        assert_eq!(instances.all_say("/goods/1").await["good_counts"], 0, "{url}");
        assert_eq!(instances.all_say("/goods/2").await["good_counts"], 5, "{url}");
        instances.terminate().await;
    }
}
