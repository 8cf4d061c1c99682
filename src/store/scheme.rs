//! The scheme of a URL, which names a store. Pure.
//!
//! A text without a scheme may be a password, or have one: an error shows no part of it, except for
//! one that is certainly a host.

#[cfg(any(feature = "mysql", feature = "zookeeper"))]
use std::collections::HashMap;

const EXAMPLE: &str = "example: `redis://user:password@host:6379/0`";

/// The scheme of a URL in lower case, and the rest after `://`; or the defect of the URL.
pub(crate) fn split_scheme(url: &str) -> Result<(String, &str), String> {
    let url = url.trim();
    if url.is_empty() {
        return Err("it is empty (example: `redis://host:6379`)".to_owned());
    }
    if let Some((scheme, rest)) = url.split_once("://") {
        return Ok((scheme.to_ascii_lowercase(), rest));
    }
    // The part after the last `@` contains no password that is followed by a host.
    let host = url.rsplit('@').next().unwrap_or_default();
    let host = host.strip_prefix("redis:").unwrap_or(host).trim_start_matches('/');
    Err(if is_host(host) {
        format!("it has no scheme; did you mean `redis://{host}`?")
    } else {
        format!("it has no scheme ({EXAMPLE})")
    })
}

/// The parameters of a query, each of them once. A plus is a plus: the query of such a URL is not
/// that of a form.
#[cfg(any(feature = "mysql", feature = "zookeeper"))]
pub(crate) fn parameters(query: &str) -> Result<HashMap<String, String>, &'static str> {
    let mut all = HashMap::new();
    for (name, value) in form_urlencoded::parse(query.replace('+', "%2B").as_bytes()).into_owned() {
        if all.insert(name, value).is_some() {
            return Err("one of its parameters is set twice");
        }
    }
    Ok(all)
}

/// A part of a URL without its escapes. A plus is a plus: the query of such a URL is not that of a
/// form.
#[cfg(any(feature = "postgres", feature = "zookeeper"))]
pub(crate) fn decoded(part: &str) -> String {
    let form = format!("part={}", part.replace('+', "%2B").replace('&', "%26"));
    form_urlencoded::parse(form.as_bytes()).map(|(_, part)| part.into_owned()).collect()
}

/// Whether this is `localhost`, or a name with a dot and a port. `ann:12345` may be a user and a
/// password, and `s3.cret` a password.
fn is_host(text: &str) -> bool {
    let (host, rest) = text.split_once(':').unwrap_or((text, ""));
    let is_name = host.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    let is_port = rest.chars().all(|c| c.is_ascii_digit() || c == '/') && !rest.starts_with('/');
    is_name && is_port && (host == "localhost" || host.contains('.') && !rest.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_without_a_scheme_is_shown_only_if_it_is_a_host() {
        for (url, shown) in [
            ("localhost", Some("localhost")),
            ("redis:localhost:6379", Some("localhost:6379")),
            ("redis:/10.0.0.1:6379/2", Some("10.0.0.1:6379/2")),
            ("ann:s3cret@redis.internal:6379", Some("redis.internal:6379")),
            ("s3cret", None),
            ("s3.cret", None),
            ("p@s3.cret", None),
            ("p@s3cret", None),
            ("ann:12345", None),
            ("ann:s3cret", None),
            ("s3.cret:p@w", None),
            ("s3.cret:/12", None),
            ("redis:6379", None),
        ] {
            let defect = split_scheme(url).expect_err(url);
            match shown {
                Some(host) => assert_eq!(defect, format!("it has no scheme; did you mean `redis://{host}`?"), "{url}"),
                None => assert_eq!(defect, format!("it has no scheme ({EXAMPLE})"), "{url}"),
            }
        }
        assert_eq!(split_scheme(" Redis+Cluster://a,b "), Ok(("redis+cluster".to_owned(), "a,b")));
    }
}
