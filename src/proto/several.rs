//! The steps of a caller that acquires several keys: all of them, or none.
//!
//! All keys are requested together first, and none but the first one is waited for. If one is
//! busy, the smaller ones are kept and the greater ones are released. Then the busy key is waited
//! for alone, and the rest is requested together again. So a caller that holds a key waits for
//! greater ones only: there is no cycle of callers. Each queue is in first-come order, so no caller
//! starves.

use std::ops::Range;

/// How far the caller is. The keys are numbered in their order.
#[derive(Clone, Debug)]
pub struct Several {
    count: usize,
    /// The keys below this one are held.
    held: usize,
    waits: bool,
    /// The first key that is not held was busy: it is waited for alone.
    is_busy: bool,
    /// Without a wait: the keys were requested once before.
    is_repeated: bool,
}

/// What follows from the results of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// All keys are held.
    Done,
    /// The next step is requested.
    Step,
    /// The caller does not wait, and is rejected with the error of the first key that is not held.
    /// All keys are released.
    Reject,
}

impl Several {
    /// Nothing is held.
    pub fn new(count: usize, waits: bool) -> Self {
        Self { count, held: 0, waits, is_busy: false, is_repeated: false }
    }

    /// The keys that are requested together now. The first one waits if the caller does; the others
    /// never wait.
    pub fn step(&self) -> Range<usize> {
        self.held..if self.is_busy && self.waits { self.held + 1 } else { self.count }
    }

    /// The step has ended: this many of its keys, from the first one on, are held. The others are
    /// released or were not granted. `is_busy`: the next key was busy, when it was requested.
    ///
    /// While the first key of a step is waited for, no other one is held: the step then ends with
    /// that key alone.
    pub fn replied(&mut self, granted: usize, is_busy: bool) -> Next {
        self.is_busy = is_busy;
        self.held += granted;
        if self.held == self.count {
            return Next::Done;
        }
        // Without a wait one repeat: two callers may have refused each other.
        if is_busy && !self.waits && std::mem::replace(&mut self.is_repeated, true) {
            return Next::Reject;
        }
        Next::Step
    }

    /// A key that is held was lost before the others were granted: all were released. The caller
    /// starts over within its wait.
    pub fn lost(&mut self) {
        (self.held, self.is_busy) = (0, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_keys_need_one_step() {
        for waits in [true, false] {
            let mut several = Several::new(3, waits);
            assert_eq!(several.step(), 0..3);
            assert_eq!(several.replied(3, false), Next::Done);
        }
    }

    #[test]
    fn a_busy_key_is_waited_for_alone_and_then_the_rest_together() {
        let mut several = Several::new(5, true);
        assert_eq!(several.replied(2, true), Next::Step);
        assert_eq!(several.step(), 2..3);
        assert_eq!(several.replied(1, false), Next::Step);
        assert_eq!(several.step(), 3..5);
        assert_eq!(several.replied(2, false), Next::Done);
    }

    /// The first key of each step waits, so that each step gets one.
    #[test]
    fn keys_that_are_all_busy_need_a_step_each() {
        let mut several = Several::new(5, true);
        let mut steps = 1;
        while several.replied(1, steps % 2 == 0) == Next::Step {
            steps += 1;
            assert!(steps <= 5, "{several:?}");
        }
        assert_eq!(steps, 5);
    }

    #[test]
    fn a_caller_without_a_wait_tries_twice() {
        let mut several = Several::new(3, false);
        assert_eq!(several.replied(1, true), Next::Step);
        assert_eq!(several.step(), 1..3);
        assert_eq!(several.replied(0, true), Next::Reject);
        let mut several = Several::new(3, false);
        assert_eq!(several.replied(1, true), Next::Step);
        assert_eq!(several.replied(2, false), Next::Done);
    }

    #[test]
    fn a_loss_starts_over() {
        let mut several = Several::new(3, true);
        assert_eq!(several.replied(1, true), Next::Step);
        several.lost();
        assert_eq!(several.step(), 0..3);
    }
}
