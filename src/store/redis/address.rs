//! The address of a server, from a URL.

use deadpool_redis::redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

use super::{error::RedisConnectError, proto::escape_control};

/// An address, and its text without user and password.
pub(super) struct Address {
    pub(super) info: ConnectionInfo,
    pub(super) display: String,
    pub(super) user: String,
}

const EXAMPLE: &str = "example: `redis://user:password@host:6379/0`";
const HOST_EXAMPLE: &str = "example: `redis://host:6379`";

impl Address {
    /// `origin`: prefix of error messages.
    pub(super) fn parse(url: &str, origin: &str) -> Result<Self, RedisConnectError> {
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

    pub(super) fn from_info(info: ConnectionInfo, origin: &str) -> Result<Self, RedisConnectError> {
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
        Ok(Self { info: with_nodelay(info), display, user })
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
        _ => return Some(format!("its scheme is not `redis`, `rediss` or `unix` ({HOST_EXAMPLE})")),
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    // The parsed host would be a part of the password.
    if rest[end..].contains('@') {
        return Some(
            "`@`, `#`, `/`, `?` and `%` in a user or a password must be encoded: `%40`, `%23`, `%2F`, `%3F` and `%25`"
                .to_owned(),
        );
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

/// Disables Nagle's algorithm: a call does not wait for the reply to the previous one.
fn with_nodelay(address: ConnectionInfo) -> ConnectionInfo {
    let settings = address.tcp_settings().clone().set_nodelay(true);
    address.set_tcp_settings(settings)
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
