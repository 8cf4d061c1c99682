//! The server of a store, from a URL. Pure.
//!
//! An error shows no part of the URL, because each part may be one of a password with a character
//! that was not escaped.

use mysql_async::{Opts, OptsBuilder};

use super::error::MysqlConnectError;
use crate::store::{
    remote::{
        credentials::{Login, TWO_LOGINS},
        tls::TlsSettings,
    },
    scheme::parameters,
};

/// The settings of a URL.
pub(super) struct Address {
    pub(super) options: OptsBuilder,
    /// Host and port, without user and password.
    pub(super) display: String,
    /// `None`: the URL does not require it.
    pub(super) tls: Option<TlsSettings>,
    /// In place of user and password.
    pub(super) login: Option<Login>,
    pub(super) prefix: Option<String>,
    pub(super) migrate: Option<bool>,
    pub(super) connections: Option<usize>,
}

impl Address {
    /// `tls` and `login`: the settings of the builder.
    pub(super) fn parse(url: &str, tls: &TlsSettings, login: Option<&Login>) -> Result<Self, MysqlConnectError> {
        let (scheme, rest) = url.trim().split_once("://").unwrap_or_default();
        if !["mysql", "mariadb"].contains(&&*scheme.to_ascii_lowercase()) {
            return Err(invalid("it does not begin with `mysql://` (`mysql://user:password@host:3306/database`)"));
        }
        let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
        let options = Opts::from_url(&format!("mysql://{address}")).map_err(|_| {
            invalid(
                "it has no host, or the port is no number, or user, password or database has a character that is not \
                 escaped: write `%40` for `@`, `%2F` for `/`, `%3F` for `?`, `%23` for `#`",
            )
        })?;
        // The rest of a password, or nothing.
        if options.db_name().is_none_or(|name| name.is_empty() || name.contains(['@', '/', '#', ':'])) {
            return Err(invalid(
                "it names no database (`mysql://host:3306/database`), or has a plain `/`: write `%2F`",
            ));
        }
        if login.is_some() && (options.user().is_some() || options.pass().is_some()) {
            return Err(invalid(TWO_LOGINS));
        }
        let mut all = parameters(query).map_err(invalid)?;
        let of_url = TlsSettings::from_url(|name| all.remove(name));
        let requires_tls = match all.remove("sslmode").as_deref() {
            None | Some("disable" | "allow" | "prefer") => false,
            Some("require" | "verify-ca" | "verify-full") => true,
            Some(_) => {
                return Err(invalid("its parameter `sslmode` is none of `disable`, `require` and `verify-full`"));
            }
        };
        let prefix = all.remove("prefix");
        let migrate = all.remove("migrate").map(|value| value.parse()).transpose();
        let migrate = migrate.map_err(|_| invalid("its parameter `migrate` is neither `true` nor `false`"))?;
        let connections = all.remove("connections").map(|value| value.parse()).transpose();
        let connections = connections.map_err(|_| invalid("its parameter `connections` is no number"))?;
        if !all.is_empty() {
            return Err(invalid(
                "a parameter is unknown (known are `prefix`, `migrate`, `connections`, `sslmode`, `sslrootcert`, `sslcert` \
                 and `sslkey`), or user or password has a `?`: write `%3F`",
            ));
        }
        let tls = TlsSettings::of_connection(tls, of_url, requires_tls, "add `sslmode=verify-full`")
            .map_err(MysqlConnectError::InvalidSetting)?;
        let display = format!("{}:{}", options.ip_or_hostname(), options.tcp_port());
        // A socket of the server's choice would be another address.
        let options = OptsBuilder::from_opts(options).prefer_socket(false).tcp_nodelay(true).stmt_cache_size(0);
        Ok(Self { options, display, tls, login: login.cloned(), prefix, migrate, connections })
    }
}

fn invalid(defect: &str) -> MysqlConnectError {
    MysqlConnectError::InvalidUrl(defect.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_has_a_server_and_a_database() {
        let parse = |url: &str| Address::parse(url, &TlsSettings::default(), None);
        for (url, display) in [
            ("mysql://ann:p%40ss@db.internal/app?migrate=true&prefix=shop&connections=3", "db.internal:3306"),
            ("MariaDB://[::1]:3307/app", "[::1]:3307"),
        ] {
            let address = parse(url).unwrap_or_else(|error| panic!("{url}: {error:?}"));
            assert_eq!(address.display, display);
            assert_eq!(address.connections, url.contains("connections").then_some(3));
        }
    }

    #[test]
    fn defect_of_a_url_is_named_without_its_text() {
        for (url, defect) in [
            ("postgres://ann:s3cret@host/app", "does not begin with `mysql://`"),
            ("mysql://ann:s3cret@host", "names no database"),
            ("mysql://ann:s3cret/12@host/app", "not escaped"),
            ("mysql://ann:12/s3cret@host/app", "names no database"),
            ("mysql://ann:s3cret?x@host/app", "not escaped"),
            ("mysql://host/app?s3cret=1", "a parameter is unknown"),
            ("mysql://host:s3cret/app", "not escaped"),
            ("mysql://host/app?migrate=s3cret", "`migrate` is neither"),
            ("mysql://host/app?connections=s3cret", "`connections` is no number"),
            ("mysql://host/app?migrate=true&migrate=true", "set twice"),
            ("mysql://host/app?sslmode=s3cret", "`sslmode` is none of"),
            ("mysql://host/app?schema=s3cret", "known are `prefix`"),
            ("mysql://host/app?sslkey=s3cret", "needs a URL with TLS"),
        ] {
            let error = Address::parse(url, &TlsSettings::default(), None).map(|_| ()).expect_err(url).to_string();
            assert!(error.contains(defect) && !error.contains("s3cret"), "{url}: {error}");
        }
    }
}
