//! Calls of application code whose panics are contained.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code of the application. Its panic is reported by the panic hook and ends here, because
/// `Drop` comes here, too.
#[cfg_attr(not(any(feature = "tracing", feature = "metrics")), allow(dead_code, reason = "there is no such code"))]
pub(crate) fn isolated(call: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(call)) {
        // The payload may panic when it is dropped.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(payload)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Panics again when it is dropped.
    struct PanicOnDrop;

    impl Drop for PanicOnDrop {
        fn drop(&mut self) {
            panic!("once more");
        }
    }

    #[test]
    fn panics_of_subscribers_and_recorders_are_contained() {
        isolated(|| panic!("a subscriber"));
        isolated(|| std::panic::panic_any(PanicOnDrop));
        struct CallsWhenDropped;
        impl Drop for CallsWhenDropped {
            fn drop(&mut self) {
                isolated(|| panic!("while its thread unwinds"));
            }
        }
        assert!(
            catch_unwind(|| {
                let _calls = CallsWhenDropped;
                panic!("a handler");
            })
            .is_err()
        );
    }
}
