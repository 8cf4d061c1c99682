//! The servers of a store, from a URL. Pure.
//!
//! An error shows no part of the URL, because each part may be one of a password with a character
//! that was not escaped.

use tokio_postgres::{
    Config,
    config::{Host, TargetSessionAttrs},
};

use super::error::PostgresConnectError;

/// The settings of a URL.
#[derive(Clone)]
pub(super) struct Address {
    pub(super) config: Config,
    /// Host and port, without user and password.
    pub(super) display: String,
    pub(super) schema: Option<String>,
    pub(super) migrate: Option<bool>,
}

impl Address {
    pub(super) fn parse(url: &str) -> Result<Self, PostgresConnectError> {
        let url = url.trim();
        let scheme = url.split_once("://").map(|(scheme, _)| scheme);
        if !["postgres", "postgresql"].map(Some).contains(&scheme) {
            return Err(invalid(
                "it does not begin with `postgres://` (`postgres://user:password@host:5432/database`)",
            ));
        }
        let (schema, migrate, rest) = own_parameters(url)?;
        let mut config: Config = rest.parse().map_err(|_| {
            invalid("a parameter is unknown, or user, password, host or port has a character that is not escaped")
        })?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(invalid("it has no host"));
        }
        // Of several servers, one is the primary.
        if config.get_hosts().len() > 1 && config.get_target_session_attrs() == TargetSessionAttrs::Any {
            config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        if config.get_application_name().is_none() {
            config.application_name("tower-lock");
        }
        Ok(Self { display: display(&config), config, schema, migrate })
    }
}

/// The parameters of this crate, and the URL without them.
fn own_parameters(url: &str) -> Result<(Option<String>, Option<bool>, String), PostgresConnectError> {
    // A password may have a `?`: libpq reads it up to the last `@`.
    let host = url.rfind('@').unwrap_or(0);
    let Some(query) = url[host..].find('?').map(|at| host + at) else { return Ok((None, None, url.to_owned())) };
    let (before, query) = (&url[..query], &url[query + 1..]);
    let (mut schema, mut migrate, mut others) = (None, None, Vec::new());
    for parameter in query.split('&') {
        match parameter.split_once('=') {
            Some(("schema", name)) => schema = Some(name.to_owned()),
            Some(("migrate", "true")) => migrate = Some(true),
            Some(("migrate", "false")) => migrate = Some(false),
            Some(("sslmode", "require" | "verify-ca" | "verify-full")) => {
                return Err(PostgresConnectError::TlsNotEnabled);
            }
            Some(("migrate", _)) => return Err(invalid("its parameter `migrate` is neither `true` nor `false`")),
            _ => others.push(parameter),
        }
    }
    let rest = if others.is_empty() { before.to_owned() } else { format!("{before}?{}", others.join("&")) };
    Ok((schema, migrate, rest))
}

fn display(config: &Config) -> String {
    let ports = config.get_ports();
    let port = |n: usize| ports.get(n).or(ports.first()).copied().unwrap_or(5432);
    let host = |(n, host): (usize, &Host)| match host {
        Host::Tcp(name) => format!("{name}:{}", port(n)),
        #[cfg(unix)]
        Host::Unix(path) => format!("{}:{}", path.display(), port(n)),
    };
    let hosts: Vec<_> = config.get_hosts().iter().enumerate().map(host).collect();
    let addresses = config.get_hostaddrs().iter().enumerate().map(|(n, address)| format!("{address}:{}", port(n)));
    if hosts.is_empty() { addresses.collect::<Vec<_>>().join(",") } else { hosts.join(",") }
}

fn invalid(defect: &str) -> PostgresConnectError {
    PostgresConnectError::InvalidUrl(defect.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_has_servers_and_parameters() {
        let address = Address::parse("postgres://ann:s3cret@a,b:5433/app?migrate=true&schema=shop&connect_timeout=3");
        let address = address.expect("a URL");
        assert_eq!(address.display, "a:5432,b:5433");
        assert_eq!((address.schema.as_deref(), address.migrate), (Some("shop"), Some(true)));
        assert_eq!(address.config.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
        assert_eq!(address.config.get_dbname(), Some("app"));
        assert_eq!(Address::parse("postgresql://a").expect("a URL").display, "a:5432");
        let address = Address::parse("postgres://ann:s3?cret@a/app?schema=shop").expect("a URL");
        assert_eq!((address.config.get_password(), address.schema.as_deref()), (Some(&b"s3?cret"[..]), Some("shop")));
        assert_eq!(Address::parse("postgres:///app?host=/run/pg&user=ann").expect("a URL").display, "/run/pg:5432");
    }

    #[test]
    fn defect_of_a_url_shows_no_part_of_it() {
        for url in [
            "",
            "s3cret",
            "ann:s3cret@host",
            "redis://s3cret",
            "postgres://ann:s3cret@",
            "postgres://ann:s3cret@host?s3cret=1",
            "postgres://ann:s3cret@host?migrate=s3cret",
            "postgres://ann:s3cret@host:s3cret",
            "postgres://ann:s3cret@host?sslmode=require",
            "postgres://ann:s3cret@host/app?connect_timeout=3&sslmode=verify-full",
        ] {
            let Err(error) = Address::parse(url) else { panic!("{url}") };
            assert!(!format!("{error:?}").contains("s3cret"), "{url}: {error:?}");
            assert_eq!(
                url.contains("sslmode"),
                matches!(error, PostgresConnectError::TlsNotEnabled),
                "{url}: {error:?}"
            );
        }
    }
}
