//! The requests of one call, and their replies.

use std::{iter::Chain, ops::Deref, option, slice, vec};

/// The requests of one call of a store, or their replies, in order. A single one needs no
/// allocation.
#[derive(Clone, Debug)]
pub struct Many<T>(Values<T>);

#[derive(Clone, Debug)]
enum Values<T> {
    /// The common case, which is moved often.
    One(T),
    Several(Vec<T>),
}

impl<T> Many<T> {
    /// Returns the only value.
    ///
    /// # Panics
    ///
    /// Panics if there is none, or more than one.
    #[must_use]
    #[track_caller]
    pub fn into_single(self) -> T {
        match self.0 {
            Values::One(value) => value,
            Values::Several(mut values) => {
                assert!(values.len() == 1, "{} values in place of one", values.len());
                values.remove(0)
            }
        }
    }

    /// Applies a function to each value, in order.
    #[must_use]
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Many<U> {
        Many(match self.0 {
            Values::One(value) => Values::One(f(value)),
            Values::Several(values) => Values::Several(values.into_iter().map(f).collect()),
        })
    }

    pub(crate) fn push(&mut self, value: T) {
        if let Values::Several(values) = &mut self.0 {
            return values.push(value);
        }
        let first = std::mem::replace(&mut self.0, Values::Several(Vec::new()));
        self.0 = Values::Several(Self(first).into_iter().chain([value]).collect());
    }
}

impl<T> From<T> for Many<T> {
    fn from(value: T) -> Self {
        Self(Values::One(value))
    }
}

impl<T> FromIterator<T> for Many<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let mut values = values.into_iter();
        match (values.next(), values.next()) {
            (Some(first), None) => Self::from(first),
            (first, second) => Self(Values::Several(first.into_iter().chain(second).chain(values).collect())),
        }
    }
}

impl<T> Deref for Many<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Values::One(value) => slice::from_ref(value),
            Values::Several(values) => values,
        }
    }
}

impl<T> IntoIterator for Many<T> {
    type Item = T;
    type IntoIter = Chain<option::IntoIter<T>, vec::IntoIter<T>>;

    fn into_iter(self) -> Self::IntoIter {
        let (one, several) = match self.0 {
            Values::One(value) => (Some(value), Vec::new()),
            Values::Several(values) => (None, values),
        };
        one.into_iter().chain(several)
    }
}
