//! The clock that measures leases.

use std::{cell::Cell, time::Duration};

use crate::limits::{DRIFT_DIVISOR, DRIFT_ROUNDING};

/// An instant of that clock, in nanoseconds. Pure code takes it as an argument.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootInstant(u64);

/// Monotonic clock that measures leases, and includes the time in which the machine is suspended.
///
/// It is `CLOCK_BOOTTIME` on Linux. Elsewhere it is `Instant`, which excludes suspend on some
/// systems. With the feature `test-util`, it is Tokio's clock while a test has paused that clock,
/// and it can jump.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    #[cfg(any(test, feature = "test-util"))]
    jumped: std::sync::Arc<std::sync::atomic::AtomicU64>,
}

/// The time of one event: read on first use, and constant from then on. A clock read is a large
/// part of the cost of a local handoff, and not every event needs it.
#[derive(Debug)]
pub struct LazyNow<'a> {
    clock: Option<&'a Clock>,
    read: Cell<Option<BootInstant>>,
}

impl BootInstant {
    /// The latest instant.
    pub const FAR_FUTURE: Self = Self(u64::MAX);

    /// The instant this many nanoseconds after the origin of the clock.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    pub(crate) const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The instant this much later, at most [`FAR_FUTURE`](Self::FAR_FUTURE).
    #[must_use]
    pub fn saturating_add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(nanos(duration)))
    }

    /// The duration since an earlier instant; zero if that one is later.
    pub const fn saturating_duration_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl<'a> LazyNow<'a> {
    /// The time of this clock on first use.
    pub fn new(clock: &'a Clock) -> Self {
        Self { clock: Some(clock), read: Cell::new(None) }
    }

    /// A fixed time.
    #[cfg(any(test, feature = "__internals"))]
    pub fn fixed(instant: BootInstant) -> Self {
        Self { clock: None, read: Cell::new(Some(instant)) }
    }

    pub(crate) fn get(&self) -> BootInstant {
        self.read.get().unwrap_or_else(|| {
            let now = self.clock.map(Clock::now).unwrap_or_default();
            self.read.set(Some(now));
            now
        })
    }
}

impl Clock {
    /// The current time.
    #[cfg(not(any(test, feature = "test-util")))]
    #[expect(clippy::unused_self, reason = "tests have more than one clock")]
    pub fn now(&self) -> BootInstant {
        boot::now()
    }

    /// The current time.
    ///
    /// A production build may have the feature by mistake. So Tokio's clock is used only if a test
    /// has paused or advanced it.
    #[cfg(any(test, feature = "test-util"))]
    #[expect(clippy::disallowed_methods, reason = "compared with Tokio's clock")]
    pub fn now(&self) -> BootInstant {
        use std::{
            sync::{LazyLock, atomic::Ordering},
            time::Instant,
        };

        static START: LazyLock<(Instant, BootInstant)> = LazyLock::new(|| (Instant::now(), boot::now()));
        let (start, booted) = *START;
        let before = Instant::now();
        let tokio = tokio::time::Instant::now().into_std();
        let is_test_time = tokio < before || Instant::now() < tokio;
        // A paused clock may be before the start.
        let instant = BootInstant(booted.0.saturating_sub(nanos(start.saturating_duration_since(tokio))))
            .saturating_add(tokio.saturating_duration_since(start));
        let now = if is_test_time { instant } else { with_suspend(instant, boot::now()) };
        BootInstant(now.0.saturating_add(self.jumped.load(Ordering::Relaxed)))
    }

    /// Moves the clock forward as a suspend of the machine does: leases advance, and timers do not.
    #[cfg(any(test, feature = "test-util"))]
    pub fn jump(&self, by: Duration) {
        self.jumped.fetch_add(nanos(by), std::sync::atomic::Ordering::Relaxed);
    }
}

/// A difference that is larger than the time between two reads was a suspend, which Tokio's clock
/// excludes.
#[cfg(any(test, feature = "test-util"))]
fn with_suspend(tokio: BootInstant, boot: BootInstant) -> BootInstant {
    const PAUSE: Duration = Duration::from_millis(10);
    if boot.saturating_duration_since(tokio) > PAUSE { boot } else { tokio }
}

mod boot {
    use super::BootInstant;

    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub(super) fn now() -> BootInstant {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let whole = u64::try_from(now.tv_sec).unwrap_or(0).saturating_mul(1_000_000_000);
        BootInstant(whole.saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0)))
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    #[expect(clippy::disallowed_methods, reason = "this is the clock")]
    pub(super) fn now() -> BootInstant {
        use std::{sync::OnceLock, time::Instant};
        static START: OnceLock<Instant> = OnceLock::new();
        let start = *START.get_or_init(Instant::now);
        BootInstant(super::nanos(start.elapsed()))
    }
}

/// The part of a lease that a holder may rely on, because clocks drift. It counts from *before* the
/// request was sent (I3).
pub(crate) fn usable_part(lease: Duration) -> Duration {
    lease.saturating_sub(lease / DRIFT_DIVISOR).saturating_sub(DRIFT_ROUNDING)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_saturate_at_the_end_of_the_clock() {
        let instant = BootInstant::from_nanos(5);
        assert_eq!(instant.saturating_add(Duration::MAX), BootInstant::FAR_FUTURE);
        assert_eq!(instant.saturating_duration_since(instant.saturating_add(Duration::from_secs(1))), Duration::ZERO);
        assert_eq!(
            instant.saturating_add(Duration::from_nanos(2)).saturating_duration_since(instant),
            Duration::from_nanos(2)
        );
    }

    /// A test cannot suspend the machine. It can compare the clock with the uptime of the system.
    #[test]
    fn production_clock_counts_from_boot() {
        let before = boot::now();
        let uptime = std::fs::read_to_string("/proc/uptime");
        let after = boot::now();
        assert!(before <= after);
        if let Ok(uptime) = uptime {
            let uptime: f64 = uptime.split(' ').next().expect("two numbers").parse().expect("a number");
            let seconds =
                |instant: BootInstant| instant.saturating_duration_since(BootInstant::default()).as_secs_f64();
            assert!(seconds(before) - 1.0 <= uptime && uptime <= seconds(after) + 1.0, "{uptime}, {before:?}");
        }
    }

    #[test]
    fn unpaused_clock_is_the_production_clock() {
        let before = boot::now();
        let now = Clock::default().now();
        let after = boot::now();
        let pause = Duration::from_millis(10);
        assert!(
            before <= now.saturating_add(pause) && now <= after.saturating_add(pause),
            "{before:?}, {now:?}, {after:?}"
        );

        let at = |ms| BootInstant::default().saturating_add(Duration::from_millis(ms));
        assert_eq!(with_suspend(at(1_000), at(61_000)), at(61_000), "suspended for a minute");
        assert_eq!(with_suspend(at(1_000), at(1_001)), at(1_000), "read shortly after");
        assert_eq!(with_suspend(at(1_000), at(999)), at(1_000));
    }

    #[tokio::test(start_paused = true)]
    async fn test_clock_follows_tokio_and_can_jump() {
        let clock = Clock::default();
        let start = clock.now();
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(clock.now().saturating_duration_since(start), Duration::from_secs(3));
        clock.clone().jump(Duration::from_secs(30));
        assert_eq!(clock.now().saturating_duration_since(start), Duration::from_secs(33));
    }
    #[test]
    fn drift_is_subtracted_from_a_lease() {
        assert_eq!(usable_part(Duration::from_secs(30)), Duration::from_millis(29_698));
        assert_eq!(usable_part(Duration::from_millis(1)), Duration::ZERO, "no usable part");
    }
}
