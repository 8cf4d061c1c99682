//! The address of a server, from a URL.

use deadpool_redis::redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

use crate::store::redis::{error::RedisConnectError, wire::escape_control};

/// An address, and its text without user and password.
pub(crate) struct Address {
    pub(crate) info: ConnectionInfo,
    pub(crate) display: String,
    pub(crate) user: String,
    /// The sentinels that name the host and the port.
    pub(crate) sentinels: Option<SentinelAddresses>,
    pub(crate) cluster: Option<Vec<ConnectionInfo>>,
}

/// The addresses of the sentinels of one master.
#[derive(Clone, Debug)]
pub(crate) struct SentinelAddresses {
    pub(crate) master: String,
    pub(crate) nodes: Vec<ConnectionInfo>,
}

const EXAMPLE: &str = "example: `redis://user:password@host:6379/0`";
const HOST_EXAMPLE: &str = "example: `redis://host:6379`";
const UNENCODED: &str =
    "`@`, `#`, `/`, `?` and `%` in a user or a password must be encoded: `%40`, `%23`, `%2F`, `%3F` and `%25`";
const SENTINEL_EXAMPLE: &str = "example: `redis+sentinel://user:password@host1:26379,host2:26379,host3:26379/mymaster`";
/// The port of a sentinel.
const SENTINEL_PORT: u16 = 26_379;

impl Address {
    /// `origin`: prefix of error messages.
    pub(crate) fn parse(url: &str, origin: &str) -> Result<Self, RedisConnectError> {
        if let Some((scheme, rest)) = url.trim().split_once("://")
            && let Some(scheme) = scheme.to_ascii_lowercase().strip_suffix("+sentinel")
        {
            return Self::parse_sentinel(scheme, rest, origin);
        }
        if let Some(rest) = url.strip_prefix("redis+cluster://") {
            let (login, hosts) = rest.rsplit_once('@').map_or((String::new(), rest), |(l, h)| (format!("{l}@"), h));
            let nodes: Vec<_> = hosts
                .split(',')
                .map(|h| Self::parse(&format!("redis://{login}{h}"), origin))
                .collect::<Result<_, _>>()?;
            let infos = nodes.iter().map(|n| n.info.clone()).collect();
            return Ok(Self { cluster: Some(infos), ..nodes.into_iter().next().expect("one") });
        }
        let wants_tls = url.starts_with("rediss:") || url.starts_with("valkeys:");
        if wants_tls && !cfg!(feature = "redis-tls") {
            return Err(RedisConnectError::TlsNotEnabled);
        }
        let invalid = |hint: &str| RedisConnectError::InvalidUrl(format!("{origin}{hint}").into());
        if let Some(defect) = url_defect(url) {
            return Err(invalid(&defect));
        }
        let info = url.into_connection_info().map_err(|_| invalid(EXAMPLE))?;
        Self::from_info(info, origin)
    }

    pub(crate) fn from_info(info: ConnectionInfo, origin: &str) -> Result<Self, RedisConnectError> {
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
        let display = format!("{origin}{}", escape_control(&info.addr().to_string()));
        let user = user_text(info.redis_settings().username());
        Ok(Self { info: with_settings(info), display, user, sentinels: None, cluster: None })
    }

