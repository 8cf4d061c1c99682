//! Runs a test under many thread schedules, chosen by shuttle.
//!
//! Threads are switched at every mutex. A failure prints its schedule; `SCHEDULE=<text>` in the
//! environment runs it again.

use std::sync::Arc;

/// Default of the variable `SCHEDULES`.
const SCHEDULES: usize = 1_000;

pub(crate) fn check(test: impl Fn() + Send + Sync + 'static) {
    // Timers are created and never fire: this runtime is not driven.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let _runtime = runtime.enter();
    let schedules = std::env::var("SCHEDULES").map_or(SCHEDULES, |text| text.parse().expect("a number"));
    match std::env::var("SCHEDULE") {
        Ok(schedule) => shuttle::replay(test, &schedule),
        Err(_) => {
            let test = Arc::new(test);
            let again = Arc::clone(&test);
            shuttle::check_random(move || again(), schedules);
            shuttle::check_pct(move || test(), schedules, 3);
        }
    }
}
