//! Settings of layers and calls, and their inheritance.

mod values;

use std::time::Duration;

use http::StatusCode;

pub use self::values::{LogKey, OnDisconnect, OnLost, ReleaseAt, RequestBodyMode};
use crate::{
    limits::{
        BODY_IDLE_TIMEOUT, LOCK_DELAY, LOCK_DELAY_MAX, LOCK_WAIT_TIMEOUT, MAX_HOLD, MIN_BODY_RATE, MIN_HOLD_MAX,
        REQUEST_WAIT_TIMEOUT,
    },
    proto::hold_limits::HoldLimits,
};

/// Passes all settings to a macro: those of every call, and those of requests only.
///
/// Each setting has its documentation here, because it can be set in several places. Settings
/// without `checked by` accept every value.
macro_rules! settings {
    ($make:ident) => {
        $make! {
            calls {
                /// Sets the maximum time that a request waits for the key. Waiters are served in
                /// order of arrival.
                ///
                /// Default: zero for a request, so that it is rejected at once while the key is
                /// held. Outside of a request, [`LockManager::lock`](crate::LockManager::lock)
                /// waits 30 seconds.
                ///
                /// Set a wait if each request must be processed (ten buyers, five items). Keep zero
                /// if one of them is enough (the second tap on "claim").
                ///
                /// A waiter uses memory for itself and its buffered body until the server notices
                /// that its client has disconnected. Over HTTP/1.1 the server notices nothing while
                /// a part of the request is unread. At most 256 waiters are queued for one key, and
                /// 10,000 for one [`LockManager`](crate::LockManager) and its clones. One key may
                /// have an eighth of the remaining capacity, so that a flood on some keys leaves
                /// capacity for others. Further waiters are rejected with
                /// [`LockError::QueueFull`](crate::LockError::QueueFull).
                wait(limit: ::std::time::Duration),
                /// Sets the lease: how long the lock is held if it is not released.
                ///
                /// Default: [`Lease::AutoRenew`](crate::Lease::AutoRenew). The lease is renewed
                /// while the process lives.
                lease(lease: $crate::Lease),
                /// Sets the maximum time from the grant to the release. After this time the lock is
                /// lost, and the handler or the stream under it is aborted.
                ///
                /// A request usually releases its lock at the end of the response body
                /// ([`release_at`](crate::LockPolicy::release_at)).
                ///
                /// Default: 5 minutes for a request, because a handler may hang. No limit for
                /// [`LockManager::lock`](crate::LockManager::lock) outside of a request, because a
                /// job may be long.
                max_hold(limit: ::std::time::Duration),
                /// Sets the minimum time from the grant until the key is free, also if the lock is
                /// released earlier.
                ///
                /// Default: zero.
                ///
                /// Use it for a job that several machines start at about the same time and that
                /// must run once. After a failure (a status of 400 or higher, an error,
                /// [`LockGuard::release_after_failure`](crate::LockGuard::release_after_failure))
                /// the key is free at once. A stream succeeds only if its client reads it to the
                /// end, so such a job should respond with a complete body.
                ///
                /// # Panics
                ///
                /// Panics if the time is longer than a day.
                #[track_caller]
                min_hold(duration: ::std::time::Duration) checked by min_hold_in_bounds,
                /// Sets the lock-delay: how long the key stays blocked after its section has ended
                /// abnormally (a panic, a drop, a loss). A statement of the section may still be in
                /// flight during this time.
                ///
                /// Default: 1 second. The lock-delay should be longer than the slowest statement.
                /// Zero is for sections whose writes check the fencing token. The name is that of
                /// Chubby (Burrows, 2006).
                ///
                /// Do not set a much longer time, because a client can cause an abnormal end. A
                /// disconnect from a stream blocks the key for this time, and so does a disconnect
                /// from a handler with [`OnDisconnect::Cancel`](crate::OnDisconnect::Cancel).
                ///
                /// # Panics
                ///
                /// Panics if the time is longer than a day.
                #[track_caller]
                lock_delay(delay: ::std::time::Duration) checked by lock_delay_in_bounds,
                /// Sets how the key appears in logs.
                ///
                /// Default: [`LogKey::Full`](crate::LogKey::Full). Redact keys whose parts are
                /// personal data. To hide them from the store, too, use
                /// [`LockKey::hashed`](crate::LockKey::hashed).
                log_key(key: $crate::LogKey),
            }
            requests {
                /// Sets the longest wait that a client may choose with the header `Prefer: wait=10`
                /// (whole seconds, RFC 7240).
                ///
                /// Default: zero. The header is then ignored.
                ///
                /// A client may know better than the route whether its user still waits. Its choice
                /// replaces [`wait`](crate::LockPolicy::wait), also if it is shorter. The response
                /// contains `Preference-Applied: wait=10`, or less if this maximum is less. Each
                /// waiting client uses a queue entry and memory for its buffered body, so set a
                /// time that all clients may wait.
                max_client_wait(max: ::std::time::Duration),
                /// Sets the status of the response to a request whose wait has timed out.
                ///
                /// Default: 409, and 429 with `at_most`. Set 423, 429 or 503 if clients or proxies
                /// expect it. The problem type is `timed-out` in each case.
                ///
                /// # Panics
                ///
                /// Panics if the status is neither 4xx nor 5xx.
                #[track_caller]
                wait_timeout_status(status: ::http::StatusCode) checked by error_status,
                /// Sets when the lock is released.
                ///
                /// Default: [`ReleaseAt::BodyEnd`](crate::ReleaseAt::BodyEnd). Use
                /// [`ReleaseAt::ResponseHead`](crate::ReleaseAt::ResponseHead) if the work is done
                /// when the head of a stream is sent. A slow client then does not hold the lock.
                release_at(at: $crate::ReleaseAt),
                /// Sets when the body of the request is read.
                ///
                /// Default: [`RequestBodyMode::Buffer`](crate::RequestBodyMode::Buffer). The whole
                /// body is read before the lock is acquired. It may be as long as the
                /// `DefaultBodyLimit` of the route, and at most 64 MiB. The `DefaultBodyLimit` must
                /// be outside of the lock layer. If none is set, the limit is 2 MiB, and without
                /// Axum it always is. Longer bodies are rejected with 413. The body of a `CONNECT`
                /// request is not read, because a tunnel follows it.
                ///
                /// [`RequestBodyMode::Stream`](crate::RequestBodyMode::Stream) leaves the body to
                /// the handler: for bodies that do not fit in memory, and for streams in both
                /// directions (gRPC). The lock is held while the body arrives, so each request of a
                /// few bytes can block the key for a
                /// [`body_idle_timeout`](crate::LockPolicy::body_idle_timeout). A handler whose
                /// client disconnects before the end of the body was read is dropped, also with
                /// [`OnDisconnect::Finish`](crate::OnDisconnect::Finish).
                request_body(mode: $crate::RequestBodyMode),
                /// Sets the maximum time that a client may be idle: it sends no byte of its request
                /// body, or reads no byte of a response stream.
                ///
                /// Default: 10 seconds. A client that has lost its network can block the key for
                /// this time.
                ///
                /// After this time, a request whose body is read before the lock is rejected with
                /// 408. With [`RequestBodyMode::Stream`](crate::RequestBodyMode::Stream) the read
                /// in the handler fails, and the handler chooses the response. A response stream is
                /// aborted, and its key is free a lock-delay later. Only time in which the client
                /// is waited for counts. A stream whose handler has no next frame yet is not idle;
                /// [`max_hold`](crate::LockPolicy::max_hold) limits it. A response that is complete
                /// in memory holds no lock while it is sent.
                ///
                /// The server requests the next frame of a response when its buffer of some
                /// megabytes has space again. A client that reads at less than about 100 to 300
                /// kB/s is therefore aborted, too. For large downloads to slow readers use a longer
                /// timeout, or [`ReleaseAt::ResponseHead`](crate::ReleaseAt::ResponseHead).
                body_idle_timeout(limit: ::std::time::Duration),
                /// Sets the minimum rate, in bytes per second, at which the client must send its
                /// request body or read a response stream.
                ///
                /// Default: 16 KiB per second. Zero disables the check.
                ///
                /// Without a minimum, a client that sends one byte every few seconds blocks the key
                /// for as long as it wants. The rate is measured in windows. A window ends when the
                /// times in which the client was waited for add up to one
                /// [`body_idle_timeout`](crate::LockPolicy::body_idle_timeout). A body that is
                /// complete within one window is not measured.
                min_body_rate(bytes_per_second: u64),
                /// Sets what happens to the handler when its client disconnects, or when a timeout
                /// outside of the layer drops it.
                ///
                /// Default: [`OnDisconnect::Finish`](crate::OnDisconnect::Finish). The handler
                /// finishes in a task of its own. The task has the tracing span that was current,
                /// but no task-locals of outer layers. [`max_hold`](crate::LockPolicy::max_hold)
                /// applies, and [`LockManager::shutdown`](crate::LockManager::shutdown) waits for
                /// the handler.
                ///
                /// At most 1,024 handlers of one [`LockManager`](crate::LockManager) finish at the
                /// same time
                /// ([`LockManagerBuilder::max_detached`](crate::LockManagerBuilder::max_detached)).
                /// One route may have at most as many as remain free. Further handlers are dropped.
                /// A handler is also dropped if its request was not read to the end
                /// ([`RequestBodyMode::Stream`](crate::RequestBodyMode::Stream)).
                ///
                /// With nested lock layers the outermost one that holds a lock decides. If an inner
                /// layer is still waiting for its lock, the whole request is cancelled.
                ///
                /// `Finish` increases the work that one client can start: over HTTP/2 a stream that
                /// was reset does not count towards `SETTINGS_MAX_CONCURRENT_STREAMS` while its
                /// handler still runs. If that matters, add an outer limit per client that counts
                /// handlers and not responses, or use
                /// [`OnDisconnect::Cancel`](crate::OnDisconnect::Cancel).
                on_disconnect(action: $crate::OnDisconnect),
                /// Sets what happens to the handler when its lock is lost.
                ///
                /// Default: [`OnLost::Abort`](crate::OnLost::Abort). Set
                /// [`OnLost::Continue`](crate::OnLost::Continue) only if each write of the handler
                /// checks the [fencing token](crate::HeldLock::fencing_token).
                on_lost(action: $crate::OnLost),
            }
        }
    };
}

