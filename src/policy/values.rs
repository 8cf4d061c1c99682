//! Values of settings.

/// How a key appears in logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogKey {
    /// The text of the key.
    #[default]
    Full,
    /// The namespace of the key and a hash.
    ///
    /// The hash has a random key for each process, so parts can be neither read nor guessed. Equal
    /// keys have equal hashes in the log of one process, and different hashes in the logs of two.
    /// To follow a key through the logs of all instances, use
    /// [`LockKey::hashed`](crate::LockKey::hashed) with a secret, and log it in full.
    Redacted,
}

/// When a request releases its lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseAt {
    /// At the end of the response body.
    ///
    /// A body that is complete in memory releases the lock before it is sent. A stream holds the
    /// lock until its last frame.
    #[default]
    BodyEnd,
    /// Before the response head is sent: for streams that only report progress, or never end
    /// (server-sent events).
    ResponseHead,
}

/// When the body of a request is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestBodyMode {
    /// Before the lock is acquired: a client that does not send its body blocks no other request.
    #[default]
    Buffer,
    /// By the handler, under the lock: for uploads that are too large for memory, and for streams
    /// in both directions.
    Stream,
}

/// What happens to a handler when its client disconnects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnDisconnect {
    /// It finishes under its lock, in a task of its own: a half-done payment is worse than one
    /// whose response is discarded.
    #[default]
    Finish,
    /// It is dropped, as it would be without a lock. Its key stays blocked for the lock-delay.
    Cancel,
}

/// What happens to a handler when its lock is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLost {
    /// It is dropped and not polled again. Its client gets 503 with the outcome `unknown`.
    #[default]
    Abort,
    /// It continues and its response is sent: for handlers whose writes check the fencing token.
    /// `max_hold` still ends it.
    Continue,
}
