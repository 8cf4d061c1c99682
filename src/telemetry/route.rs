//! The route of a request in logs and metrics.

#[cfg(feature = "axum")]
use std::fmt::Display;

use http::Extensions;
#[cfg(feature = "axum")]
use http::Method;

/// The matched path of a request, else the name of its layer, else `none`. Never a path that a
/// client chose.
#[derive(Clone, Debug, Default)]
pub(crate) struct Route {
    #[cfg(feature = "axum")]
    matched: Option<axum::extract::MatchedPath>,
    name: Option<&'static str>,
}

impl Route {
    #[cfg_attr(not(feature = "axum"), expect(unused_variables, reason = "only a router knows what matched"))]
    pub(crate) fn from_extensions(extensions: &Extensions, name: Option<&'static str>) -> Self {
        Self {
            #[cfg(feature = "axum")]
            matched: extensions.get().cloned(),
            name,
        }
    }

    /// Logs an error in the setup of the service, because the reader of the response may not be its
    /// operator.
    #[cfg(feature = "axum")]
    pub(crate) fn log_error(&self, method: &Method, error: impl Display) {
        tracing::error!(target: "tower_lock", %method, route = self.as_str(), "{error}");
    }

    pub(crate) fn as_str(&self) -> &str {
        #[cfg(feature = "axum")]
        if let Some(matched) = &self.matched {
            return matched.as_str();
        }
        self.name.unwrap_or("none")
    }
}
