//! The address of the servers of a store, from a URL.

use deadpool_redis::redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};

use super::{
    parameters::{Parameters, UrlSettings},
    url::{ServerUrl, UrlKind},
};
use crate::store::redis::{error::RedisConnectError, wire::escape_control};

/// An address, its text without user and password, and the settings of its URL.
pub(crate) struct Address {
    /// User, password, database and TLS of the servers. Host and port are those of the server, or
    /// of the first node. Behind sentinels the host is the name of the master.
    pub(crate) info: ConnectionInfo,
    pub(crate) display: String,
    pub(crate) user: String,
    pub(crate) deployment: Deployment,
    pub(crate) settings: UrlSettings,
}

/// Where the servers of an address are.
#[derive(Clone, Debug)]
pub(crate) enum Deployment {
    /// One server, at the address.
    Server,
    /// One server. The sentinels name its host and its port.
    Sentinel(SentinelAddresses),
    /// Some nodes of a Redis Cluster, which name the others. Each has the login and the TLS of the
    /// address.
    Cluster(Vec<ConnectionInfo>),
}

/// The addresses of the sentinels of one master.
#[derive(Clone, Debug)]
pub(crate) struct SentinelAddresses {
    pub(crate) master: String,
    pub(crate) nodes: Vec<ConnectionInfo>,
}

/// That of a server is the default of the library.
const SENTINEL_PORT: u16 = 26_379;

impl Address {
    pub(crate) fn parse(url: &str) -> Result<Self, RedisConnectError> {
        Self::of(split(url)?)
    }

    pub(crate) fn from_info(info: ConnectionInfo) -> Result<Self, RedisConnectError> {
        if matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            #[cfg(not(feature = "redis-tls"))]
            return Err(RedisConnectError::TlsNotEnabled);
            // The provider that the process has installed: rustls panics without one, and if the
            // features of two crates enable different ones.
            #[cfg(feature = "redis-tls")]
            if rustls::crypto::CryptoProvider::get_default().is_none() {
                let _ = rustls::crypto::ring::default_provider().install_default();
            }
        }
        let (display, user) = (text_of(&info), user_text(info.redis_settings().username()));
        let (deployment, settings) = (Deployment::Server, UrlSettings::default());
        Ok(Self { info: with_settings(info), display, user, deployment, settings })
    }

    fn of(url: ServerUrl<'_>) -> Result<Self, RedisConnectError> {
        let mut parameters = Parameters::parse(url.query, url.kind).map_err(invalid)?;
        let settings = parameters.settings().map_err(invalid)?;
        let mut hosts = url.hosts();
        let first = hosts.next().unwrap_or_default();
        let address = match url.kind {
            UrlKind::Server => Self::from_info(server(url, first)?)?,
            UrlKind::Socket => Self::from_info(socket(url, &mut parameters)?)?,
            UrlKind::Sentinel => {
                let nodes = sentinels(url, &mut parameters)?;
                Self::from_info(server(url, url.master())?)?.behind(url.master(), nodes)?
            }
            UrlKind::Cluster => Self::from_info(server(url, first)?)?.in_cluster(url, hosts)?,
            UrlKind::Redlock => {
                return Err(invalid(
                    "independent servers are a `RedlockStore`; `LockManager::connect` connects to them",
                ));
            }
        };
        Ok(Self { settings, ..address })
    }

    /// The address of this master, whose host and port these sentinels name.
    fn behind(self, master: &str, nodes: Vec<ConnectionInfo>) -> Result<Self, RedisConnectError> {
        // The rule of Sentinel for its names.
        if !master.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) {
            return Err(invalid("the name of its master is not of [A-Za-z0-9._-]"));
        }
        let sentinels = SentinelAddresses { master: master.to_owned(), nodes };
        Ok(Self { deployment: Deployment::Sentinel(sentinels), ..self })
    }

    /// The address of a Cluster, of which the server of this address and these hosts are nodes.
    fn in_cluster<'a>(
        self,
        url: ServerUrl<'_>,
        further: impl Iterator<Item = &'a str>,
    ) -> Result<Self, RedisConnectError> {
        let mut nodes = vec![self.info.clone()];
        for host in further {
            nodes.push(Self::from_info(server(url, host)?)?.info);
        }
        let display = nodes.iter().map(text_of).collect::<Vec<_>>().join(", ");
        Ok(Self { display, deployment: Deployment::Cluster(nodes), ..self })
    }
}

