//! How to behave: what is set is set, what is not is inherited.

use std::time::Duration;

use crate::{
    limits::{
        BODY_IDLE_TIMEOUT, LOCK_DELAY, LOCK_DELAY_MAX, LOCK_WAIT_TIMEOUT, MAX_HOLD, MIN_BODY_RATE, MIN_HOLD_MAX,
        REQUEST_WAIT_TIMEOUT,
    },
    proto::hold_limits::HoldLimits,
};

/// What a log shows of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogKey {
    /// Its text.
    #[default]
    Full,
    /// Its namespace and a hash: parts can be neither read nor guessed, because the hash has a random key for each process. So equal keys
    /// have equal hashes in the log of one process, and others in that of another one. To follow a key through the logs of all
    /// instances, make it with [`LockKey::hashed`](crate::LockKey::hashed) of a secret and its parts, and let it be shown.
    Redacted,
}

/// When a request gives its lock back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseAt {
    /// With the end of its answer: what is complete in memory gives it back before it is sent, a stream holds it to its last frame.
    #[default]
    BodyEnd,
    /// Before its head is sent: for a stream that only reports, or never ends (server-sent events).
    ResponseHead,
}

/// When the body of a request is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestBodyMode {
    /// All of it, before the lock is taken: a client that does not send it keeps nobody waiting.
    #[default]
    Buffer,
    /// By the handler, under the lock: for uploads that are too large to be kept in memory, and for streams in both directions.
    Stream,
}

/// What becomes of a handler whose client has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnDisconnect {
    /// It finishes, in a task of its own, under its lock: half a payment is worse than one that nobody waits for.
    #[default]
    Finish,
    /// It is dropped where it stands, as without a lock; its key stays taken for the lock-delay.
    Cancel,
}

/// What becomes of a handler whose lock is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLost {
    /// It is dropped where it stands, without one poll more; its client is told 503, outcome unknown.
    #[default]
    Abort,
    /// It goes on, and answers as it likes: for handlers whose writes check the fencing token. `max_hold` ends it all the same.
    Continue,
}

/// How a request is answered that has waited in vain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TimeoutStatus {
    /// 409, as if it had not waited: the state of its subject is in the way (RFC 9110).
    #[default]
    Conflict,
    /// 423: its subject is locked (RFC 4918).
    Locked,
    /// 429: this client asks for too much (RFC 6585).
    TooManyRequests,
    /// 503: for clients and proxies that repeat a 503 by themselves, and nothing else (RFC 9110).
    ServiceUnavailable,
}

