//! The parts of a key: tuples, and the values that they are made of.

use std::{borrow::Cow, fmt, num::NonZero, sync::Arc};

use super::writer::KeyWriter;

/// A tuple that names what is locked: the namespace first, then up to six parts.
///
/// Not to be implemented: whatever is to be a part implements [`KeyPart`].
#[diagnostic::on_unimplemented(
    message = "write `(\"namespace\", part, ..)`: `{Self}` does not name what is locked",
    label = "not a lock key",
    note = "write a tuple whose first element is the namespace, a `&'static str`: `(\"order\", id)`, `(\"nightly\",)`",
    note = "up to six parts follow it: integers, `bool`, `char`, strings and `Uuid` (feature `uuid`); a float is none"
)]
pub trait KeyTuple: sealed::Sealed {
    #[doc(hidden)]
    fn write(&self, key: &mut KeyWriter);
}

mod sealed {
    pub trait Sealed {}
}

/// A value that can be part of a key: it has exactly one text.
///
/// Implemented for integers, `bool`, `char`, strings and, with the feature `uuid`, `Uuid`. Not for floats, on purpose:
/// `0.1 + 0.2` and `0.3` would be two locks, and `NaN` none. Not for `Option`: whether `None` and `""` are the same is for
/// you to say.
///
/// ```
/// use tower_lock::{key::{KeyPart, PartWriter}, LockKey};
///
/// struct FamilyId(u64);
///
/// impl KeyPart for FamilyId {
///     fn write(&self, part: &mut PartWriter<'_>) {
///         self.0.write(part);
///     }
/// }
/// assert_eq!(LockKey::from(("reward", FamilyId(7))).as_str(), "reward:7");
/// ```
#[diagnostic::on_unimplemented(
    message = "use an integer, a string, `bool`, `char` or `Uuid` (feature `uuid`): `{Self}` cannot be part of a lock key",
    label = "not a key part",
    note = "key parts are integers, `bool`, `char`, strings and `Uuid` (feature `uuid`); wrap a type whose `Display` is unique in `key::display(..)`, or implement `KeyPart`",
    note = "floats are refused on purpose: `0.1 + 0.2` and `0.3` would be two locks, `NaN` none"
)]
pub trait KeyPart {
    /// Writes the text of this part; what is special in a key is escaped on the way.
    fn write(&self, part: &mut PartWriter<'_>);
}

/// Takes the text of one part of a key.
#[derive(Debug)]
pub struct PartWriter<'a>(pub(super) &'a mut KeyWriter);

/// A part by its `Display`. Made by [`display`].
#[derive(Clone, Debug)]
pub struct DisplayPart<T>(T);

// === impl KeyTuple ===

macro_rules! key_tuples {
    ($(($($part:ident)*))*) => {$(
        // Not for `&'static str` alone: within a future that is spawned, a compiler does not know how long a text lives.
        impl<$($part: KeyPart),*> sealed::Sealed for (&str, $($part,)*) {}

        impl<$($part: KeyPart),*> KeyTuple for (&str, $($part,)*) {
            #[allow(non_snake_case)]
            fn write(&self, key: &mut KeyWriter) {
                let (namespace, $($part,)*) = self;
                key.namespace(namespace);
                $(key.part($part);)*
            }
        }
    )*};
}

key_tuples! { () (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) }

// === impl KeyPart ===

macro_rules! integers {
    ($($int:ty)*) => {$(
        impl KeyPart for $int {
            fn write(&self, part: &mut PartWriter<'_>) {
                // Digits and a minus sign need no escape.
                part.0.push(itoa::Buffer::new().format(*self));
            }
        }

        impl KeyPart for NonZero<$int> {
            fn write(&self, part: &mut PartWriter<'_>) {
                self.get().write(part);
            }
        }
    )*};
}

integers! { u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize }

impl KeyPart for str {
    fn write(&self, part: &mut PartWriter<'_>) {
        part.text(self);
    }
}

impl KeyPart for String {
    fn write(&self, part: &mut PartWriter<'_>) {
        part.text(self);
    }
}

impl KeyPart for Cow<'_, str> {
    fn write(&self, part: &mut PartWriter<'_>) {
        part.text(self);
    }
}

impl KeyPart for bool {
    fn write(&self, part: &mut PartWriter<'_>) {
        part.text(if *self { "true" } else { "false" });
    }
}

impl KeyPart for char {
    fn write(&self, part: &mut PartWriter<'_>) {
        part.text(self.encode_utf8(&mut [0; 4]));
    }
}

#[cfg(feature = "uuid")]
#[cfg_attr(docsrs, doc(cfg(feature = "uuid")))]
impl KeyPart for uuid::Uuid {
    fn write(&self, part: &mut PartWriter<'_>) {
        part.text(self.hyphenated().encode_lower(&mut Self::encode_buffer()));
    }
}

impl<T: KeyPart + ?Sized> KeyPart for &T {
    fn write(&self, part: &mut PartWriter<'_>) {
        (**self).write(part);
    }
}

impl<T: KeyPart + ?Sized> KeyPart for Box<T> {
    fn write(&self, part: &mut PartWriter<'_>) {
        (**self).write(part);
    }
}

impl<T: KeyPart + ?Sized> KeyPart for Arc<T> {
    fn write(&self, part: &mut PartWriter<'_>) {
        (**self).write(part);
    }
}

impl<T: fmt::Display> KeyPart for DisplayPart<T> {
    fn write(&self, part: &mut PartWriter<'_>) {
        // Our writer takes every text; a `Display` that fails has written what it had.
        let _ = fmt::Write::write_fmt(part, format_args!("{}", self.0));
    }
}

/// A part by its `Display`: for a type of which two values never show the same text.
///
/// ```
/// # use tower_lock::{LockKey, key};
/// let key = LockKey::from(("login", key::display(std::net::Ipv4Addr::LOCALHOST)));
/// assert_eq!(key.as_str(), "login:127.0.0.1");
/// ```
pub fn display<T: fmt::Display>(value: T) -> DisplayPart<T> {
    DisplayPart(value)
}

// === impl PartWriter ===

impl PartWriter<'_> {
    /// Writes a text; what is special in a key is escaped.
    pub fn text(&mut self, text: &str) {
        self.0.push_escaped(text);
    }
}

impl fmt::Write for PartWriter<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.text(text);
        Ok(())
    }
}
