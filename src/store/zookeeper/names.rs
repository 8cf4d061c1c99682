//! The names of the nodes. Pure.
//!
//! `<root>/<bucket>/<key>~<id>-<sequence>` is an entry of the line of a key, and `<key>~!` its
//! block. A node for each key would cost two writes more for a key that is used once: the keys
//! share 256 buckets, and the line of a key is the nodes of its bucket that begin with it.

use std::{cmp::Ordering, fmt::Write};

use crate::lock_key::LockKey;

/// The number of buckets. Another one would be another table of locks.
pub(super) const BUCKETS: u32 = 256;

/// The end of the name of a block.
pub(super) const BLOCK: &str = "!";

/// The name of a key in its nodes: no slash, no control character and no `~`. That of a raw key
/// begins with `*`, which no other one has.
pub(super) fn escaped(key: &LockKey) -> String {
    let mut name = String::from(if key.is_raw() { "*" } else { "" });
    for byte in key.as_str().bytes() {
        if byte.is_ascii_alphanumeric() || b"._:-".contains(&byte) {
            name.push(char::from(byte));
        } else {
            let _ = write!(name, "%{byte:02x}");
        }
    }
    name
}

/// The key with this name. `None`: another program has made it.
pub(super) fn key(name: &str) -> Option<LockKey> {
    let (raw, mut rest) = (name.strip_prefix('*'), name);
    rest = raw.unwrap_or(rest);
    let mut bytes = Vec::with_capacity(rest.len());
    while let Some((before, escape)) = rest.split_once('%') {
        bytes.extend(before.as_bytes());
        bytes.push(u8::from_str_radix(escape.get(..2)?, 16).ok()?);
        rest = &escape[2..];
    }
    bytes.extend(rest.as_bytes());
    let text = String::from_utf8(bytes).ok()?;
    Some(if raw.is_some() { LockKey::from_raw_name(&text) } else { LockKey::from_composed(&text) })
}

/// The name of the bucket of a key, by the hash of FNV: the same in every release.
pub(super) fn bucket(name: &str) -> String {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let mixed = (hash ^ (hash >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{:02x}", (mixed >> 40) % u64::from(BUCKETS))
}

/// The id and the sequence in `<id>-<sequence>`. The sequence has 32 bits, and is negative after
/// 2³¹ nodes of a bucket.
pub(super) fn entry(name: &str) -> Option<(&str, i32)> {
    let (id, digits) = name.rsplit_once('-')?;
    match id.strip_suffix('-') {
        Some(id) => Some((id, format!("-{digits}").parse().ok()?)),
        None => Some((id, digits.parse().ok()?)),
    }
}

/// The order of two sequences of a bucket, also if the number has wrapped.
pub(super) fn compare(one: i32, other: i32) -> Ordering {
    one.wrapping_sub(other).cmp(&0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_names_and_back() {
        for key in [
            LockKey::from(("reward", 7, "daily")),
            LockKey::from(("a/b", "~x", "%41", "\u{1f600}\0")),
            LockKey::raw("*raw/x").expect("a name"),
        ] {
            let name = escaped(&key);
            assert!(!name.contains(['/', '~', '\0']) && name.is_ascii(), "{name}");
            assert_eq!(super::key(&name), Some(key));
        }
        assert_eq!(key("a%4"), None);
        assert_eq!(key("a%zz"), None);
        assert_eq!(key("a%ff"), None, "no text");
    }

    #[test]
    fn buckets_are_the_same_in_every_release() {
        assert_eq!([bucket("reward:7:daily"), bucket("")].map(|name| name.len()), [2, 2]);
        let used: std::collections::HashSet<_> = (0..10_000).map(|n| bucket(&format!("item:{n}"))).collect();
        assert_eq!(used.len(), 256);
    }

    #[test]
    fn sequence_may_be_negative_and_wraps() {
        assert_eq!(entry("a:1:2-0000000007"), Some(("a:1:2", 7)));
        assert_eq!(entry("a-b:1:2--2147483648"), Some(("a-b:1:2", i32::MIN)));
        assert_eq!(entry("a:1:2"), None);
        assert_eq!(entry("a-x"), None);
        let orders = [(1, 2), (2, 1), (i32::MAX, i32::MIN), (3, 3)].map(|(one, other)| compare(one, other));
        assert_eq!(orders, [Ordering::Less, Ordering::Greater, Ordering::Less, Ordering::Equal]);
    }
}
