//! The address of the servers of a store, from a URL.

use deadpool_redis::redis::{ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};

use super::{
    endpoint::Endpoint,
    parameters::{Parameters, UrlSettings},
    url::{ServerUrl, UrlKind},
};
use crate::store::{
    redis::error::RedisConnectError,
    remote::{
        credentials::Login,
        stream::{self, Tls},
        tls::TlsSettings,
    },
};

/// What a URL names.
#[derive(Debug)]
pub(crate) struct Address {
    pub(crate) deployment: Deployment,
    pub(crate) settings: UrlSettings,
}

/// Where the servers of a URL are. All of them have its login and its TLS.
#[derive(Debug)]
pub(crate) enum Deployment {
    Server(Endpoint),
    /// The sentinels name host and port of the server. Here its host is the name of the master.
    Sentinel {
        master: String,
        sentinels: Vec<Endpoint>,
        server: Endpoint,
    },
    /// Some nodes of a Redis Cluster, which name the others.
    Cluster(Vec<Endpoint>),
    /// Independent servers.
    Redlock(Vec<Endpoint>),
}

/// That of a server is the default of the library.
const SENTINEL_PORT: u16 = 26_379;

impl Address {
    /// `tls` and `login`: the settings of the builder.
    pub(crate) fn parse(url: &str, tls: &TlsSettings, login: Option<&Login>) -> Result<Self, RedisConnectError> {
        let url = ServerUrl::split(url).map_err(invalid)?;
        let mut parameters = Parameters::parse(url.query, url.kind).map_err(invalid)?;
        let settings = parameters.settings().map_err(invalid)?;
        let tls = connector(url, &mut parameters, tls)?;
        let endpoint = |info, tls| Endpoint::new(info, tls).logged_in_by(login).map_err(invalid);
        let server = |host| endpoint(connection_info(url.login, host, url.database())?, tls.clone());
        let servers = || url.hosts().map(server).collect::<Result<_, RedisConnectError>>();
        let deployment = match url.kind {
            // It has one host.
            UrlKind::Server => Deployment::Server(server(url.hosts)?),
            UrlKind::Socket => Deployment::Server(endpoint(socket(url, &mut parameters)?, None)?),
            UrlKind::Cluster => Deployment::Cluster(servers()?),
            UrlKind::Redlock => Deployment::Redlock(servers()?),
            UrlKind::Sentinel => {
                let master = url.master();
                // The rule of Sentinel for its names.
                if !master.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) {
                    return Err(invalid("the name of its master is not of [A-Za-z0-9._-]"));
                }
                let (user, password) = (parameters.text("sentinel_username"), parameters.text("sentinel_password"));
                let sentinel =
                    |host| Ok(Endpoint::new(with_login(sentinel(host)?, user.clone(), password.clone()), tls.clone()));
                let sentinels = url.hosts().map(sentinel).collect::<Result<_, RedisConnectError>>()?;
                Deployment::Sentinel { master: master.to_owned(), sentinels, server: server(master)? }
            }
        };
        Ok(Self { deployment, settings })
    }
}

fn invalid(defect: impl Into<String>) -> RedisConnectError {
    RedisConnectError::InvalidUrl(defect.into().into())
}

/// The TLS of the servers, and of the sentinels. `None`: the URL requires none.
fn connector(
    url: ServerUrl<'_>,
    parameters: &mut Parameters,
    tls: &TlsSettings,
) -> Result<Option<Tls>, RedisConnectError> {
    let of_url = TlsSettings::from_url(|name| parameters.text(name));
    let settings = TlsSettings::of_connection(tls, of_url, url.tls, "`rediss` in place of `redis`");
    match settings.map_err(RedisConnectError::InvalidTls)? {
        None => Ok(None),
        Some(settings) => match stream::tls(&settings) {
            Some(tls) => tls.map(Some).map_err(RedisConnectError::InvalidTls),
            None => Err(RedisConnectError::TlsNotEnabled),
        },
    }
}

/// The library splits user, password, host and port. `login`: with its `@`, or empty.
fn connection_info(login: &str, host: &str, database: &str) -> Result<ConnectionInfo, RedisConnectError> {
    // The error of the library may have parts of the URL.
    let info = format!("redis://{login}{host}/{database}").into_connection_info();
    info.map_err(|_| invalid("a host is not a name or an address, or user and password are not UTF-8"))
}

fn socket(url: ServerUrl<'_>, parameters: &mut Parameters) -> Result<ConnectionInfo, RedisConnectError> {
    let info = format!("unix://{}", url.path).into_connection_info();
    let mut info = info.map_err(|_| invalid("it is not the path of a socket"))?;
    if let Some(database) = parameters.value::<u32>("db", "the number of a database").map_err(invalid)? {
        let settings = info.redis_settings().clone().set_db(database.into());
        info = info.set_redis_settings(settings);
    }
    Ok(with_login(info, parameters.text("user"), parameters.text("pass")))
}

fn sentinel(host: &str) -> Result<ConnectionInfo, RedisConnectError> {
    // An IPv6 address is in brackets.
    let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
    if has_port { connection_info("", host, "") } else { connection_info("", &format!("{host}:{SENTINEL_PORT}"), "") }
}

fn with_login(info: ConnectionInfo, user: Option<String>, password: Option<String>) -> ConnectionInfo {
    let settings = info.redis_settings().clone();
    let settings = user.into_iter().fold(settings, RedisConnectionInfo::set_username);
    let settings = password.into_iter().fold(settings, RedisConnectionInfo::set_password);
    info.set_redis_settings(settings)
}

