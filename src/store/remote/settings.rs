//! The settings of every networked store, and what makes a connect fail or wait.

use std::time::Duration;

use tokio::time::Instant;

use super::link::RECONNECT_DELAY;
use crate::limits::{
    CONNECT_TIMEOUT, CONNECT_TIMEOUT_MAX, STORE_CALL_TIMEOUT, STORE_CALL_TIMEOUT_MAX, STORE_TIMEOUT_MIN,
};

/// The longest time of a call, and that of a connect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    pub(crate) call: Duration,
    pub(crate) connect: Duration,
}

/// Why a setting cannot be used.
pub(crate) enum InvalidSetting {
    /// A timeout of a builder is out of range.
    Timeout { setting: &'static str, value: Duration },
    /// The URL has another value than the builder.
    Differs(String),
}

/// Error of the test of a server before it is used.
pub(crate) struct SelfTestError<E> {
    pub(crate) error: E,
    /// Whether a retry may succeed: the server may be starting.
    pub(crate) is_transient: bool,
}

/// Between two self-tests. Later than the next connect.
pub(crate) const RETRY_INTERVAL: Duration = RECONNECT_DELAY.saturating_add(Duration::from_millis(10));

impl Timeouts {
    /// Those of a builder, or the defaults.
    pub(crate) fn new(call: Option<Duration>, connect: Option<Duration>) -> Result<Self, InvalidSetting> {
        let checked = |setting, value: Duration| match (STORE_TIMEOUT_MIN..=max(setting)).contains(&value) {
            true => Ok(value),
            false => Err(InvalidSetting::Timeout { setting, value }),
        };
        Ok(Self {
            call: checked("call_timeout", call.unwrap_or(STORE_CALL_TIMEOUT))?,
            connect: checked("connect_timeout", connect.unwrap_or(CONNECT_TIMEOUT))?,
        })
    }

    /// The deadline of a call that begins now. It is shortly before the caller's own timeout, so
    /// that the caller gets the reason.
    pub(crate) fn call_deadline(self) -> Instant {
        Instant::now() + self.call.saturating_sub((self.call / 10).min(Duration::from_millis(20)))
    }
}

/// Repeats the self-test of a server that may be starting, within the time of a connect.
#[cfg(any(feature = "__database", feature = "zookeeper"))]
pub(crate) async fn until_ready<T, E, F: Future<Output = Result<T, SelfTestError<E>>>>(
    timeouts: Timeouts,
    test: impl Fn() -> F,
) -> Result<T, E> {
    let deadline = Instant::now() + timeouts.connect;
    loop {
        match test().await {
            Err(failure) if failure.is_transient && Instant::now() + RETRY_INTERVAL < deadline => {
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
            tested => return tested.map_err(|failure| failure.error),
        }
    }
}

/// The values that a timeout may have, for an error.
pub(crate) fn timeout_range(setting: &str) -> String {
    format!("from {STORE_TIMEOUT_MIN:?} to {:?}", max(setting))
}

fn max(setting: &str) -> Duration {
    if setting == "call_timeout" { STORE_CALL_TIMEOUT_MAX } else { CONNECT_TIMEOUT_MAX }
}

/// The setting of the builder, or that of the URL. If one of two were ignored, two services could
/// lock under different names without an error.
pub(crate) fn same<T: PartialEq>(name: &str, builder: Option<T>, url: Option<T>) -> Result<Option<T>, InvalidSetting> {
    match (builder, url) {
        (Some(builder), Some(url)) if builder != url => {
            Err(InvalidSetting::Differs(format!("its parameter `{name}` is not that of the builder")))
        }
        (builder, url) => Ok(builder.or(url)),
    }
}

impl<E> From<E> for SelfTestError<E> {
    fn from(error: E) -> Self {
        Self { error, is_transient: false }
    }
}