/// Hands all settings to a macro: those of every call, and those that a request alone can have. Each with its documentation, so that it reads the
/// same wherever it can be set.
macro_rules! settings {
    ($make:ident) => {
        $make! {
            calls {
                /// Waits at most this long for the key, first come first served. Default: zero for a request, which is refused at once
                /// while somebody else has the key; 30 seconds for [`LockManager::lock`](crate::LockManager::lock) outside of a request.
                ///
                /// Waiting is for requests of which each shall have its turn (ten buyers, five items); refusing is for those of
                /// which one is enough (the second tap on "claim").
                ///
                /// A waiter costs memory (and its buffered body), also when its client has left and the server has not noticed, which
                /// HTTP/1.1 does not while a part of the request is unread. At most 256 wait for one key and 10 000 in the process; one
                /// key may have an eighth of what is left of the latter, so that a flood on some keys leaves room for others. Further
                /// waiters are rejected with [`LockError::QueueFull`](crate::LockError::QueueFull).
                wait(limit: ::std::time::Duration),
                /// How long the lock is held if nobody gives it back. Default: [`Watched`](crate::Lease::AutoRenew), as long as its holder lives.
                lease(lease: $crate::Lease),
                /// Holds the lock at most this long, from the grant to the last byte: then it is lost, and what ran under it is broken off, a stream in its
                /// middle. Default: 5 minutes for a request, for a handler that hangs; without end for a [`LockManager::lock`](crate::LockManager::lock), for
                /// a job.
                max_hold(limit: ::std::time::Duration),
                /// Keeps the key taken for at least this long from the grant on, even if the work is done sooner. Default: zero;
                /// at most a day, longer values are reduced to that.
                ///
                /// For the job that three machines start at the same minute, give or take: it runs once. After work that failed (a status of 400 and
                /// more, an error, [`LockGuard::release_after_failure`](crate::LockGuard::release_after_failure)) the key is free at once. A stream is a success
                /// when it was read to its end: let such a job answer in one piece.
                min_hold(least: ::std::time::Duration),
                /// Keeps the key taken for this long after its section ended badly (a panic, a drop, a loss): a statement of it may be on its way
                /// still. Default: a second; at most a day. It should be longer than the slowest statement; zero is for sections whose writes check the
                /// fencing token. (Chubby's lock-delay, Burrows 2006.)
                ///
                /// Much longer is not safer: a client can cause a bad end. One that disconnects from a stream blocks the key for this long, and so does
                /// one that disconnects from a handler under [`OnDisconnect::Cancel`](crate::OnDisconnect::Cancel).
                lock_delay(delay: ::std::time::Duration),
                /// What a log shows of the key. Default: [`Shown`](crate::LogKey::Full). To be redacted where a part is
                /// personal data; to hide it from the store, too, make the key with [`LockKey::hashed`](crate::LockKey::hashed).
                log_key(key: $crate::LogKey),
            }
            requests {
                /// Lets a client choose how long it waits, up to this, by the header `Prefer: wait=10` (whole seconds, RFC 7240). Default: zero,
                /// the header is not read.
                ///
                /// For clients that know better than the route whether their user still looks at the screen. Without the header
                /// [`wait`](crate::LockPolicy::wait) counts; with it that counts no more, be it longer or shorter, and the answer says
                /// `Preference-Applied: wait=10`, or less, if that is all they may. A waiting client costs a place in the line and its
                /// buffered body: choose what you would let everybody wait.
                max_client_wait(max: ::std::time::Duration),
                /// How a request is answered that has waited in vain. Default: [`Conflict`](crate::TimeoutStatus::Conflict), 409.
                ///
                /// For clients and proxies that know what to do with another status. Its problem type stays `timed-out`.
                wait_timeout_status(status: $crate::TimeoutStatus),
                /// When the lock is given back. Default: [`ToEnd`](crate::ReleaseAt::BodyEnd), with the end of the answer.
                ///
                /// Is the work done when the head of a stream is sent? Then nobody need wait for its reader.
                release_at(at: $crate::ReleaseAt),
                /// When the body of the request is read. Default: [`Buffer`](crate::RequestBodyMode::Buffer), all of it, before the lock is taken.
                ///
                /// Is the body too large to be kept in memory, or does client and handler talk in both directions (a stream of gRPC)? Then
                /// [`Stream`](crate::RequestBodyMode::Stream) leaves it to the handler, and the lock is held while it comes: each request of a few bytes can
                /// keep the key taken for a [`body_idle_timeout`](crate::LockPolicy::body_idle_timeout). If its client leaves before the end of the
                /// body was read, the handler is dropped, whatever [`on_disconnect`](crate::LockPolicy::on_disconnect) says.
                ///
                /// Read before the lock, a body may be as long as the route's `DefaultBodyLimit`, which must stand outside of the lock (2 MB if nothing is
                /// set; without Axum always), and at most 64 MiB: 413 beyond it. A `CONNECT` is never waited for: what follows it is a tunnel.
                request_body(mode: $crate::RequestBodyMode),
                /// How long the client may keep us waiting for the next bytes: of the body of its request, or for room for those of a stream that it
                /// reads. Default: 10 seconds.
                ///
                /// How long may a phone in a tunnel keep others from the key? A request whose body
                /// is read before the lock is answered 408 then. Under
                /// [`Stream`](crate::RequestBodyMode::Stream) the handler's read fails, and the
                /// handler chooses the answer. A response stream is cut, and its key free a
                /// lock-delay later. Only the client's time counts: a stream that waits for its own
                /// next frame is not idle, however long it takes;
                /// [`max_hold`](crate::LockPolicy::max_hold) ends that. What is complete in memory
                /// holds no lock when it is sent.
                ///
                /// Of an answer, the server asks for the next frame when buffers of some megabytes have room again: a reader below some 100 to
                /// 300 kB/s is cut, too. For large downloads to slow readers set more, or [`ToHead`](crate::ReleaseAt::ResponseHead).
                body_idle_timeout(limit: ::std::time::Duration),
                /// How many bytes a second the client must send of its request, or read of a stream. Default: 16 KiB; zero: as few as it likes.
                ///
                /// A sign of life every few seconds keeps a key taken as well as none. The rate is taken in windows of as much waiting for the
                /// client as [`body_idle_timeout`](crate::LockPolicy::body_idle_timeout) says, each by itself. A body that comes within one
                /// window is not measured.
                min_body_rate(bytes_per_second: u64),
                /// What becomes of the handler when its client leaves, or a timeout outside of the layer drops it. Default:
                /// [`Finish`](crate::OnDisconnect::Finish).
                ///
                /// It finishes in a task of its own, which has the tracing span that was current
                /// but no task-locals of layers further out. At most 1 024 at once do for one
                /// [`LockManager`](crate::LockManager)
                /// ([`LockManagerBuilder::max_detached`](crate::LockManagerBuilder::max_detached)), and of one
                /// route at most as many as stay free; the rest is dropped. So is one whose request
                /// was not read to its end ([`Stream`](crate::RequestBodyMode::Stream)).
                /// [`max_hold`](crate::LockPolicy::max_hold) ends those, too, and
                /// [`LockManager::shutdown`](crate::LockManager::shutdown) waits for them. Of nested layers the
                /// outermost that holds a lock decides for all; and while an inner one still waits
                /// for its own lock, all of it leaves.
                ///
                /// It multiplies what a client can keep running: over HTTP/2 a stream that is reset counts no more against
                /// `SETTINGS_MAX_CONCURRENT_STREAMS`, and its handler goes on, so one connection may have a thousand at work. Where that matters, put a limit
                /// for each client further out, which counts handlers and not answers, or [`Drop`](crate::OnDisconnect::Cancel).
                on_disconnect(what: $crate::OnDisconnect),
                /// What becomes of the handler when its lock is lost. Default: [`Abort`](crate::OnLost::Abort).
                ///
                /// Does each of its writes check the [fencing token](crate::HeldLock::fencing_token)? Then it may go on.
                on_lost(what: $crate::OnLost),
            }
        }
    };
}

