//! The store that a URL names: one setting moves a service from one machine to a fleet.

use std::{fmt, sync::Arc};

#[cfg(feature = "memory")]
use super::memory::MemoryStore;
#[cfg(feature = "mysql")]
use super::mysql::{MysqlConnectError, MysqlStore};
#[cfg(feature = "postgres")]
use super::postgres::{PostgresConnectError, PostgresStore};
#[cfg(feature = "redis")]
use super::redis::{RedisConnectError, RedisStore, RedlockStore};
#[cfg(feature = "zookeeper")]
use super::zookeeper::{ZooKeeperConnectError, ZooKeeperStore};
use super::{LockStore, error::error_chain, scheme::split_scheme};

/// Error of [`LockManager::connect`](crate::LockManager::connect).
///
/// `Debug` prints the message and all causes on one line, so that `main` can return this error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The URL names no store. The reason contains no part of it that may be secret.
    #[error("invalid URL of a lock store: {0}")]
    InvalidUrl(String),
    /// The crate was built without the feature of this scheme.
    #[error("tower-lock was built without `{scheme}:`: add the feature `{feature}` of tower-lock")]
    MissingFeature {
        /// The scheme of the URL.
        scheme: &'static str,
        /// The feature to add.
        feature: &'static str,
    },
    /// The URL names a MySQL or MariaDB, and is invalid, or connecting failed.
    #[cfg(feature = "mysql")]
    #[cfg_attr(docsrs, doc(cfg(feature = "mysql")))]
    #[error(transparent)]
    Mysql(#[from] MysqlConnectError),
    /// The URL names a PostgreSQL, and is invalid, or connecting failed.
    #[cfg(feature = "postgres")]
    #[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
    #[error(transparent)]
    Postgres(#[from] PostgresConnectError),
    /// The URL names a Redis, and is invalid, or connecting failed.
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    #[error(transparent)]
    Redis(#[from] RedisConnectError),
    /// The URL names a ZooKeeper, and is invalid, or connecting failed.
    #[cfg(feature = "zookeeper")]
    #[cfg_attr(docsrs, doc(cfg(feature = "zookeeper")))]
    #[error(transparent)]
    ZooKeeper(#[from] ZooKeeperConnectError),
}

/// The store of a URL.
pub(crate) struct NamedStore {
    pub(crate) store: Arc<dyn LockStore>,
    /// No other process shares it.
    pub(crate) is_in_memory: bool,
}

/// Each feature, whether it is enabled, and its schemes.
const FEATURES: [(&str, bool, &[&str]); 7] = [
    ("memory", cfg!(feature = "memory"), &["memory"]),
    ("mysql", cfg!(feature = "mysql"), &["mysql"]),
    ("postgres", cfg!(feature = "postgres"), &["postgres"]),
    ("redis", cfg!(feature = "redis"), &["redis", "redis+sentinel", "redis+cluster", "redis+redlock", "unix"]),
    ("redis-tls", cfg!(feature = "redis-tls"), &["rediss", "rediss+sentinel", "rediss+cluster", "rediss+redlock"]),
    ("zookeeper", cfg!(feature = "zookeeper"), &["zookeeper"]),
    ("zookeeper-tls", cfg!(feature = "zookeeper-tls"), &["zookeepers"]),
];

/// Connects to the store that this URL names.
pub(crate) async fn connect(url: &str) -> Result<NamedStore, ConnectError> {
    let (scheme, rest) = split(url).map_err(ConnectError::InvalidUrl)?;
    let (scheme, feature) = known(&scheme).ok_or_else(|| ConnectError::InvalidUrl(unknown_scheme()))?;
    if scheme == "memory" && !rest.is_empty() {
        return Err(ConnectError::InvalidUrl("`memory:` has neither a host nor parameters".to_owned()));
    }
    match feature {
        #[cfg(feature = "memory")]
        "memory" => Ok(NamedStore { store: Arc::new(MemoryStore::new()), is_in_memory: true }),
        #[cfg(feature = "mysql")]
        "mysql" => Ok(NamedStore { store: Arc::new(MysqlStore::connect(url).await?), is_in_memory: false }),
        #[cfg(feature = "postgres")]
        "postgres" => Ok(NamedStore { store: Arc::new(PostgresStore::connect(url).await?), is_in_memory: false }),
        #[cfg(feature = "redis")]
        "redis" => connect_redis(scheme, url).await,
        #[cfg(feature = "redis-tls")]
        "redis-tls" => connect_redis(scheme, url).await,
        #[cfg(feature = "zookeeper")]
        "zookeeper" => connect_zookeeper(url).await,
        #[cfg(feature = "zookeeper-tls")]
        "zookeeper-tls" => connect_zookeeper(url).await,
        _ => Err(ConnectError::MissingFeature { scheme, feature }),
    }
}

#[cfg(feature = "redis")]
async fn connect_redis(scheme: &str, url: &str) -> Result<NamedStore, ConnectError> {
    let store: Arc<dyn LockStore> = if scheme.ends_with("+redlock") {
        Arc::new(RedlockStore::connect([url]).await?)
    } else {
        Arc::new(RedisStore::connect(url).await?)
    };
    Ok(NamedStore { store, is_in_memory: false })
}

#[cfg(feature = "zookeeper")]
async fn connect_zookeeper(url: &str) -> Result<NamedStore, ConnectError> {
    Ok(NamedStore { store: Arc::new(ZooKeeperStore::connect(url).await?), is_in_memory: false })
}

/// The scheme in lower case, and the rest after it. `memory:` needs no `//`.
pub(crate) fn split(url: &str) -> Result<(String, &str), String> {
    let is_memory = |(scheme, rest): &(&str, &str)| scheme.eq_ignore_ascii_case("memory") && !rest.starts_with("//");
    match url.trim().split_once(':').filter(is_memory) {
        Some((_, rest)) => Ok(("memory".to_owned(), rest)),
        None => split_scheme(url),
    }
}

/// The name of this scheme, and its feature.
fn known(scheme: &str) -> Option<(&'static str, &'static str)> {
    let valkey = scheme.strip_prefix("valkey").map(|rest| format!("redis{rest}"));
    let name = match valkey.as_deref().unwrap_or(scheme) {
        "redis+unix" => "unix",
        "mariadb" => "mysql",
        "postgresql" => "postgres",
        "zk" => "zookeeper",
        "zks" => "zookeepers",
        name => name,
    };
    FEATURES.iter().find_map(|(feature, _, names)| Some((*names.iter().find(|known| **known == name)?, *feature)))
}

/// A scheme that does not exist may be a part of a password, and is not shown.
fn unknown_scheme() -> String {
    let group = |(feature, is_enabled, names): &(&str, bool, &[&str])| {
        let names = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        if *is_enabled { names } else { format!("with the feature `{feature}` of tower-lock {names}") }
    };
    format!("its scheme is none of {}", FEATURES.iter().map(group).collect::<Vec<_>>().join(", "))
}

impl fmt::Debug for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&error_chain(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(url: &str) -> String {
        let error = tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(connect(url));
        format!("{:?}", error.map(|_| ()).expect_err(url))
    }

    #[test]
    fn defects_of_a_url_are_named_without_its_text() {
        for (url, defect) in [
            ("", "it is empty"),
            ("s3cret", "it has no scheme"),
            ("ann:s3cret", "it has no scheme"),
            ("ann:s3cret@localhost:6379", "did you mean `redis://localhost:6379`?"),
            ("s3cret://host", "its scheme is none of `memory`"),
            ("sqlite://ann:s3cret@host", "`redis`, `redis+sentinel`, `redis+cluster`, `redis+redlock`, `unix`"),
            ("http+redlock://ann:s3cret@host", "its scheme is none of"),
            ("memory://s3cret", "neither a host nor parameters"),
            ("memory:s3cret", "neither a host nor parameters"),
            ("memory:?prefix=s3cret", "neither a host nor parameters"),
        ] {
            let text = error(url);
            assert!(text.starts_with("invalid URL of a lock store: ") && text.contains(defect), "{url}: {text}");
            assert!(!text.contains("s3cret"), "{url}: {text}");
        }
    }

    /// Also `valkey`, upper case and spaces around the URL.
    #[test]
    fn scheme_without_its_feature_names_the_feature() {
        for (url, scheme, feature, is_enabled) in [
            (" memory: ", "memory", "memory", cfg!(feature = "memory")),
            ("mariadb://:s3cret@host", "mysql", "mysql", cfg!(feature = "mysql")),
            ("postgresql://:s3cret@host", "postgres", "postgres", cfg!(feature = "postgres")),
            ("Redis://:s3cret@host", "redis", "redis", cfg!(feature = "redis")),
            ("valkey+sentinel://:s3cret@host", "redis+sentinel", "redis", cfg!(feature = "redis")),
            ("redis+unix:///s3cret", "unix", "redis", cfg!(feature = "redis")),
            ("rediss://:s3cret@host", "rediss", "redis-tls", cfg!(feature = "redis-tls")),
            ("valkeys+cluster://:s3cret@host", "rediss+cluster", "redis-tls", cfg!(feature = "redis-tls")),
            ("rediss+redlock://:s3cret@host", "rediss+redlock", "redis-tls", cfg!(feature = "redis-tls")),
            ("zk://:s3cret@host", "zookeeper", "zookeeper", cfg!(feature = "zookeeper")),
            ("zks://:s3cret@host", "zookeepers", "zookeeper-tls", cfg!(feature = "zookeeper-tls")),
        ] {
            let says = format!("without `{scheme}:`: add the feature `{feature}` of tower-lock");
            let listed = format!("with the feature `{feature}` of tower-lock `");
            assert_eq!(error("none://host").contains(&listed), !is_enabled, "{feature}");
            if !is_enabled {
                let text = error(url);
                assert!(text.contains(&says) && !text.contains("s3cret"), "{url}: {text}");
            }
        }
    }
}
