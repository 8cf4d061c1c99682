//! The parts of a URL of Redis servers, or its defect. Pure.
//!
//! A part may be in the wrong place, for example the rest of a password that has a `/`: a defect is
//! named without any text of the URL.

use std::num::NonZeroU16;

use crate::store::scheme::split_scheme;

/// The parts of a URL: `scheme://user:password@host:port,host:port/path?query`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerUrl<'a> {
    pub(crate) kind: UrlKind,
    /// Of the servers.
    pub(crate) tls: bool,
    /// With its `@`, or empty.
    pub(crate) login: &'a str,
    /// One or several, with or without a port. Empty for a socket.
    pub(crate) hosts: &'a str,
    /// After the first `/`.
    pub(crate) path: &'a str,
    pub(crate) query: &'a str,
}

/// The servers that a URL names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UrlKind {
    /// One server.
    Server,
    /// One server on this machine, by the path of its socket.
    Socket,
    /// The sentinels of a master.
    Sentinel,
    /// Nodes of a Redis Cluster.
    Cluster,
    /// Independent servers, of which a majority decides.
    Redlock,
}

const UNENCODED: &str =
    "`@`, `#`, `/`, `?`, `%` and `,` in a user or a password must be encoded: `%40`, `%23`, `%2F`, `%3F`, `%25`, `%2C`";

impl<'a> ServerUrl<'a> {
    /// Fails with the defect of the URL.
    pub(crate) fn split(url: &'a str) -> Result<Self, String> {
        let (scheme, rest) = split_scheme(url)?;
        let Some((kind, tls)) = UrlKind::of(&scheme) else {
            return Err("its scheme is not `redis`, `rediss`, `redis+sentinel`, `redis+cluster` or `unix` (example: \
                        `redis://host:6379`)"
                .to_owned());
        };
        let defect = |text: &str| format!("{text} (example: `{}`)", kind.example());
        let (rest, fragment) = rest.split_once('#').unwrap_or((rest, ""));
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        if kind == UrlKind::Socket {
            let path = place;
            // The path is shown. Without its `?`, a password would be a part of it.
            if path.contains(['=', '&']) {
                return Err(defect("its parameters begin with `?`; a path has no `=` and no `&`"));
            }
            return match path.starts_with('/') && fragment.is_empty() {
                true => Ok(Self { kind, tls, login: "", hosts: "", path, query }),
                false => Err(defect("it is not the path of a socket")),
            };
        }
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        // The text before the `@` is then a part of the password, and not a host. The password of
        // the sentinels may have an `@`.
        let query_is_cut = kind != UrlKind::Sentinel || path.is_empty();
        if path.contains('@') || fragment.contains('@') || query_is_cut && query.contains('@') {
            return Err(defect(UNENCODED));
        }
        let (login, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        // Else the first host of `host1,user:password@host2` would be a part of the user.
        if kind != UrlKind::Server && login.contains(',') {
            return Err(defect("user and password are before the first host, and a `,` in them must be `%2C`"));
        }
        let url = Self { kind, tls, login, hosts, path, query };
        for host in url.hosts() {
            if host.is_empty() || host.starts_with(':') {
                return Err(defect("it has no host, or no `@` after its password"));
            }
            let port = host.rsplit_once(':').map(|(_, port)| port).filter(|port| !port.ends_with(']'));
            if port.is_some_and(|port| port.parse::<NonZeroU16>().is_err()) {
                return Err(defect("its port is not a number from 1 to 65535, or it has no `@` after its password"));
            }
        }
        if !fragment.is_empty() {
            return Err(defect(UNENCODED));
        }
        url.check_path().map_err(defect)?;
        Ok(url)
    }

    /// Each with or without a port.
    pub(crate) fn hosts(self) -> impl Iterator<Item = &'a str> {
        let several = self.kind != UrlKind::Server;
        self.hosts.split(move |c| several && c == ',').map(str::trim)
    }

    /// The number of the database, or empty.
    pub(crate) fn database(self) -> &'a str {
        let database = match self.kind {
            UrlKind::Sentinel => self.path.split_once('/').map_or("", |(_, database)| database),
            _ => self.path,
        };
        database.trim_matches('/')
    }

    /// The name that the sentinels have for their master.
    pub(crate) fn master(self) -> &'a str {
        self.path.split('/').next().unwrap_or_default()
    }

    fn check_path(self) -> Result<(), &'static str> {
        let database = self.database();
        match self.kind {
            UrlKind::Sentinel if self.master().is_empty() => Err("it has no name of a master"),
            UrlKind::Cluster if !["", "0"].contains(&database) => Err("a Cluster has only the database 0"),
            _ if !database.is_empty() && database.parse::<u32>().is_err() => {
                Err("its path is not the number of a database")
            }
            _ => Ok(()),
        }
    }
}

