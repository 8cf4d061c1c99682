//! User and password of a connection that change. Cloud services give passwords that end after some
//! minutes: a new connection needs the one of that moment.

use std::{error::Error, fmt, future::Future, panic::AssertUnwindSafe, sync::Arc};

use futures_util::{FutureExt, future::BoxFuture};
use tower::BoxError;

use crate::store::error::error_chain;

/// User and password of a connection, as a function of a store builder returns them.
///
/// `Debug` shows the user alone.
#[derive(Clone)]
pub struct Credentials {
    pub(crate) user: String,
    pub(crate) password: String,
}

/// The function of the user, which each connect calls.
#[derive(Clone)]
pub(crate) struct Login(Arc<dyn Fn() -> LoginFuture + Send + Sync>);

type LoginFuture = BoxFuture<'static, Result<Credentials, BoxError>>;

/// The function has failed.
#[derive(Debug, thiserror::Error)]
#[error("the function `credentials` failed: {}", shown(&**.0))]
pub(crate) struct LoginError(BoxError);

/// The characters of an error that are shown.
const MAX_ERROR_CHARS: usize = 1_000;
pub(crate) const LOGIN_HINT: &str = "does the service that gives the password reply?";
pub(crate) const TWO_LOGINS: &str =
    "user and password come from `credentials` of the builder: remove them from the URL";

/// The text of an error of the application, which may have a whole page of a service.
fn shown(error: &(dyn Error + 'static)) -> String {
    error_chain(error).chars().take(MAX_ERROR_CHARS).collect()
}

impl Credentials {
    /// Creates credentials of this user with this password.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self { user: user.into(), password: password.into() }
    }
}

impl Login {
    pub(crate) fn new<F, T>(function: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = Result<Credentials, BoxError>> + Send + 'static,
    {
        Self(Arc::new(move || Box::pin(function())))
    }

    /// A panic is an error: the task that connects would end without a result, and another one
    /// would begin at once.
    pub(crate) async fn get(&self) -> Result<Credentials, LoginError> {
        let call = AssertUnwindSafe(async { (self.0)().await });
        call.catch_unwind().await.unwrap_or_else(|_| Err("it panicked".into())).map_err(LoginError)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login")
    }
}
