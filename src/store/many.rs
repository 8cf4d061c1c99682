//! The requests of one call, and their replies.

use std::ops::Deref;

use smallvec::SmallVec;

/// The requests of one call of a store, or their replies, in order. A single one needs no
/// allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Many<T>(SmallVec<[T; 1]>);

/// Iterator over the values of a [`Many`].
#[derive(Debug)]
pub struct IntoIter<T>(smallvec::IntoIter<[T; 1]>);

impl<T> Many<T> {
    /// Returns the only value.
    ///
    /// # Panics
    ///
    /// Panics if there is none, or more than one.
    #[must_use]
    #[track_caller]
    pub fn into_single(self) -> T {
        let mut values = self.0;
        assert!(values.len() == 1, "{} values in place of one", values.len());
        values.pop().expect("counted above")
    }
}

impl<T> Many<T> {
    pub(crate) fn push(&mut self, value: T) {
        self.0.push(value);
    }
}

impl<T> From<T> for Many<T> {
    fn from(value: T) -> Self {
        Self(SmallVec::from_buf([value]))
    }
}

impl<T> FromIterator<T> for Many<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

impl<T> Deref for Many<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> IntoIterator for Many<T> {
    type Item = T;
    type IntoIter = IntoIter<T>;

    fn into_iter(self) -> IntoIter<T> {
        IntoIter(self.0.into_iter())
    }
}

impl<T> Iterator for IntoIter<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.0.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<T> ExactSizeIterator for IntoIter<T> {}
