//! The text of the log.

use std::{
    io,
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

use tracing::Dispatch;
use tracing_subscriber::{fmt::MakeWriter, layer::SubscriberExt};

/// The text of the log of one thread.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

// === impl Log ===

impl Log {
    /// Records the events of this thread until the guard is dropped.
    pub fn listen(&self) -> tracing::subscriber::DefaultGuard {
        // With a single subscriber, the thread that reaches an event first decides for all threads
        // whether it is recorded.
        static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(tracing_subscriber::registry()));
        LazyLock::force(&SECOND);
        let layer = tracing_subscriber::fmt::layer().with_writer(self.clone()).with_ansi(false);
        tracing::subscriber::set_default(tracing_subscriber::registry().with(layer))
    }

    /// All lines so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
