//! The servers of a store, from a URL. Pure.
//!
//! An error shows no part of the URL, because each part may be one of a password with a character
//! that was not escaped.

use std::time::Duration;

use super::error::ZooKeeperConnectError;
use crate::store::{remote::credentials::Credentials, scheme::decoded};

/// The settings of a URL.
#[derive(Debug)]
pub(super) struct Address {
    /// Host and port of each server.
    pub(super) servers: Vec<String>,
    /// The path of a node, without a slash at its end.
    pub(super) root: Option<String>,
    pub(super) user: Option<Credentials>,
    pub(super) session: Option<Duration>,
}

const DEFAULT_PORT: &str = "2181";

const NOT_ESCAPED: &str = "a host is empty, or its port is no number, or user or password has a character that is not \
    escaped: write `%40` for `@`, `%3A` for `:`, `%2F` for `/`, `%3F` for `?`";

impl Address {
    pub(super) fn parse(url: &str) -> Result<Self, ZooKeeperConnectError> {
        let (scheme, rest) = url.trim().split_once("://").unwrap_or_default();
        if !["zookeeper", "zk"].contains(&&*scheme.to_ascii_lowercase()) {
            return Err(invalid(
                "it does not begin with `zookeeper://` (`zookeeper://host:2181,host2:2181/tower-lock`)",
            ));
        }
        let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = before.split_once('/').unwrap_or((before, ""));
        // The rest of a password.
        if path.contains('@') {
            return Err(invalid("the path has an `@`, or a password has a plain `/`: write `%40`, and `%2F`"));
        }
        let (login, hosts) =
            authority.rsplit_once('@').map_or((None, authority), |(login, hosts)| (Some(login), hosts));
        let user = match login.map(|login| login.split_once(':')) {
            None => None,
            Some(Some((_, password))) if password.contains(['@', ':']) => return Err(invalid(NOT_ESCAPED)),
            Some(Some((user, password))) => Some(Credentials::new(decoded(user), decoded(password))),
            Some(None) => return Err(invalid("a user needs a password (`zookeeper://user:password@host`)")),
        };
        let is_host = |host: &str| !host.is_empty() && !host.contains(['@', '#', '%', ' ']);
        let servers: Vec<_> = hosts.split(',').map(with_port).collect();
        if !hosts.split(',').all(is_host) || servers.iter().any(Option::is_none) {
            return Err(invalid(NOT_ESCAPED));
        }
        let (mut session, root) = (None, Some(path.trim_end_matches('/')).filter(|path| !path.is_empty()));
        for (name, value) in form_urlencoded::parse(query.replace('+', "%2B").as_bytes()) {
            let seconds = value.strip_suffix('s').and_then(|seconds| seconds.parse().ok());
            session = match (&*name, seconds, session) {
                ("session", Some(seconds), None) => Some(Duration::from_secs(seconds)),
                ("session", ..) => return Err(invalid("its parameter `session` is not like `35s`, or is set twice")),
                _ => return Err(invalid("a parameter is unknown (known is `session`)")),
            };
        }
        let root = root.map(|path| format!("/{}", decoded(path)));
        Ok(Self { servers: servers.into_iter().flatten().collect(), root, user, session })
    }
}

/// A server with the port that it has by default. `None`: its port is no number.
fn with_port(host: &str) -> Option<String> {
    let has_port = host.rsplit_once(':').filter(|(_, port)| !port.contains(']'));
    match has_port {
        Some((_, port)) => port.parse::<u16>().is_ok().then(|| host.to_owned()),
        None => Some(format!("{host}:{DEFAULT_PORT}")),
    }
}

fn invalid(defect: &str) -> ZooKeeperConnectError {
    ZooKeeperConnectError::InvalidUrl(defect.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_has_servers_a_root_and_a_session() {
        let address = Address::parse("zookeeper://ann:p%40s+s@a:2182,b,[::1]/shop/locks/?session=40s").expect("valid");
        assert_eq!(address.servers, ["a:2182", "b:2181", "[::1]:2181"]);
        assert_eq!((address.root.as_deref(), address.session), (Some("/shop/locks"), Some(Duration::from_secs(40))));
        let user = address.user.expect("a user");
        assert_eq!((&*user.user, &*user.password), ("ann", "p@s+s"));
        let address = Address::parse("ZK://a").expect("valid");
        assert!(address.root.is_none() && address.user.is_none() && address.session.is_none());
    }

    #[test]
    fn defect_of_a_url_is_named_without_its_text() {
        for (url, defect) in [
            ("redis://ann:s3cret@host", "does not begin with `zookeeper://`"),
            ("zookeeper://s3cret@host", "a user needs a password"),
            ("zookeeper://ann:s3c@ret@host", "not escaped"),
            ("zookeeper://ann:12/s3cret@host", "the path has an `@`"),
            ("zookeeper://host:s3cret", "not escaped"),
            ("zookeeper://a,,b", "a host is empty"),
            ("zookeeper://host?s3cret=1", "a parameter is unknown"),
            ("zookeeper://host?session=s3cret", "`session` is not like"),
            ("zookeeper://host?session=35", "`session` is not like"),
            ("zookeeper://host?session=35s&session=36s", "set twice"),
        ] {
            let error = Address::parse(url).map(|_| ()).expect_err(url).to_string();
            assert!(error.contains(defect) && !error.contains("s3cret"), "{url}: {error}");
        }
    }
}
