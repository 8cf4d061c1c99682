//! The address of a server, from a URL.

use deadpool_redis::redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

use super::{error::RedisConnectError, proto::escape_control};

/// An address, and its text without user and password.
pub(super) struct Address {
    pub(super) info: ConnectionInfo,
    pub(super) display: String,
}

impl Address {
    /// `origin`: prefix of error messages.
    pub(super) fn parse(url: &str, origin: &str) -> Result<Self, RedisConnectError> {
        let wants_tls = url.starts_with("rediss:") || url.starts_with("valkeys:");
        if wants_tls && !cfg!(feature = "redis-tls") {
            return Err(RedisConnectError::TlsNotEnabled);
        }
        let hint = url_hint(url);
        let info = url.into_connection_info().map_err(|_| {
            let hint = hint.as_deref().unwrap_or("example: `redis://user:password@host:6379/0`");
            RedisConnectError::InvalidUrl(format!("{origin}{hint}").into())
        })?;
        let mut address = Self::from_info(info, origin)?;
        if let Some(hint) = hint {
            // The parsed host may be part of a password.
            address.display = format!("{origin}{hint}");
        }
        Ok(address)
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
        Ok(Self { info: with_nodelay(info), display })
    }
}

/// The likely mistake in a URL, without any part that may be secret.
fn url_hint(url: &str) -> Option<String> {
    if url.trim().is_empty() {
        return Some("it is empty (example: `redis://host:6379`)".to_owned());
    }
    let Some((scheme, rest)) = url.split_once("://") else {
        // The part after the last `@` contains no password.
        let host = url.rsplit('@').next().unwrap_or_default();
        return Some(format!("it has no scheme; did you mean `redis://{}`?", escape_control(host)));
    };
    if scheme.starts_with("unix") || scheme == "redis+unix" {
        return None;
    }
    if scheme.starts_with("http") {
        return Some("its scheme is not `redis`, `rediss` or `unix` (example: `redis://host:6379`)".to_owned());
    }
    let at = rest.rfind('@')?;
    let is_ambiguous = rest[..at].contains(['@', '#', '/', '?']);
    is_ambiguous.then(|| {
        "`@`, `#`, `/`, `?` and `%` in a user or a password must be encoded: `%40`, `%23`, `%2F`, `%3F` and `%25`"
            .to_owned()
    })
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
