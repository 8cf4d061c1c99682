//! The servers of a store, from a URL. Pure.
//!
//! An error shows no part of the URL, because each part may be one of a password with a character
//! that was not escaped.

use std::{future::ready, time::Duration};

use super::error::ZooKeeperConnectError;
use crate::store::{
    remote::{
        credentials::{Credentials, Login, TWO_LOGINS},
        tls::TlsSettings,
    },
    scheme::{decoded, parameters},
};

/// The settings of a URL.
#[derive(Debug)]
pub(super) struct Address {
    /// Host and port of each server.
    pub(super) servers: Vec<(String, u16)>,
    /// The path of a node, without a slash at its end.
    pub(super) root: Option<String>,
    pub(super) login: Option<Login>,
    /// `None`: the URL requires no TLS.
    pub(super) tls: Option<TlsSettings>,
    pub(super) session: Option<Duration>,
}

const DEFAULT_PORT: u16 = 2181;

const NOT_ESCAPED: &str = "a host is empty, or its port is no number, or user or password has a character that is not \
    escaped: write `%40` for `@`, `%3A` for `:`, `%2F` for `/`, `%3F` for `?`";

impl Address {
    /// `tls` and `login`: the settings of the builder.
    pub(super) fn parse(url: &str, tls: &TlsSettings, login: Option<&Login>) -> Result<Self, ZooKeeperConnectError> {
        let (scheme, rest) = url.trim().split_once("://").unwrap_or_default();
        let requires_tls = match &*scheme.to_ascii_lowercase() {
            "zookeeper" | "zk" => false,
            "zookeepers" | "zks" => true,
            _ => {
                return Err(invalid(
                    "it does not begin with `zookeeper://` (`zookeeper://host:2181,host2:2181/tower-lock`)",
                ));
            }
        };
        let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = before.split_once('/').unwrap_or((before, ""));
        // The rest of a password.
        if path.contains('@') {
            return Err(invalid("the path has an `@`, or a password has a plain `/`: write `%40`, and `%2F`"));
        }
        if path.contains(',') {
            return Err(invalid("the path has a `,`: the root comes once, after all hosts"));
        }
        let (user, hosts) = authority.rsplit_once('@').map_or((None, authority), |(user, hosts)| (Some(user), hosts));
        let user = match user.map(|user| user.split_once(':')) {
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
        if login.is_some() && user.is_some() {
            return Err(invalid(TWO_LOGINS));
        }
        let of_url = user.map(|user| Login::new(move || ready(Ok(user.clone()))));
        let mut all = parameters(query).map_err(invalid)?;
        let seconds = |text: String| text.strip_suffix('s')?.parse().ok().map(Duration::from_secs);
        let session = match all.remove("session").map(seconds) {
            Some(None) => return Err(invalid("its parameter `session` is not like `35s`")),
            session => session.flatten(),
        };
        let tls = TlsSettings::of_connection(
            tls,
            TlsSettings::from_url(|name| all.remove(name)),
            requires_tls,
            "`zookeepers` in place of `zookeeper`",
        )
        .map_err(ZooKeeperConnectError::InvalidSetting)?;
        if !all.is_empty() {
            return Err(invalid("a parameter is unknown (known are `session`, `sslrootcert`, `sslcert` and `sslkey`)"));
        }
        let root = Some(path.trim_end_matches('/')).filter(|path| !path.is_empty());
        Ok(Self {
            servers: servers.into_iter().flatten().collect(),
            root: root.map(|path| format!("/{}", decoded(path))),
            login: login.cloned().or(of_url),
            tls,
            session,
        })
    }
}

/// A server, by default with the port of ZooKeeper. `None`: it has no host, or its port is no
/// number.
fn with_port(server: &str) -> Option<(String, u16)> {
    let (host, port) = match server.rsplit_once(':').filter(|(_, port)| !port.contains(']')) {
        Some((host, port)) => (host, port.parse().ok()?),
        None => (server, DEFAULT_PORT),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

fn invalid(defect: &str) -> ZooKeeperConnectError {
    ZooKeeperConnectError::InvalidUrl(defect.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Address, ZooKeeperConnectError> {
        Address::parse(url, &TlsSettings::default(), None)
    }

    #[tokio::test]
    async fn url_has_servers_a_root_and_a_session() {
        let address = parse("zookeeper://ann:p%40s+s@a:2182,b,[::1]/shop/locks/?session=40s").expect("valid");
        let servers = [("a", 2182), ("b", 2181), ("::1", 2181)].map(|(host, port)| (host.to_owned(), port));
        assert_eq!(address.servers, servers);
        assert_eq!((address.root.as_deref(), address.session), (Some("/shop/locks"), Some(Duration::from_secs(40))));
        let user = address.login.expect("a user").get().await.expect("of the URL");
        assert_eq!((&*user.user, &*user.password), ("ann", "p@s+s"));
        let address = parse("ZK://a").expect("valid");
        assert!(address.root.is_none() && address.login.is_none() && address.session.is_none());
        assert!(address.tls.is_none() && parse("zks://a?sslrootcert=a.pem").expect("valid").tls.is_some());
    }

    #[test]
    fn defect_of_a_url_is_named_without_its_text() {
        for (url, defect) in [
            ("redis://ann:s3cret@host", "does not begin with `zookeeper://`"),
            ("zookeeper://s3cret@host", "a user needs a password"),
            ("zookeeper://ann:s3c@ret@host", "not escaped"),
            ("zookeeper://ann:12/s3cret@host", "the path has an `@`"),
            ("zookeeper://host:s3cret", "not escaped"),
            ("zookeeper://a/s3cret,b/s3cret", "the path has a `,`"),
            ("zookeeper://a,,b", "a host is empty"),
            ("zookeeper://:2181", "a host is empty"),
            ("zookeeper://host?s3cret=1", "a parameter is unknown"),
            ("zookeeper://host?session=s3cret", "`session` is not like"),
            ("zookeeper://host?session=35", "`session` is not like"),
            ("zookeeper://host?session=35s&session=36s", "set twice"),
            ("zookeeper://host?sslkey=a", "`sslkey` needs a URL with TLS: `zookeepers`"),
        ] {
            let error = parse(url).map(|_| ()).expect_err(url).to_string();
            assert!(error.contains(defect) && !error.contains("s3cret"), "{url}: {error}");
        }
        let login = Login::new(|| ready(Ok(Credentials::new("ann", "s3cret"))));
        let error = Address::parse("zk://ann:s3cret@host", &TlsSettings::default(), Some(&login)).map(|_| ());
        assert_eq!(error.expect_err("two").to_string(), format!("invalid URL of ZooKeeper: {TWO_LOGINS}"));
    }
}
