//! The parameters in the query of a URL. Pure.

use std::{collections::HashMap, str::FromStr, time::Duration};

use super::{replicas::MinReplicas, url::UrlKind};
use crate::limits::REDIS_MIN_REPLICAS_TIMEOUT;

/// The parameters of a URL, each at most once.
#[derive(Debug)]
pub(crate) struct Parameters {
    values: HashMap<&'static str, String>,
}

/// The settings of a store that its URL may have in place of its builder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UrlSettings {
    pub(crate) prefix: Option<String>,
    pub(crate) min_replicas: Option<MinReplicas>,
}

impl Parameters {
    /// Fails with the defect of the query, without its text: it may be the rest of a password.
    pub(crate) fn parse(query: &str, kind: UrlKind) -> Result<Self, String> {
        let known = kind.parameters();
        let mut values = HashMap::new();
        // A `+` is no space, as in a password.
        let query = query.replace('+', "%2B");
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let Some(name) = known.iter().find(|known| **known == name) else {
                return Err(format!("a parameter is not one of `{}`", known.join("`, `")));
            };
            if values.insert(*name, value.into_owned()).is_some() {
                return Err(format!("its parameter `{name}` is set twice"));
            }
        }
        Ok(Self { values })
    }

    pub(crate) fn text(&mut self, name: &str) -> Option<String> {
        self.values.remove(name)
    }

    /// `what`: the values of this parameter, in the text of an error.
    pub(crate) fn value<T: FromStr>(&mut self, name: &str, what: &str) -> Result<Option<T>, String> {
        let parse = |text: String| text.parse().map_err(|_| format!("its parameter `{name}` is not {what}"));
        self.text(name).map(parse).transpose()
    }

    pub(crate) fn settings(&mut self) -> Result<UrlSettings, String> {
        let count = self.value("min_replicas", "a number")?;
        let timeout = self.value("min_replicas_timeout_ms", "a number")?.map(Duration::from_millis);
        if count.is_none() && timeout.is_some() {
            return Err("its parameter `min_replicas_timeout_ms` needs `min_replicas`".to_owned());
        }
        let timeout = timeout.unwrap_or(REDIS_MIN_REPLICAS_TIMEOUT);
        let min_replicas = count.map(|count| MinReplicas { count, timeout });
        Ok(UrlSettings { prefix: self.text("prefix"), min_replicas })
    }
}

/// Those of sentinels are last.
const ALL: [&str; 8] = [
    "prefix",
    "min_replicas",
    "min_replicas_timeout_ms",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "sentinel_username",
    "sentinel_password",
];

impl UrlKind {
    /// Redlock has no replicas that count.
    fn parameters(self) -> &'static [&'static str] {
        match self {
            Self::Server | Self::Cluster => &ALL[..6],
            Self::Sentinel => &ALL,
            Self::Socket => &["prefix", "min_replicas", "min_replicas_timeout_ms", "db", "user", "pass"],
            Self::Redlock => &["prefix", "sslrootcert", "sslcert", "sslkey"],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(query: &str, kind: UrlKind) -> Result<UrlSettings, String> {
        Parameters::parse(query, kind)?.settings()
    }

    #[test]
    fn query_has_the_settings_of_a_store() {
        for kind in [UrlKind::Server, UrlKind::Socket, UrlKind::Sentinel, UrlKind::Cluster] {
            assert_eq!(settings("", kind), Ok(UrlSettings::default()));
            let found = settings("min_replicas=2&prefix=sh%6Fp&min_replicas_timeout_ms=40", kind).expect("settings");
            let min_replicas = Some(MinReplicas { count: 2, timeout: Duration::from_millis(40) });
            assert_eq!(found, UrlSettings { prefix: Some("shop".to_owned()), min_replicas });
            let found = settings("min_replicas=1", kind).expect("settings").min_replicas;
            assert_eq!(found, Some(MinReplicas { count: 1, timeout: Duration::from_millis(100) }));
        }
        let mut parameters = Parameters::parse("sentinel_password=a+b%26", UrlKind::Sentinel).expect("one");
        assert_eq!(parameters.text("sentinel_password").as_deref(), Some("a+b&"));
    }

    #[test]
    fn defects_of_a_query_are_named_without_its_text() {
        for (query, kind, defect) in [
            ("protocol=resp3", UrlKind::Server, "one of `prefix`, `min_replicas`, `min_replicas_timeout_ms`"),
            ("s3cret", UrlKind::Server, "a parameter is not one of `prefix`"),
            ("sentinel_password=s3cret", UrlKind::Cluster, "a parameter is not one of `prefix`"),
            ("passwort=s3cret", UrlKind::Sentinel, "`sentinel_username`, `sentinel_password`"),
            ("password=s3cret", UrlKind::Socket, "`db`, `user`, `pass`"),
            ("min_replicas=1", UrlKind::Redlock, "a parameter is not one of `prefix`"),
            ("prefix=s3cret&prefix=s3cret", UrlKind::Server, "`prefix` is set twice"),
            ("min_replicas=s3cret", UrlKind::Server, "`min_replicas` is not a number"),
            ("min_replicas=-1", UrlKind::Server, "`min_replicas` is not a number"),
            (
                "min_replicas=1&min_replicas_timeout_ms=10ms",
                UrlKind::Server,
                "`min_replicas_timeout_ms` is not a number",
            ),
            ("min_replicas_timeout_ms=10", UrlKind::Server, "`min_replicas_timeout_ms` needs `min_replicas`"),
        ] {
            let text = settings(query, kind).expect_err(query);
            assert!(text.contains(defect) && !text.contains("s3cret"), "{query}: {text}");
        }
    }
}
