//! The link from a rejection to the documentation of the service.

use http::{HeaderValue, Response, header::LINK};

use crate::rejection::Rejection;

/// The header `Link: <..>; rel="describedby"`.
#[derive(Clone, Debug)]
pub(crate) struct DocsLink(HeaderValue);

impl DocsLink {
    /// # Panics
    ///
    /// Panics if the URL has a character that a URL cannot have.
    #[track_caller]
    pub(crate) fn new(url: &str) -> Self {
        let is_url = !url.is_empty() && url.bytes().all(|byte| byte.is_ascii_graphic() && !b"<>\"\\".contains(&byte));
        assert!(is_url, "`ReplayLayer::docs`: {url:?} is not a URL");
        Self(HeaderValue::try_from(format!("<{url}>; rel=\"describedby\"")).expect("visible ASCII"))
    }

    /// Adds the link, if the response rejects a request because of its idempotency key.
    pub(crate) fn add_to<B>(&self, response: &mut Response<B>) {
        if response.extensions().get().is_some_and(Rejection::is_about_idempotency) {
            response.headers_mut().append(LINK, self.0.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rejection::OnReject;

    const URL: &str = "https://api.example.com/idempotency?v=1#keys";

    #[test]
    fn link_is_added_to_rejections_because_of_the_key() {
        let link = |rejection| {
            let mut response = OnReject::default().respond(rejection);
            DocsLink::new(URL).add_to(&mut response);
            response.headers().get(LINK).cloned()
        };
        let expected = format!("<{URL}>; rel=\"describedby\"");
        assert_eq!(link(Rejection::IdempotencyKeyReused).expect("a link"), expected);
        assert_eq!(link(Rejection::Lost), None);
    }

    #[test]
    #[should_panic(expected = "is not a URL")]
    fn url_cannot_end_the_link() {
        DocsLink::new("https://api.example.com/>;rel=next");
    }
}
