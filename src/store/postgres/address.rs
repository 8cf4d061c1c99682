//! The servers of a store, from a URL. Pure.
//!
//! An error shows no part of the URL, because each part may be one of a password with a character
//! that was not escaped.

use std::collections::{HashMap, HashSet};

use tokio_postgres::{
    Config,
    config::{Host, SslMode, TargetSessionAttrs},
};

use super::error::PostgresConnectError;
use crate::store::{
    remote::{
        credentials::{Login, TWO_LOGINS},
        tls::TlsSettings,
    },
    scheme::decoded,
};

/// The settings of a URL.
#[derive(Clone)]
pub(crate) struct Address {
    /// One for each host, which has the time of a connect for itself.
    pub(super) configs: Vec<Config>,
    /// Host and port, without user and password.
    pub(super) display: String,
    /// `None`: the URL does not require it.
    pub(super) tls: Option<TlsSettings>,
    /// In place of user and password.
    pub(super) login: Option<Login>,
    pub(super) own: OwnParameters,
}

/// The parameters of a URL that this crate reads.
#[derive(Clone, Default)]
pub(super) struct OwnParameters {
    requires_tls: bool,
    tls: TlsSettings,
    pub(super) schema: Option<String>,
    pub(super) migrate: Option<bool>,
    pub(super) connections: Option<usize>,
    pub(super) events_url: Option<String>,
}

/// Parameters of libpq and of other drivers that this store does not know. An error names one of
/// them: another name may be a part of a password.
const OF_OTHERS: [&str; 14] = [
    "client_encoding",
    "connection_limit",
    "currentSchema",
    "fallback_application_name",
    "gssencmode",
    "passfile",
    "pgbouncer",
    "pool_timeout",
    "requiressl",
    "search_path",
    "service",
    "ssl",
    "sslcrl",
    "sslpassword",
];

impl Address {
    /// `tls` and `login`: the settings of the builder.
    pub(crate) fn parse(url: &str, tls: &TlsSettings, login: Option<&Login>) -> Result<Self, PostgresConnectError> {
        let url = url.trim();
        let scheme = url.split_once("://").map(|(scheme, _)| scheme);
        if !["postgres", "postgresql"].map(Some).contains(&scheme) {
            return Err(invalid(
                "it does not begin with `postgres://` (`postgres://user:password@host:5432/database`)",
            ));
        }
        let (mut own, rest) = OwnParameters::take(url)?;
        let config = |url: &str| {
            let config = url.parse::<Config>();
            config.map_err(|_| {
                invalid(
                    "a parameter is unknown (known are `schema`, `migrate`, `connections`, `events_url`, `sslmode`, \
                     `sslrootcert`, `sslcert`, `sslkey` and most of libpq), or user, password, host or port has a \
                     character that is not escaped",
                )
            })
        };
        let all = config(&rest)?;
        if all.get_hosts().is_empty() && all.get_hostaddrs().is_empty() {
            return Err(invalid("it has no host"));
        }
        if login.is_some() && (all.get_user().is_some() || all.get_password().is_some()) {
            return Err(invalid(TWO_LOGINS));
        }
        let mut configs = each_host(&rest).map(|url| config(&url)).collect::<Result<Vec<_>, _>>()?;
        for config in &mut configs {
            config.ssl_mode(if own.requires_tls { SslMode::Require } else { SslMode::Disable });
            // Of several servers, one is the primary.
            if all.get_hosts().len() > 1 && all.get_target_session_attrs() == TargetSessionAttrs::Any {
                config.target_session_attrs(TargetSessionAttrs::ReadWrite);
            }
            if all.get_application_name().is_none() {
                config.application_name("tower-lock");
            }
        }
        let of_url = std::mem::take(&mut own.tls);
        let tls = TlsSettings::of_connection(tls, of_url, own.requires_tls, "add `sslmode=verify-full`")
            .map_err(PostgresConnectError::InvalidTls)?;
        Ok(Self { display: display(&all), configs, tls, login: login.cloned(), own })
    }
}