    /// `rest`: `user:password@host:port,host:port/master/database?sentinel_password=..`. User,
    /// password, database and TLS are those of the servers.
    fn parse_sentinel(scheme: &str, rest: &str, origin: &str) -> Result<Self, RedisConnectError> {
        let invalid =
            |defect: &str| RedisConnectError::InvalidUrl(format!("{origin}{defect} ({SENTINEL_EXAMPLE})").into());
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        // The rest of a password would be a part of the path.
        if path.contains('@') || path.is_empty() && query.contains('@') {
            return Err(invalid(UNENCODED));
        }
        if path.is_empty() || path.starts_with('/') {
            return Err(invalid("it has no name of a master"));
        }
        let (login, hosts) = match authority.rsplit_once('@') {
            // Else the first host of `host1,user:password@host2` would be a part of the user.
            Some((login, _)) if login.contains(',') => {
                return Err(invalid("user and password are before the first host, and a `,` in them must be `%2C`"));
            }
            Some((login, hosts)) => (format!("{login}@"), hosts),
            None => (String::new(), authority),
        };
        let (master, database) = path.split_once('/').unwrap_or((path, ""));
        let (mut username, mut password, mut tls) = (None, None, ["rediss", "valkeys"].contains(&scheme));
        // A `+` is no space, as in the password of the servers.
        let query = query.replace('+', "%2B");
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match (&*name, &*value) {
                ("sentinel_username", _) => username = Some(value),
                ("sentinel_password", _) => password = Some(value),
                ("sentinel_tls", "true") => tls = true,
                ("sentinel_tls", "false") => tls = false,
                _ => {
                    return Err(invalid(
                        "a parameter is not `sentinel_username`, `sentinel_password` or `sentinel_tls`",
                    ));
                }
            }
        }
        let node = |host: &str| {
            let scheme = if tls { "rediss" } else { "redis" };
            let info = Self::parse_sentinel_node(&format!("{scheme}://{host}"), origin)?;
            let mut settings = info.redis_settings().clone();
            if let Some(username) = &username {
                settings = settings.set_username(username);
            }
            if let Some(password) = &password {
                settings = settings.set_password(password);
            }
            Ok(info.set_redis_settings(settings))
        };
        let nodes = hosts.split(',').map(str::trim).map(node).collect::<Result<_, RedisConnectError>>()?;
        Self::parse(&format!("{scheme}://{login}{master}/{database}"), origin)?.behind(master, nodes, origin)
    }

    /// `url`: `redis://host:port` or `rediss://..` of a sentinel, or `host:port`.
    pub(crate) fn parse_sentinel_node(url: &str, origin: &str) -> Result<ConnectionInfo, RedisConnectError> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("redis", url));
        if scheme.to_ascii_lowercase().ends_with("+sentinel") {
            return Err(RedisConnectError::InvalidUrl(
                format!("{origin}the address of one sentinel has others").into(),
            ));
        }
        let url = format!("{scheme}://{}", rest.trim_end_matches('/'));
        let has_port = url.rsplit(['@', '/', ']']).next().is_some_and(|end| end.contains(':'));
        let url = if has_port { url } else { format!("{url}:{SENTINEL_PORT}") };
        let Self { info, .. } = Self::parse(&url, origin)?;
        match info.addr() {
            ConnectionAddr::Tcp(..) | ConnectionAddr::TcpTls { .. } => Ok(info),
            _ => Err(RedisConnectError::InvalidUrl(format!("{origin}a sentinel has a host and a port").into())),
        }
    }

    /// The address of this master, whose host and port these sentinels name.
    pub(crate) fn behind(
        self,
        master: &str,
        nodes: Vec<ConnectionInfo>,
        origin: &str,
    ) -> Result<Self, RedisConnectError> {
        let invalid = |defect: &str| RedisConnectError::InvalidUrl(format!("{origin}{defect}").into());
        if self.sentinels.is_some() {
            return Err(invalid("the sentinels are named twice"));
        }
        let (ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. }) = self.info.addr() else {
            return Err(invalid("a socket has no sentinels"));
        };
        // The rule of Sentinel for its names.
        let is_name = !master.is_empty() && master.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
        if !is_name || !host.eq_ignore_ascii_case(master) {
            return Err(invalid("its host is not the name of the master, of [A-Za-z0-9._-]"));
        }
        if nodes.is_empty() {
            return Err(invalid("it has no sentinel"));
        }
        Ok(Self { sentinels: Some(SentinelAddresses { master: master.to_owned(), nodes }), ..self })
    }
}

/// A user in an error message.
fn user_text(name: Option<&str>) -> String {
    format!("user `{}`", escape_control(name.unwrap_or("default")))
}