impl UrlKind {
    /// The servers of a scheme in lower case, and whether they use TLS.
    fn of(scheme: &str) -> Option<(Self, bool)> {
        let (server, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
        let tls = match server {
            "redis" | "valkey" => false,
            "rediss" | "valkeys" => true,
            "unix" if kind.is_empty() => return Some((Self::Socket, false)),
            _ => return None,
        };
        let kind = match kind {
            "" => Self::Server,
            "unix" if !tls => Self::Socket,
            "sentinel" => Self::Sentinel,
            "cluster" => Self::Cluster,
            "redlock" => Self::Redlock,
            _ => return None,
        };
        Some((kind, tls))
    }

    fn example(self) -> &'static str {
        match self {
            Self::Server => "redis://user:password@host:6379/0",
            Self::Socket => "unix:///run/redis/redis.sock",
            Self::Sentinel => "redis+sentinel://user:password@host1:26379,host2:26379,host3:26379/mymaster",
            Self::Cluster => "redis+cluster://user:password@host1:6379,host2:6379,host3:6379",
            Self::Redlock => "redis+redlock://user:password@host1:6379,host2:6379,host3:6379",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_of_several_servers_has_one_login_and_each_host() {
        let url = "Redis+Cluster://ann:p%40ss@a, [::1]:7000,[fe80::1]/?prefix=shop";
        let url = ServerUrl::split(url).expect("a URL");
        assert_eq!((url.kind, url.tls, url.login, url.query), (UrlKind::Cluster, false, "ann:p%40ss@", "prefix=shop"));
        assert_eq!(url.hosts().collect::<Vec<_>>(), ["a", "[::1]:7000", "[fe80::1]"]);
        let url = ServerUrl::split("valkeys+redlock://a,b,c/2").expect("a URL");
        assert_eq!((url.kind, url.tls, url.login, url.database()), (UrlKind::Redlock, true, "", "2"));
        let url = ServerUrl::split("redis+sentinel://s1/mymaster/3?sentinel_password=a@b").expect("a URL");
        assert_eq!((url.master(), url.database(), url.query), ("mymaster", "3", "sentinel_password=a@b"));
        let url = ServerUrl::split("unix:///run/a@b.sock?db=3").expect("a URL");
        assert_eq!((url.kind, url.path, url.query), (UrlKind::Socket, "/run/a@b.sock", "db=3"));
    }

    /// Those of one server are in `tests/it/redis/connecting.rs`, with the rest of their errors.
    #[test]
    fn defects_of_urls_are_named_without_passwords() {
        for (rest, defect) in [
            ("", "no host"),
            (":s3cret", "no host"),
            ("ann:s3cret", "port is not a number"),
            (":s3cret@a:0", "port is not a number"),
            (":s3cret@a,b:65536", "port is not a number"),
            (":s3cret@a,,b", "no host"),
            (":s3cret@a,:7000", "no host"),
            ("a,ann:s3cret@b", "before the first host"),
            (":s3,cret@a", "before the first host"),
            (":s3/cret@a", "must be encoded"),
            (":s3?cret@a", "must be encoded"),
            (":s3#cret@a", "must be encoded"),
            ("ann:12#s3cret", "must be encoded"),
            (":s3cret@a/s3cret", "PATH"),
            (":s3cret@a/-1", "PATH"),
        ] {
            for (scheme, end, path) in [
                ("redis+sentinel", "/mymaster", "PATH"),
                ("redis+cluster", "", "a Cluster has only the database 0"),
                ("rediss+redlock", "", "its path is not the number of a database"),
            ] {
                let of_sentinel = !end.is_empty();
                if of_sentinel && defect == path {
                    continue;
                }
                let url = format!("{scheme}://{rest}{end}");
                let text = ServerUrl::split(&url).map(|url| url.path).expect_err(&url);
                let defect = defect.replace("PATH", path);
                assert!(text.contains(&defect) && !text.contains("s3cret") && !text.contains("cret@"), "{url}: {text}");
                assert!(text.contains(&format!("example: `{}://", scheme.replace("rediss", "redis"))), "{text}");
            }
        }
        for url in [
            "unix:",
            "unix://",
            "unix://run/redis.sock",
            "unix:///run/redis.sock#s3cret",
            "unix:///run/redis.sock&pass=s3cret",
            "unix:///run/redis.sockpass=s3cret",
        ] {
            let text = ServerUrl::split(url).map(|url| url.path).expect_err(url);
            assert!(!text.contains("s3cret"), "{url}: {text}");
        }
        for scheme in ["http", "redis+http", "redis+tls", "unix+sentinel", "rediss+unix", "memory"] {
            let text = ServerUrl::split(&format!("{scheme}://s3cret")).map(|url| url.path).expect_err(scheme);
            assert!(text.starts_with("its scheme is not `redis`") && !text.contains("s3cret"), "{scheme}: {text}");
        }
    }
}
