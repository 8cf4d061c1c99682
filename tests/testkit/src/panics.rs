//! Planned panics of a test: counted, and not printed.

use std::{
    panic,
    sync::{LazyLock, Mutex, PoisonError},
};

static PLANNED: LazyLock<Mutex<Vec<String>>> = LazyLock::new(|| {
    let otherwise = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let payload = info.payload();
        let message = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
        match message.filter(|message| message.starts_with("planned: ") || message.contains("resumed after panicking"))
        {
            Some(message) => PLANNED.lock().unwrap_or_else(PoisonError::into_inner).push(message.to_owned()),
            None => otherwise(info),
        }
    }));
    Mutex::default()
});

/// The number of panics with this message since the first call; it begins with `planned: `.
pub fn panics(message: &str) -> usize {
    assert!(message.starts_with("planned: "), "{message}");
    PLANNED.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|panic| *panic == message).count()
}

/// The number of polls after a panic.
pub fn resumed() -> usize {
    let resumed = |panic: &&String| panic.contains("resumed after panicking");
    PLANNED.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(resumed).count()
}