/// The setters of all settings, for a thing that has a method `policy(self, LockPolicy) -> Self`.
macro_rules! request_setters {
    (
        calls { $($(#[$call_doc:meta])* $call:ident($call_arg:ident: $call_type:ty),)* }
        requests { $($(#[$request_doc:meta])* $request:ident($request_arg:ident: $request_type:ty),)* }
    ) => {
        $(
            $(#[$call_doc])*
            pub fn $call(self, $call_arg: $call_type) -> Self {
                self.policy($crate::LockPolicy::new().$call($call_arg))
            }
        )*
        $(
            $(#[$request_doc])*
            pub fn $request(self, $request_arg: $request_type) -> Self {
                self.policy($crate::LockPolicy::new().$request($request_arg))
            }
        )*
    };
}

/// The setters of what a call without HTTP can have.
macro_rules! call_setters {
    (
        calls { $($(#[$doc:meta])* $name:ident($arg:ident: $type:ty),)* }
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
    (
        calls { $($(#[$call_doc:meta])* $call:ident($call_arg:ident: $call_type:ty),)* }
        requests { $($(#[$request_doc:meta])* $request:ident($request_arg:ident: $request_type:ty),)* }
    ) => {
        policy! { $($(#[$call_doc])* $call($call_arg: $call_type),)* $($(#[$request_doc])* $request($request_arg: $request_type),)* }
    };
    ($($(#[$doc:meta])* $name:ident($arg:ident: $type:ty),)*) => {
        /// Settings for requests that need a lock. What is not set is inherited: a route from the nearest
        /// [`LockManagerLayer`](crate::LockManagerLayer), that from its [`LockManager`](crate::LockManager), those from the defaults.
        /// A [`LockManager::lock`](crate::LockManager::lock) in a handler inherits from its request what a call can have.
        ///
        /// ```
        /// # use std::time::Duration;
        /// # use tower_lock::{LockManager, LockPolicy};
        /// # #[cfg(feature = "memory")]
        /// let patient = LockManager::in_memory().with_policy(LockPolicy::new().wait(Duration::from_secs(2)));
        /// ```
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[must_use = "setters consume and return the policy"]
        pub struct LockPolicy {
            $($name: Option<$type>,)*
        }

        impl LockPolicy {
            /// Nothing set: everything is inherited.
            pub const fn new() -> Self {
                Self { $($name: None,)* }
            }

            $(
                $(#[$doc])*
                pub const fn $name(mut self, $arg: $type) -> Self {
                    self.$name = Some($arg);
                    self
                }
            )*

            /// What is set here, else what is set there.
            pub fn or(self, outer: Self) -> Self {
                Self { $($name: self.$name.or(outer.$name),)* }
            }
        }
    };
}

pub(crate) use {call_setters, request_setters, settings};

settings!(policy);

impl LockPolicy {
    /// How long a request waits that has not said so itself.
    pub(crate) fn request_wait(&self) -> Duration {
        self.wait.unwrap_or(REQUEST_WAIT_TIMEOUT)
    }

    /// How long a request may choose to wait. `None`: it is not asked.
    pub(crate) fn longest_client_wait(&self) -> Option<Duration> {
        self.max_client_wait.filter(|max| !max.is_zero())
    }

    /// On which terms a request holds its key.
    pub(crate) fn request_terms(&self) -> HoldLimits {
        HoldLimits { max_hold: Some(self.longest_hold()), ..self.call_terms() }
    }

    pub(crate) fn longest_hold(&self) -> Duration {
        self.max_hold.unwrap_or(MAX_HOLD)
    }

    pub(crate) fn holds_to_head(&self) -> bool {
        self.release_at.unwrap_or_default() == ReleaseAt::ResponseHead
    }

    pub(crate) fn longest_idle(&self) -> Duration {
        self.body_idle_timeout.unwrap_or(BODY_IDLE_TIMEOUT)
    }

    /// In bytes per second.
    pub(crate) fn least_rate(&self) -> u64 {
        self.min_body_rate.unwrap_or(MIN_BODY_RATE)
    }

    pub(crate) fn buffers_request(&self) -> bool {
        self.request_body.unwrap_or_default() == RequestBodyMode::Buffer
    }

    pub(crate) fn finishes_without_client(&self) -> bool {
        self.on_disconnect.unwrap_or_default() == OnDisconnect::Finish
    }

    pub(crate) fn goes_on_when_lost(&self) -> bool {
        self.on_lost.unwrap_or_default() == OnLost::Continue
    }

    pub(crate) fn status_in_vain(&self) -> TimeoutStatus {
        self.wait_timeout_status.unwrap_or_default()
    }

    /// What the calls of a handler inherit: with the wait that its client chose, if it did.
    pub(crate) fn of_request(self, max_client_wait: Option<Duration>) -> Self {
        Self { wait: max_client_wait.or(self.wait), ..self }
    }

    /// How long a call without HTTP waits.
    pub(crate) fn call_wait(&self) -> Duration {
        self.wait.unwrap_or(LOCK_WAIT_TIMEOUT)
    }

    /// On which terms a call without HTTP holds its key.
    pub(crate) fn call_terms(&self) -> HoldLimits {
        HoldLimits {
            lease: self.lease.unwrap_or_default(),
            max_hold: self.max_hold,
            min_hold: self.min_hold.unwrap_or_default().min(MIN_HOLD_MAX),
            lock_delay: self.lock_delay.unwrap_or(LOCK_DELAY).min(LOCK_DELAY_MAX),
        }
    }

    pub(crate) fn shows_key(&self) -> bool {
        self.log_key.unwrap_or_default() == LogKey::Full
    }
}