/// The independent servers of a `redis+redlock://` URL. The settings are the same in each address.
pub(crate) fn redlock_servers(url: &str) -> Result<Vec<Address>, RedisConnectError> {
    let url = split(url)?;
    if url.kind != UrlKind::Redlock {
        return Err(invalid("its scheme is not `redis+redlock` or `rediss+redlock`"));
    }
    let settings = Parameters::parse(url.query, url.kind).and_then(|mut all| all.settings()).map_err(invalid)?;
    let address = |host| Ok(Address { settings: settings.clone(), ..Address::from_info(server(url, host)?)? });
    url.hosts().map(address).collect()
}

fn split(url: &str) -> Result<ServerUrl<'_>, RedisConnectError> {
    ServerUrl::split(url).map_err(invalid)
}

fn invalid(defect: impl Into<String>) -> RedisConnectError {
    RedisConnectError::InvalidUrl(defect.into().into())
}

/// A server with the login, the database and the TLS of its URL.
fn server(url: ServerUrl<'_>, host: &str) -> Result<ConnectionInfo, RedisConnectError> {
    connection_info(url.tls, url.login, host, url.database())
}

fn socket(url: ServerUrl<'_>, parameters: &mut Parameters) -> Result<ConnectionInfo, RedisConnectError> {
    let info = format!("unix://{}", url.path).into_connection_info();
    let info = info.map_err(|_| invalid("it is not the path of a socket"))?;
    let mut settings = info.redis_settings().clone();
    if let Some(database) = parameters.value::<u32>("db", "the number of a database").map_err(invalid)? {
        settings = settings.set_db(database.into());
    }
    let (user, password) = (parameters.text("user"), parameters.text("pass"));
    Ok(info.set_redis_settings(with_login(settings, user, password)))
}

fn sentinels(url: ServerUrl<'_>, parameters: &mut Parameters) -> Result<Vec<ConnectionInfo>, RedisConnectError> {
    let (user, password) = (parameters.text("sentinel_username"), parameters.text("sentinel_password"));
    let node = |host| {
        let info = sentinel_node(url.tls, host)?;
        let settings = with_login(info.redis_settings().clone(), user.clone(), password.clone());
        Ok(info.set_redis_settings(settings))
    };
    url.hosts().map(node).collect()
}

fn sentinel_node(tls: bool, host: &str) -> Result<ConnectionInfo, RedisConnectError> {
    // An IPv6 address is in brackets.
    let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
    let host = if has_port { host.to_owned() } else { format!("{host}:{SENTINEL_PORT}") };
    Ok(Address::from_info(connection_info(tls, "", &host, "")?)?.info)
}

/// `login`: with its `@`, or empty.
fn connection_info(tls: bool, login: &str, host: &str, database: &str) -> Result<ConnectionInfo, RedisConnectError> {
    if tls && !cfg!(feature = "redis-tls") {
        return Err(RedisConnectError::TlsNotEnabled);
    }
    let scheme = if tls { "rediss" } else { "redis" };
    // The error of the library may have parts of the URL.
    let info = format!("{scheme}://{login}{host}/{database}").into_connection_info();
    info.map_err(|_| invalid("a host is not a name or an address, or user and password are not UTF-8"))
}

fn with_login(settings: RedisConnectionInfo, user: Option<String>, password: Option<String>) -> RedisConnectionInfo {
    let settings = match user {
        Some(user) => settings.set_username(user),
        None => settings,
    };
    match password {
        Some(password) => settings.set_password(password),
        None => settings,
    }
}

/// Host and port, or the path of a socket.
fn text_of(info: &ConnectionInfo) -> String {
    escape_control(&info.addr().to_string())
}

