//! The servers of a store, from a URL. Pure.
//!
//! An error shows no part of the URL, because each part may be one of a password with a character
//! that was not escaped.

use tokio_postgres::{
    Config,
    config::{Host, SslMode, TargetSessionAttrs},
};

use super::{error::PostgresConnectError, tls::Roots};

/// The settings of a URL.
#[derive(Clone)]
pub(super) struct Address {
    pub(super) config: Config,
    /// Host and port, without user and password.
    pub(super) display: String,
    /// The roots for TLS. `None`: the URL does not require it.
    pub(super) tls: Option<Roots>,
    pub(super) schema: Option<String>,
    pub(super) migrate: Option<bool>,
}

/// The parameters of a URL that this crate reads.
#[derive(Default)]
struct OwnParameters {
    requires_tls: bool,
    root_certificates: Option<String>,
    schema: Option<String>,
    migrate: Option<bool>,
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
        let (own, rest) = OwnParameters::take(url)?;
        let mut config: Config = rest.parse().map_err(|_| {
            invalid("a parameter is unknown, or user, password, host or port has a character that is not escaped")
        })?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(invalid("it has no host"));
        }
        config.ssl_mode(if own.requires_tls { SslMode::Require } else { SslMode::Disable });
        // Of several servers, one is the primary.
        if config.get_hosts().len() > 1 && config.get_target_session_attrs() == TargetSessionAttrs::Any {
            config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        if config.get_application_name().is_none() {
            config.application_name("tower-lock");
        }
        let roots = own.root_certificates.map_or(Roots::System, Roots::File);
        let tls = own.requires_tls.then_some(roots);
        Ok(Self { display: display(&config), config, tls, schema: own.schema, migrate: own.migrate })
    }
}

impl OwnParameters {
    /// Removes the parameters from a URL.
    fn take(url: &str) -> Result<(Self, String), PostgresConnectError> {
        let mut own = Self::default();
        // A password may have a `?`: libpq reads it up to the last `@`.
        let host = url.rfind('@').unwrap_or(0);
        let Some(query) = url[host..].find('?').map(|at| host + at) else { return Ok((own, url.to_owned())) };
        let (before, query) = (&url[..query], &url[query + 1..]);
        let mut others = Vec::new();
        for parameter in query.split('&') {
            match parameter.split_once('=') {
                Some(("schema", name)) => own.schema = Some(name.to_owned()),
                Some(("migrate", "true")) => own.migrate = Some(true),
                Some(("migrate", "false")) => own.migrate = Some(false),
                Some(("migrate", _)) => return Err(invalid("its parameter `migrate` is neither `true` nor `false`")),
                Some(("sslmode", "disable" | "allow" | "prefer")) => own.requires_tls = false,
                Some(("sslmode", "require" | "verify-ca" | "verify-full")) => own.requires_tls = true,
                Some(("sslmode", _)) => return Err(invalid("its parameter `sslmode` is none of libpq")),
                Some(("sslrootcert", path)) => own.root_certificates = Some(path.to_owned()),
                _ => others.push(parameter),
            }
        }
        let rest = if others.is_empty() { before.to_owned() } else { format!("{before}?{}", others.join("&")) };
        Ok((own, rest))
    }
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
            "postgres://ann:s3cret@host?sslmode=s3cret",
        ] {
            let Err(error) = Address::parse(url) else { panic!("{url}") };
            assert!(!format!("{error:?}").contains("s3cret"), "{url}: {error:?}");
        }
    }

    #[test]
    fn tls_is_used_if_the_url_requires_it() {
        let tls = |query: &str| {
            let address = Address::parse(&format!("postgres://ann@host/app?connect_timeout=3{query}")).expect(query);
            assert_eq!(address.config.get_ssl_mode() == SslMode::Require, address.tls.is_some(), "{query}");
            address.tls
        };
        for query in ["", "&sslmode=disable", "&sslmode=allow", "&sslmode=prefer", "&sslrootcert=a.pem"] {
            assert_eq!(tls(query), None, "{query}");
        }
        for mode in ["require", "verify-ca", "verify-full"] {
            assert_eq!(tls(&format!("&sslmode={mode}")), Some(Roots::System), "{mode}");
        }
        assert_eq!(tls("&sslrootcert=/a.pem&sslmode=require"), Some(Roots::File("/a.pem".to_owned())));
    }
}
