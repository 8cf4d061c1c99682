//! Values of settings.

/// Form of a key in logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogKey {
    /// The text of the key.
    #[default]
    Full,
    /// The namespace of the key and a hash.
    ///
    /// The hash is keyed with a random secret of the process, so the parts can be neither read nor
    /// guessed. Equal keys have equal hashes in the log of one process, and different hashes in the
    /// logs of two processes. To follow a key through the logs of all instances, use
    /// [`LockKey::hashed`](crate::LockKey::hashed) with a secret, and log it in full.
    Redacted,
}

/// Time at which a request releases its lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseAt {
    /// At the end of the response body.
    ///
    /// A body that is complete in memory releases the lock before it is sent. A stream holds the
    /// lock until its last frame.
    #[default]
    BodyEnd,
    /// Before the response head is sent.
    ///
    /// For streams that only report progress or never end (server-sent events).
    ResponseHead,
}

/// Time at which the body of a request is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestBodyMode {
    /// Before the lock is acquired.
    ///
    /// A client that does not send its body blocks no other request.
    #[default]
    Buffer,
    /// By the handler, under the lock.
    ///
    /// For uploads that do not fit in memory, and for streams in both directions.
    Stream,
}

/// Action on a handler when its client disconnects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnDisconnect {
    /// The handler finishes under its lock, in a task of its own.
    ///
    /// A half-done payment is worse than one whose response is discarded.
    #[default]
    Finish,
    /// The handler is dropped, as it would be without a lock. Its key stays blocked for the
    /// lock-delay.
    Cancel,
}

/// Action on a handler when its lock is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLost {
    /// The handler is dropped and not polled again. Its client gets 503 with the outcome `unknown`.
    #[default]
    Abort,
    /// The handler continues, and its response is sent. `max_hold` still ends it.
    ///
    /// Only for handlers whose every write checks the fencing token.
    Continue,
}
