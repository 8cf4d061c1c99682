//! Panics that a test has planned: counted, and not printed.

use std::{
    panic,
    sync::{LazyLock, Mutex, PoisonError},
};

static PLANNED: LazyLock<Mutex<Vec<String>>> = LazyLock::new(|| {
    let otherwise = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let payload = info.payload();
        let said = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
        match said.filter(|said| said.starts_with("planned: ") || said.contains("resumed after panicking")) {
            Some(said) => PLANNED.lock().unwrap_or_else(PoisonError::into_inner).push(said.to_owned()),
            None => otherwise(info),
        }
    }));
    Mutex::default()
});

/// How often a panic said this, since somebody first asked; it begins with `planned: `.
pub(crate) fn panics(said: &str) -> usize {
    assert!(said.starts_with("planned: "), "{said}");
    PLANNED.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|panic| *panic == said).count()
}

/// How often what had panicked was polled again.
pub(crate) fn resumed() -> usize {
    let resumed = |panic: &&String| panic.contains("resumed after panicking");
    PLANNED.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(resumed).count()
}