/// A user in an error message.
fn user_text(name: Option<&str>) -> String {
    format!("user `{}`", escape_control(name.unwrap_or("default")))
}

/// Disables Nagle's algorithm: a call does not wait for the reply to the previous one. Also
/// disables `CLIENT SETINFO`, which needs a permission that cannot be given before Redis 7.2.
fn with_settings(address: ConnectionInfo) -> ConnectionInfo {
    let (tcp, redis) = (address.tcp_settings().clone(), address.redis_settings().clone());
    address.set_tcp_settings(tcp.set_nodelay(true)).set_redis_settings(redis.set_skip_set_lib_name())
}

#[cfg(all(test, not(feature = "redis-tls")))]
mod tests {
    use super::*;

    #[test]
    fn tls_url_without_the_feature_names_the_feature() {
        for url in ["rediss://a", "valkeys://a", "rediss+sentinel://a/m", "rediss+cluster://a"] {
            let error = Address::parse(url).map(|address| address.display).expect_err("not built");
            assert!(error.to_string().ends_with("add the feature `redis-tls` of tower-lock"), "{url}: {error}");
        }
        let error = redlock_servers("rediss+redlock://a,b,c").map(|servers| servers.len()).expect_err("not built");
        assert!(matches!(error, RedisConnectError::TlsNotEnabled), "{error}");
    }
}

#[cfg(test)]
mod deployment_tests {
    use std::time::Duration;

    use super::*;
    use crate::store::redis::topology::replicas::MinReplicas;

    fn parse(url: &str) -> Result<Address, String> {
        Address::parse(url).map_err(|error| error.to_string())
    }

    /// Address, user, password and database.
    fn seen(info: &ConnectionInfo) -> (String, Option<&str>, Option<&str>, i64) {
        let settings = info.redis_settings();
        (info.addr().to_string(), settings.username(), settings.password(), settings.db())
    }

    fn cluster(address: &Address) -> &[ConnectionInfo] {
        let Deployment::Cluster(nodes) = &address.deployment else { panic!("{:?}", address.deployment) };
        nodes
    }

    #[test]
    fn url_of_one_server_has_login_database_and_settings() {
        let address = parse(" valkey://user:p%40+s@[::1]/3?prefix=shop&min_replicas=1 ").expect("an address");
        assert_eq!(seen(&address.info), ("::1:6379".to_owned(), Some("user"), Some("p@+s"), 3));
        assert_eq!((&*address.display, &*address.user), ("::1:6379", "user `user`"));
        let min_replicas = Some(MinReplicas { count: 1, timeout: Duration::from_millis(100) });
        assert_eq!(address.settings, UrlSettings { prefix: Some("shop".to_owned()), min_replicas });
        let address = parse("unix:///run/a%20b.sock?user=ann&pass=p@+s&db=2&prefix=shop").expect("an address");
        assert_eq!(seen(&address.info), ("/run/a b.sock".to_owned(), Some("ann"), Some("p@+s"), 2));
        assert_eq!(address.settings.prefix.as_deref(), Some("shop"));
        let error = parse("unix:///run/redis.sock?db=three").map(|address| address.display).expect_err("no number");
        assert!(error.contains("`db` is not the number of a database"), "{error}");
    }

    #[test]
    fn sentinel_url_has_servers_and_sentinels_apart() {
        let url = "Redis+Sentinel://user:p%40ss@s1, [::1]:5000,[fe80::1]/my-master/3?sentinel_username=u&prefix=a&sentinel_password=q+";
        let Address { info, deployment, settings, .. } = parse(url).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(seen(&info), ("my-master:6379".to_owned(), Some("user"), Some("p@ss"), 3));
        assert_eq!(settings.prefix.as_deref(), Some("a"));
        let Deployment::Sentinel(SentinelAddresses { master, nodes }) = deployment else { panic!("{deployment:?}") };
        let of = |address: &str| (address.to_owned(), Some("u"), Some("q+"), 0);
        let nodes: Vec<_> = nodes.iter().map(seen).collect();
        assert_eq!((&*master, nodes), ("my-master", vec![of("s1:26379"), of("::1:5000"), of("fe80::1:26379")]));
    }

