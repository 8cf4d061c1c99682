//! The parts of a key: tuples and their elements.

use std::{borrow::Cow, fmt, num::NonZero, sync::Arc};

use super::writer::KeyWriter;

/// Tuple that identifies a lock: the namespace, then up to six parts.
#[diagnostic::on_unimplemented(
    message = "write `(\"namespace\", part, ..)`: `{Self}` is not a lock key",
    label = "not a lock key",
    note = "write a tuple whose first element is the namespace, a `&'static str`: `(\"order\", id)`, `(\"nightly\",)`",
    note = "up to six parts follow it: integers, `bool`, `char` and strings (`Uuid` needs the feature `uuid`)"
)]
pub trait KeyTuple {
    fn write(&self, key: &mut KeyWriter);
}

/// A writer of a tuple.
///
/// The tuple is the type parameter. A bound `T: KeyTuple` would have the same self type as the
/// `T: Into<LockKey>` of the caller, and the compiler would report that one, without this text.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "write `(\"namespace\", part, ..)`: `{T}` is not a lock key",
    label = "not a lock key",
    note = "write a tuple whose first element is the namespace, a `&'static str`: `(\"order\", id)`, `(\"nightly\",)`",
    note = "up to six parts follow it: integers, `bool`, `char` and strings (`Uuid` needs the feature `uuid`)",
    note = "for a key of any number of parts use `LockKey::from_parts`, for the key of another program `LockKey::raw`"
)]
pub trait FromTuple<T> {
    fn from_tuple(tuple: &T) -> Self;
}

/// Value that can be part of a key. Equal values have equal texts, and different values have
/// different texts.
///
/// The trait is implemented for integers, `bool`, `char`, strings and, with the feature `uuid`,
/// `Uuid`. It is not implemented for floats, because `0.1 + 0.2` and `0.3` would be two locks. It
/// is not implemented for `Option`, because only the application knows whether `None` and `""` are
/// equal.
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
    message = "use an integer, a string, `bool` or `char`, or turn on the feature `uuid` for `Uuid`: `{Self}` cannot be part of a lock key",
    label = "not a key part",
    note = "key parts are integers, `bool`, `char`, strings, and `Uuid` with the feature `uuid` of `tower-lock`; wrap a type whose `Display` is unique in `key::display(..)`, or implement `KeyPart`",
    note = "floats are refused on purpose: `0.1 + 0.2` and `0.3` would be two locks, `NaN` none"
)]
pub trait KeyPart {
    /// Writes the text of this part. The writer escapes special characters.
    fn write(&self, part: &mut PartWriter<'_>);
}

/// Writer for one part of a key.
#[derive(Debug)]
pub struct PartWriter<'a>(pub(super) &'a mut KeyWriter);

/// Part whose text is the `Display` of a value.
struct DisplayPart<T>(T);

// === impl KeyTuple ===

macro_rules! key_tuples {
    ($(($($part:ident)*))*) => {$(
        // Not only for `&'static str`: within a spawned future the compiler does not infer it.
        impl<$($part: KeyPart),*> KeyTuple for (&str, $($part,)*) {
            #[allow(non_snake_case)]
            fn write(&self, key: &mut KeyWriter) {
                let (namespace, $($part,)*) = self;
                key.namespace(namespace);
                $(key.part($part);)*
            }
        }

        impl<$($part: KeyPart),*> FromTuple<(&str, $($part,)*)> for KeyWriter {
            fn from_tuple(tuple: &(&str, $($part,)*)) -> Self {
                let mut key = Self::empty();
                tuple.write(&mut key);
                key
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
                // Digits and a minus sign are not escaped.
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

macro_rules! texts {
    ($($text:ty)*) => {$(
        impl KeyPart for $text {
            fn write(&self, part: &mut PartWriter<'_>) {
                part.text(self);
            }
        }
    )*};
}

texts! { str String Cow<'_, str> }

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

macro_rules! pointers {
    ($($pointer:ty)*) => {$(
        impl<T: KeyPart + ?Sized> KeyPart for $pointer {
            fn write(&self, part: &mut PartWriter<'_>) {
                (**self).write(part);
            }
        }
    )*};
}

pointers! { &T Box<T> Arc<T> }

impl<T: fmt::Display> KeyPart for DisplayPart<T> {
    fn write(&self, part: &mut PartWriter<'_>) {
        // The writer never fails; a `Display` that fails has written a prefix.
        let _ = fmt::Write::write_fmt(part, format_args!("{}", self.0));
    }
}

/// Creates a part whose text is the `Display` of a value. Different values of the type must have
/// different texts.
///
/// ```
/// # use tower_lock::{LockKey, key};
/// let key = LockKey::from(("login", key::display(std::net::Ipv4Addr::LOCALHOST)));
/// assert_eq!(key.as_str(), "login:127.0.0.1");
/// ```
pub fn display<T: fmt::Display>(value: T) -> impl KeyPart {
    DisplayPart(value)
}

// === impl KeyWriter ===

impl KeyWriter {
    pub(crate) fn part(&mut self, part: &impl KeyPart) {
        self.push(":");
        part.write(&mut PartWriter(self));
    }
}

// === impl PartWriter ===

impl PartWriter<'_> {
    /// Writes a text, and escapes its special characters.
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
