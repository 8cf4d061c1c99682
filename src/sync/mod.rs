//! The mutex of the crate, replaced in tests by the one of a scheduler.

pub(crate) mod oneshot;
#[cfg(all(test, tower_lock_shuttle))]
pub(crate) mod schedules;

use std::ops::{Deref, DerefMut};

#[cfg(not(all(test, tower_lock_shuttle)))]
use std::sync as imp;

#[cfg(all(test, tower_lock_shuttle))]
use shuttle::sync as imp;

/// A mutex that ignores poisoning.
///
/// No code of users runs while it is locked, so its value is consistent even if a thread panics.
/// `Drop` implementations lock it and must not panic.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(imp::Mutex<T>);

pub(crate) struct MutexGuard<'a, T>(imp::MutexGuard<'a, T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