impl OwnParameters {
    /// Removes the parameters from a URL.
    ///
    /// The driver takes all up to the first `@` for the user, wherever it is. So an `@` that is not
    /// behind the user is encoded, or an error: a parameter that is not read may be that of TLS.
    fn take(url: &str) -> Result<(Self, String), PostgresConnectError> {
        const NOT_ENCODED: &str = "user or password has one of `@`, `/`, `?` and `#`, or the database has `@` or `#`: write \
                                   `%40`, `%2F`, `%3F`, `%23`";
        let authority = url.find("://").map_or(0, |at| at + 3);
        let end = url[authority..].find(['/', '?', '#']).map_or(url.len(), |at| authority + at);
        let (before, query) = url.split_once('?').unwrap_or((url, ""));
        if url[authority..end].matches('@').count() > 1 || before[end..].contains(['@', '#']) {
            return Err(invalid(NOT_ENCODED));
        }
        let mut own = Self::default();
        let (mut others, mut names, mut tls) = (Vec::new(), HashSet::new(), HashMap::new());
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter
                .split_once('=')
                .ok_or_else(|| invalid("a parameter has no value, or user or password has a `?`: write `%3F`"))?;
            let (name, text) = (decoded(name), decoded(value));
            match (name.as_str(), text.as_str()) {
                // The rest of a password: the error of a schema shows it.
                ("schema", name) if name.contains('@') => return Err(invalid(NOT_ENCODED)),
                ("schema", _) => own.schema = Some(text),
                ("migrate", "true") => own.migrate = Some(true),
                ("migrate", "false") => own.migrate = Some(false),
                ("migrate", _) => return Err(invalid("its parameter `migrate` is neither `true` nor `false`")),
                ("connections", number) => {
                    own.connections =
                        Some(number.parse().map_err(|_| invalid("its parameter `connections` is no number"))?);
                }
                ("sslmode", "disable" | "allow" | "prefer") => own.requires_tls = false,
                ("sslmode", "require" | "verify-ca" | "verify-full") => own.requires_tls = true,
                ("sslmode", _) => return Err(invalid("the value of its parameter `sslmode` is none of libpq")),
                ("prefix", _) => {
                    return Err(invalid("its parameter `prefix` is one of Redis: `schema` separates two applications"));
                }
                ("events_url", _) => own.events_url = Some(text),
                // Of sqlx: no statement of the store has a name.
                ("statement-cache-capacity", _) => {}
                (name, _) if OF_OTHERS.contains(&name) => {
                    return Err(invalid(&format!("its parameter `{name}` is not supported: remove it")));
                }
                ("sslrootcert" | "sslcert" | "sslkey", _) => drop(tls.insert(name.clone(), text)),
                _ => others.push(parameter.replace('@', "%40")),
            }
            if !names.insert(name) {
                return Err(invalid("one of its parameters is set twice"));
            }
        }
        own.tls = TlsSettings::from_url(|name| tls.remove(name));
        let rest = if others.is_empty() { before.to_owned() } else { format!("{before}?{}", others.join("&")) };
        Ok((own, rest))
    }
}