#[cfg(all(test, not(feature = "redis-tls")))]
mod tests {
    use super::*;

    #[test]
    fn tls_url_without_the_feature_names_the_feature() {
        for url in ["rediss://a", "valkeys://a", "rediss+sentinel://a/m", "rediss+cluster://a", "rediss+redlock://a"] {
            let error = Address::parse(url, &TlsSettings::default(), None).expect_err("not built");
            assert!(error.to_string().ends_with("add the feature `redis-tls` of tower-lock"), "{url}: {error}");
        }
    }
}

#[cfg(test)]
mod deployment_tests {
    use std::time::Duration;

    use super::*;
    use crate::store::redis::topology::replicas::MinReplicas;

    fn parse(url: &str) -> Result<Address, String> {
        Address::parse(url, &TlsSettings::default(), None).map_err(|error| error.to_string())
    }

    /// One server.
    fn server(address: Address) -> Endpoint {
        let Deployment::Server(server) = address.deployment else { panic!("{address:?}") };
        server
    }

    #[test]
    fn url_of_one_server_has_login_database_and_settings() {
        let address = parse(" valkey://user:p%40+s@[::1]/3?prefix=shop&min_replicas=1 ").expect("an address");
        let min_replicas = Some(MinReplicas { count: 1, timeout: Duration::from_millis(100) });
        assert_eq!(address.settings, UrlSettings { prefix: Some("shop".to_owned()), min_replicas });
        let endpoint = server(address);
        assert_eq!(endpoint.seen(), ("::1:6379".to_owned(), Some("user"), Some("p@+s"), 3));
        assert_eq!((endpoint.to_string(), endpoint.user()), ("::1:6379".to_owned(), "user `user`".to_owned()));
        let address = parse("unix:///run/a%20b.sock?user=ann&pass=p@+s&db=2&prefix=shop").expect("an address");
        assert_eq!(address.settings.prefix.as_deref(), Some("shop"));
        assert_eq!(server(address).seen(), ("/run/a b.sock".to_owned(), Some("ann"), Some("p@+s"), 2));
        let error = parse("unix:///run/redis.sock?db=three").expect_err("no number");
        assert!(error.contains("`db` is not the number of a database"), "{error}");
    }

    #[test]
    fn sentinel_url_has_servers_and_sentinels_apart() {
        let url = "Redis+Sentinel://user:p%40ss@s1, [::1]:5000,[fe80::1]/my-master/3?sentinel_username=u&prefix=a&sentinel_password=q+";
        let Address { deployment, settings } = parse(url).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(settings.prefix.as_deref(), Some("a"));
        let Deployment::Sentinel { master, sentinels, server } = deployment else { panic!("{deployment:?}") };
        assert_eq!(server.seen(), ("my-master:6379".to_owned(), Some("user"), Some("p@ss"), 3));
        assert_eq!(server.at("a", 7).seen(), ("a:7".to_owned(), Some("user"), Some("p@ss"), 3));
        let of = |address: &str| (address.to_owned(), Some("u"), Some("q+"), 0);
        let sentinels: Vec<_> = sentinels.iter().map(Endpoint::seen).collect();
        assert_eq!((&*master, sentinels), ("my-master", vec![of("s1:26379"), of("::1:5000"), of("fe80::1:26379")]));
    }

    #[test]
    fn each_server_of_a_list_has_the_login_of_the_url() {
        let of = |address: &str, database| (address.to_owned(), Some("user"), Some("p@ss"), database);
        for (kind, database) in [("cluster", 0), ("redlock", 2)] {
            let url = format!("redis+{kind}://user:p%40ss@a, [::1]:7000,[fe80::1]/{database}?prefix=shop");
            let Address { deployment, settings } = parse(&url).expect("an address");
            assert_eq!(settings.prefix.as_deref(), Some("shop"));
            let (Deployment::Cluster(servers) | Deployment::Redlock(servers)) = deployment else { panic!("{url}") };
            let all = ["a:6379", "::1:7000", "fe80::1:6379"].map(|address| of(address, database));
            assert_eq!(servers.iter().map(Endpoint::seen).collect::<Vec<_>>(), all);
        }
    }

    #[cfg(feature = "redis-tls")]
    #[test]
    fn each_server_of_a_list_has_the_tls_of_the_url() {
        for url in ["rediss://a", "rediss+cluster://a,b", "valkeys+redlock://a,b,c", "rediss+sentinel://s1/m"] {
            let endpoints = match parse(url).expect(url).deployment {
                Deployment::Server(server) => vec![server],
                Deployment::Cluster(servers) | Deployment::Redlock(servers) => servers,
                Deployment::Sentinel { sentinels, server, .. } => [sentinels, vec![server]].concat(),
            };
            assert!(endpoints.iter().all(|one| one.has_tls() && one.at("b", 1).has_tls()), "{url}");
        }
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
            ("redis+redlock://:secret@a,b,c/secret", "not the number of a database"),
            ("redis+redlock://:secret@a,b,c?min_replicas=1", "a parameter is not one of `prefix`"),
            ("redis://:secret@a?sslrootcert=a.pem", "`sslrootcert` needs a URL with TLS: `rediss` in place of `redis`"),
        ] {
            let error = parse(url).expect_err(url);
            assert!(error.contains(defect) && !error.contains("secret"), "{url}: {error}");
        }
    }
}