/// Setters of all settings, for a type with a method `policy(self, LockPolicy) -> Self`.
macro_rules! request_setters {
    (calls { $($call:tt)* } requests { $($request:tt)* }) => {
        $crate::policy::call_setters! { calls { $($call)* $($request)* } requests {} }
    };
}

/// Setters of the settings of every call.
macro_rules! call_setters {
    (
        calls { $($(#[$doc:meta])* $name:ident($arg:ident: $type:ty) $(checked by $check:ident)?,)* }
        requests { $($rest:tt)* }
    ) => {
        $(
            $(#[$doc])*
            pub fn $name(self, $arg: $type) -> Self {
                self.policy($crate::LockPolicy::new().$name($arg))
            }
        )*
    };
}

macro_rules! policy {
    (calls { $($call:tt)* } requests { $($request:tt)* }) => {
        policy! { $($call)* $($request)* }
    };
    ($($(#[$doc:meta])* $name:ident($arg:ident: $type:ty) $(checked by $check:ident)?,)*) => {
        /// Settings of requests and calls that acquire a lock.
        ///
        /// A setting that is not set is inherited. A route inherits from the nearest
        /// [`LockManagerLayer`](crate::LockManagerLayer), then from outer ones, then from the
        /// [`LockManager`](crate::LockManager), and last from the defaults. A call of
        /// [`LockManager::lock`](crate::LockManager::lock) in a handler inherits from its request.
        ///
        /// ```
        /// # use std::time::Duration;
        /// # use tower_lock::{LockManager, LockPolicy};
        /// # #[cfg(feature = "memory")]
        /// let locks = LockManager::in_memory()
        ///     .with_policy(LockPolicy::new().wait(Duration::from_secs(2)));
        /// ```
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[must_use = "setters consume and return the policy"]
        pub struct LockPolicy {
            $($name: Option<$type>,)*
        }

        impl LockPolicy {
            /// Creates a policy that inherits every setting.
            pub const fn new() -> Self {
                Self { $($name: None,)* }
            }

            $(
                $(#[$doc])*
                pub const fn $name(mut self, $arg: $type) -> Self {
                    self.$name = Some($($check)?($arg));
                    self
                }
            )*

            /// Returns this policy, with each setting that it does not set taken from `outer`.
            pub fn or(self, outer: Self) -> Self {
                Self { $($name: self.$name.or(outer.$name),)* }
            }
        }
    };
}

pub(crate) use {call_setters, request_setters, settings};

settings!(policy);

/// The status of a request that timed out: it must not look like a success or a redirect.
#[track_caller]
const fn error_status(status: StatusCode) -> StatusCode {
    assert!(matches!(status.as_u16(), 400..=599), "`wait_timeout_status` must be a 4xx or 5xx status");
    status
}

/// A time that was silently reduced would be noticed only when a key is free too early.
#[track_caller]
const fn min_hold_in_bounds(time: Duration) -> Duration {
    assert!(time.as_nanos() <= MIN_HOLD_MAX.as_nanos(), "`min_hold` is at most a day");
    time
}

#[track_caller]
const fn lock_delay_in_bounds(time: Duration) -> Duration {
    assert!(time.as_nanos() <= LOCK_DELAY_MAX.as_nanos(), "`lock_delay` is at most a day");
    time
}

impl LockPolicy {
    /// How long a request waits whose client did not choose.
    pub(crate) fn request_wait(&self) -> Duration {
        self.wait.unwrap_or(REQUEST_WAIT_TIMEOUT)
    }

    /// How long a client may choose to wait. `None`: it may not choose.
    pub(crate) fn client_wait_limit(&self) -> Option<Duration> {
        self.max_client_wait.filter(|max| !max.is_zero())
    }

    pub(crate) fn request_hold_limits(&self) -> HoldLimits {
        HoldLimits { max_hold: Some(self.request_max_hold()), ..self.call_hold_limits() }
    }

    pub(crate) fn request_max_hold(&self) -> Duration {
        self.max_hold.unwrap_or(MAX_HOLD)
    }

    pub(crate) fn releases_at_head(&self) -> bool {
        self.release_at.unwrap_or_default() == ReleaseAt::ResponseHead
    }

    pub(crate) fn idle_timeout(&self) -> Duration {
        self.body_idle_timeout.unwrap_or(BODY_IDLE_TIMEOUT)
    }

    /// In bytes per second.
    pub(crate) fn min_rate(&self) -> u64 {
        self.min_body_rate.unwrap_or(MIN_BODY_RATE)
    }

    pub(crate) fn buffers_request(&self) -> bool {
        self.request_body.unwrap_or_default() == RequestBodyMode::Buffer
    }

    pub(crate) fn finishes_after_disconnect(&self) -> bool {
        self.on_disconnect.unwrap_or_default() == OnDisconnect::Finish
    }

    pub(crate) fn continues_when_lost(&self) -> bool {
        self.on_lost.unwrap_or_default() == OnLost::Continue
    }

    pub(crate) fn timeout_status(&self, default: StatusCode) -> StatusCode {
        self.wait_timeout_status.unwrap_or(default)
    }

    /// The settings that the calls of a handler inherit, with the wait that its client chose.
    pub(crate) fn for_handler(self, client_wait: Option<Duration>) -> Self {
        Self { wait: client_wait.or(self.wait), ..self }
    }

    /// How long a call outside of a request waits.
    pub(crate) fn call_wait(&self) -> Duration {
        self.wait.unwrap_or(LOCK_WAIT_TIMEOUT)
    }

    /// The hold limits of a call outside of a request.
    pub(crate) fn call_hold_limits(&self) -> HoldLimits {
        HoldLimits {
            lease: self.lease.unwrap_or_default(),
            max_hold: self.max_hold,
            min_hold: self.min_hold.unwrap_or_default(),
            lock_delay: self.lock_delay.unwrap_or(LOCK_DELAY),
        }
    }

    /// How the key appears in logs, if the policy sets it.
    pub(crate) fn log_key_setting(&self) -> Option<LogKey> {
        self.log_key
    }

    pub(crate) fn shows_key(&self) -> bool {
        self.log_key.unwrap_or_default() == LogKey::Full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_day_are_accepted() {
        let day = Duration::from_secs(24 * 60 * 60);
        let limits = LockPolicy::new().min_hold(day).lock_delay(day).call_hold_limits();
        assert_eq!((limits.min_hold, limits.lock_delay), (day, day));
    }

    #[test]
    #[should_panic(expected = "`min_hold` is at most a day")]
    fn longer_minimum_hold_panics() {
        let _ = LockPolicy::new().min_hold(Duration::from_secs(24 * 60 * 60 + 1));
    }

    #[test]
    #[should_panic(expected = "`lock_delay` is at most a day")]
    fn longer_lock_delay_panics() {
        let _ = LockPolicy::new().lock_delay(Duration::MAX);
    }

    #[test]
    fn the_timeout_status_is_any_client_or_server_error() {
        assert_eq!(LockPolicy::new().timeout_status(StatusCode::CONFLICT), StatusCode::CONFLICT);
        for code in [400, 423, 499, 500, 599] {
            let status = StatusCode::from_u16(code).expect("a status");
            assert_eq!(LockPolicy::new().wait_timeout_status(status).timeout_status(StatusCode::CONFLICT), status);
        }
    }

    #[test]
    #[should_panic(expected = "must be a 4xx or 5xx status")]
    fn a_timeout_status_cannot_be_a_success() {
        let _ = LockPolicy::new().wait_timeout_status(StatusCode::ACCEPTED);
    }
}