/// A URL for each host in front of the path.
fn each_host(url: &str) -> impl Iterator<Item = String> {
    let authority = url.find("://").map_or(0, |at| at + 3);
    let end = url[authority..].find(['/', '?']).map_or(url.len(), |at| authority + at);
    let hosts = url[authority..end].find('@').map_or(authority, |at| authority + at + 1);
    url[hosts..end].split(',').map(move |host| format!("{}{host}{}", &url[..hosts], &url[end..]))
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

    fn parse(url: &str) -> Result<Address, PostgresConnectError> {
        Address::parse(url, &TlsSettings::default(), None)
    }

    #[test]
    fn url_has_servers_and_parameters() {
        let address =
            parse("postgres://ann:s3cret@a,b:5433/app?migrate=true&schema=my%20shop&connections=4&connect_timeout=3");
        let address = address.expect("a URL");
        assert_eq!(address.display, "a:5432,b:5433");
        assert_eq!((address.own.schema.as_deref(), address.own.migrate), (Some("my shop"), Some(true)));
        assert_eq!(address.own.connections, Some(4));
        let each = address.configs.iter().map(|config| (config.get_hosts()[0].clone(), config.get_ports()[0]));
        assert_eq!(each.collect::<Vec<_>>(), [(Host::Tcp("a".into()), 5432), (Host::Tcp("b".into()), 5433)]);
        for config in &address.configs {
            assert_eq!(config.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
            assert_eq!((config.get_dbname(), config.get_password()), (Some("app"), Some(&b"s3cret"[..])));
        }
        assert_eq!(parse("postgresql://a").expect("a URL").display, "a:5432");
        let address = parse("postgres://ann:s3%3Fcret@a/app?schema=shop").expect("a URL");
        assert_eq!(
            (address.configs[0].get_password(), address.own.schema.as_deref()),
            (Some(&b"s3?cret"[..]), Some("shop"))
        );
        let address = parse("postgres://a/app?user=ann@eu&password=s3cret&schema=shop").expect("a URL");
        assert_eq!((address.display.as_str(), address.configs[0].get_user()), ("a:5432", Some("ann@eu")));
        assert_eq!(parse("postgres:///app?host=/run/pg&user=ann").expect("a URL").display, "/run/pg:5432");
    }

    #[test]
    fn url_may_have_that_of_its_messages() {
        let events = "postgres://ann:s3%40c+ret@db:5433/app?connect_timeout=3";
        for (text, expected) in [
            ("postgres%3A%2F%2Fann%3As3%2540c%2Bret%40db%3A5433%2Fapp%3Fconnect_timeout%3D3", events),
            ("postgres://ann:s3%2540c+ret@db:5433/app?connect_timeout=3", events),
            ("postgres://db/app", "postgres://db/app"),
        ] {
            for url in ["bob@pooler:6432/app?", "pooler/app?schema=shop&", "bob:s%3F3@pooler/app?"] {
                let address = parse(&format!("postgres://{url}events_url={text}")).expect(text);
                assert!(address.display.starts_with("pooler:"), "{url}: {}", address.display);
                assert_eq!(address.own.events_url.as_deref(), Some(expected), "{url}");
            }
        }
        let config = parse(events).expect("a URL").configs.remove(0);
        assert_eq!(config.get_password(), Some(&b"s3@c+ret"[..]));
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
            "postgres://ann:p@s3cret@host/app",
            "postgres://ann:1/s3cret@host/app",
            "postgres://ann:1?s3cret@host/app",
            "postgres://ann:1#s3cret@host/app",
            "postgres://ann:1?schema=s3cret@host/app",
            "postgres://ann:s3cret@host?migrate=s3cret",
            "postgres://ann:s3cret@host?schema=s3cret&schema=s3cret",
            "postgres://ann:s3cret@host?prefix=s3cret",
            "postgres://ann:s3cret@host:s3cret",
            "postgres://ann:s3cret@host?sslmode=s3cret",
        ] {
            let Err(error) = parse(url) else { panic!("{url}") };
            assert!(!format!("{error:?}").contains("s3cret"), "{url}: {error:?}");
        }
    }

    #[test]
    fn parameter_of_another_driver_is_ignored_or_named() {
        assert!(parse("postgres://ann@host/app?statement-cache-capacity=100").is_ok(), "as sqlx writes it");
        let Err(error) = parse("postgres://ann:s3cret@host/app?gssencmode=disable") else { panic!("it is unknown") };
        assert!(error.to_string().contains("`gssencmode` is not supported"), "{error}");
    }

    #[test]
    fn tls_is_used_if_the_url_requires_it() {
        let tls = |query: &str| {
            let address = parse(&format!("postgres://ann@host/app?connect_timeout=3{query}")).expect(query);
            assert_eq!(address.configs[0].get_ssl_mode() == SslMode::Require, address.tls.is_some(), "{query}");
            address.tls.map(|tls| format!("{tls:?}"))
        };
        for query in ["", "&sslmode=disable", "&sslmode=allow", "&sslmode=prefer"] {
            assert_eq!(tls(query), None, "{query}");
        }
        let system = tls("&sslmode=require");
        assert!(system.is_some());
        for query in [
            "&application_name=a@b&sslmode=require",
            "&sslmode=require&options=-c%20a.b=c@d",
            "&ssl%6dode=require",
            "&sslmode=verify-ca",
            "&sslmode=verify-full",
        ] {
            assert_eq!(tls(query), system, "{query}");
        }
        let url = "postgres://host/app?sslmode=require&application_name=a@b";
        assert!(parse(url).expect("a URL").tls.is_some(), "without a user");
        let files = tls("&sslrootcert=/a.pem&sslmode=require&sslkey=/c.pem&sslcert=/b.pem").expect("TLS");
        assert!(["\"/a.pem\"", "\"/b.pem\"", "\"/c.pem\""].iter().all(|path| files.contains(path)), "{files}");
    }

    #[test]
    fn setting_of_tls_is_never_ignored() {
        for (query, defect) in [
            ("sslrootcert=a.pem", "`sslrootcert` needs a URL with TLS: add `sslmode=verify-full`"),
            ("sslcert=a.pem&sslkey=b.pem&sslmode=prefer", "`sslcert` needs a URL with TLS"),
        ] {
            let Err(error) = parse(&format!("postgres://ann:s3cret@host/app?{query}")) else { panic!("{query}") };
            let text = error.to_string();
            assert!(text.contains(defect) && !text.contains("s3cret"), "{text}");
        }
        for (builder, query) in [
            (TlsSettings::default().with_roots(Vec::new()), "sslrootcert=a.pem"),
            (TlsSettings::default().with_client_certificate(Vec::new(), Vec::new()), "sslcert=a.pem&sslkey=b.pem"),
        ] {
            for (query, defect) in [(query, "are set: remove one"), ("connect_timeout=3", "")] {
                let url = format!("postgres://host/app?sslmode=require&{query}");
                let error =
                    Address::parse(&url, &builder, None).map_or_else(|error| error.to_string(), |_| String::new());
                assert!(error.contains(defect) && error.is_empty() == defect.is_empty(), "{error}");
            }
        }
    }
}