/// The mistake in a URL, without any part that may be secret.
fn url_defect(url: &str) -> Option<String> {
    if url.trim().is_empty() {
        return Some(format!("it is empty ({HOST_EXAMPLE})"));
    }
    let Some((scheme, rest)) = url.trim().split_once("://") else {
        // The part after the last `@` contains no password. Without an `@` only a host and a port
        // are shown.
        let host = url.rsplit('@').next().unwrap_or_default().trim_start_matches("redis:").trim_start_matches('/');
        return Some(if is_host_and_port(host) {
            format!("it has no scheme; did you mean `redis://{host}`?")
        } else {
            format!("it has no scheme ({EXAMPLE})")
        });
    };
    match &*scheme.to_ascii_lowercase() {
        "redis" | "rediss" | "valkey" | "valkeys" => {}
        "unix" | "redis+unix" | "valkey+unix" => return None,
        _ => return Some(format!("its scheme is not `redis`, `rediss`, `redis+sentinel` or `unix` ({HOST_EXAMPLE})")),
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    // The parsed host would be a part of the password.
    if rest[end..].contains('@') {
        return Some(UNENCODED.to_owned());
    }
    let (authority, path) = rest.split_at(end);
    let host = authority.rsplit('@').next().unwrap_or_default();
    if host.is_empty() || host.starts_with(':') {
        return Some(format!("it has no host, or no `@` after its password ({EXAMPLE})"));
    }
    if host.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']') && port.parse::<u16>().is_err()) {
        return Some(format!(
            "its port is not a number from 1 to 65535, or it has no `@` after its password ({EXAMPLE})"
        ));
    }
    let database = path.split(['?', '#']).next().unwrap_or_default().trim_matches('/');
    if !database.is_empty() && database.parse::<i64>().is_err() {
        return Some(format!("its path is not the number of a database ({EXAMPLE})"));
    }
    None
}

/// Whether this is a host, with or without a port and a database. `user:password` is not.
fn is_host_and_port(text: &str) -> bool {
    let (host, rest) = text.split_once(':').unwrap_or((text, ""));
    let is_host = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !host.is_empty() && host.chars().all(is_host) && rest.chars().all(|c| c.is_ascii_digit() || c == '/')
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
        for url in ["rediss://localhost", "valkeys://localhost"] {
            let error = Address::parse(url, "").map(|address| address.display).expect_err("not built");
            assert!(error.to_string().ends_with("turn on its feature `redis-tls`"), "{error}");
        }
    }
}

#[cfg(test)]
mod sentinel_tests {
    use super::*;

    fn parse(url: &str) -> Result<Address, String> {
        Address::parse(url, "").map_err(|error| error.to_string())
    }

    #[test]
    fn sentinel_url_has_servers_and_sentinels_apart() {
        let url = "Redis+Sentinel://user:p%40ss@s1, [::1]:5000/my-master/3?sentinel_username=u&sentinel_password=q+";
        let Address { info, sentinels, .. } = parse(url).unwrap_or_else(|error| panic!("{error}"));
        let settings = info.redis_settings();
        assert_eq!((settings.username(), settings.password(), settings.db()), (Some("user"), Some("p@ss"), 3));
        let SentinelAddresses { master, nodes } = sentinels.expect("sentinels");
        let addresses: Vec<_> = nodes.iter().map(|node| node.addr().to_string()).collect();
        assert_eq!((&*master, addresses), ("my-master", vec!["s1:26379".to_owned(), "::1:5000".to_owned()]));
        for node in nodes {
            let settings = node.redis_settings();
            assert_eq!((settings.username(), settings.password(), settings.db()), (Some("u"), Some("q+"), 0));
        }
    }

    #[test]
    fn defects_of_sentinel_urls_are_named_without_passwords() {
        for (url, defect) in [
            ("redis+sentinel://:secret@s1", "no name of a master"),
            ("redis+sentinel://:secret@s1/", "no name of a master"),
            ("redis+sentinel://:secret@s1//0", "no name of a master"),
            ("redis+sentinel://:se/cret@s1/mymaster", "must be encoded"),
            ("redis+sentinel://:se?cret@s1/mymaster", "must be encoded"),
            ("redis+sentinel://:secret@s1/my%20master", "not the name of the master"),
            ("redis+sentinel://s1,user:secret@s2/mymaster", "before the first host"),
            ("redis+sentinel://:secret@s1,/mymaster", "no host"),
            ("redis+sentinel://:secret@s1/mymaster?passwort=secret", "a parameter is not"),
            ("redis+sentinel://:secret@s1/mymaster?sentinel_tls=yes", "a parameter is not"),
            ("http+sentinel://:secret@s1/mymaster", "its scheme is not"),
        ] {
            let error = parse(url).map(|address| address.display).expect_err(url);
            assert!(error.contains(defect) && !error.contains("secret"), "{url}: {error}");
        }
        let node = Address::parse_sentinel_node("redis://s1:5000/", "").expect("an address");
        assert_eq!(node.addr().to_string(), "s1:5000");
        assert!(Address::parse_sentinel_node("unix:///tmp/redis", "").is_err());
        let nested = Address::parse_sentinel_node("Redis+Sentinel://s1/mymaster", "").expect_err("not one sentinel");
        assert!(nested.to_string().contains("has others"), "{nested}");
    }
}