    #[test]
    fn each_node_of_a_cluster_has_the_login_of_the_url() {
        let of = |address: &str| (address.to_owned(), Some("user"), Some("p@ss"), 0);
        let all = [of("a:6379"), of("::1:7000"), of("fe80::1:6379")];
        let address = parse("redis+cluster://user:p%40ss@a, [::1]:7000,[fe80::1]/0?prefix=shop").expect("an address");
        assert_eq!(cluster(&address).iter().map(seen).collect::<Vec<_>>(), all);
        assert_eq!((&*address.display, &*address.user), ("a:6379, ::1:7000, fe80::1:6379", "user `user`"));
        assert_eq!(address.settings.prefix.as_deref(), Some("shop"));
    }

    #[cfg(feature = "redis-tls")]
    #[test]
    fn each_server_of_a_list_has_the_tls_of_the_url() {
        let has_tls = |info: &ConnectionInfo| matches!(info.addr(), ConnectionAddr::TcpTls { insecure: false, .. });
        let address = parse("rediss+cluster://a,b").expect("an address");
        assert_eq!(cluster(&address).iter().map(has_tls).collect::<Vec<_>>(), [true, true]);
        let servers = redlock_servers("valkeys+redlock://a,b,c").expect("servers");
        assert!(servers.iter().all(|server| has_tls(&server.info)));
        let Address { info, deployment, .. } = parse("rediss+sentinel://s1/m").expect("an address");
        let Deployment::Sentinel(SentinelAddresses { nodes, .. }) = deployment else { panic!("{deployment:?}") };
        assert!(has_tls(&info) && has_tls(&nodes[0]));
    }

    #[test]
    fn redlock_url_has_one_login_and_each_server() {
        let servers = redlock_servers("redis+redlock://user:p%40ss@a,[::1]:7000,c/2?prefix=shop").expect("servers");
        let of = |address: &str| (address.to_owned(), Some("user"), Some("p@ss"), 2);
        let all = [of("a:6379"), of("::1:7000"), of("c:6379")];
        assert_eq!(servers.iter().map(|server| seen(&server.info)).collect::<Vec<_>>(), all);
        assert!(servers.iter().all(|server| server.settings.prefix.as_deref() == Some("shop")));
        for (hosts, defect) in [
            ("a,b,c/s3cret", "not the number of a database"),
            ("a,b,c?min_replicas=1", "a parameter is not one of `prefix`"),
        ] {
            let url = format!("redis+redlock://:s3cret@{hosts}");
            let error = redlock_servers(&url).map(|servers| servers.len()).expect_err(&url).to_string();
            assert!(error.contains(defect) && !error.contains("s3cret"), "{url}: {error}");
        }
        assert!(redlock_servers("redis+cluster://a,b,c").is_err());
        let error = parse("redis+redlock://:s3cret@a,b,c").map(|address| address.display).expect_err("another store");
        assert!(error.contains("`LockManager::connect` connects to them") && !error.contains("s3cret"), "{error}");
    }

    #[test]
    fn defects_of_addresses_are_named_without_passwords() {
        for (url, defect) in [
            ("redis+sentinel://:secret@s1/my%20master", "not of [A-Za-z0-9._-]"),
            ("redis+sentinel://:secret@s1/mymaster?passwort=secret", "a parameter is not"),
            ("redis://:secret@host?protocol=resp3", "one of `prefix`, `min_replicas`, `min_replicas_timeout_ms`"),
            ("redis+cluster://:secret@a?sentinel_password=secret", "a parameter is not one of `prefix`"),
            ("redis+cluster://:secret@a/1", "only the database 0"),
            ("redis+cluster://:secret@a,0.0.0.0", "a host is not a name or an address"),
            ("redis+cluster://:secret@a,b c", "a host is not a name or an address"),
            ("redis://:secret%FF@a", "not UTF-8"),
        ] {
            let error = parse(url).map(|address| address.display).expect_err(url);
            assert!(error.contains(defect) && !error.contains("secret"), "{url}: {error}");
        }
    }
}
