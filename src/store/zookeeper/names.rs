//! The names of the nodes. Pure.
//!
//! `<root>/<bucket>/<key>~<name>-<sequence>` is an entry of the line of a key, and
//! `<key>~!-<sequence>` its block. A node for each key would cost two writes more for a key that is
//! used once: the keys share 256 buckets, and the line of a key is the nodes of its bucket that
//! begin with it.
//!
//! The sequence is the number of entries that the bucket had before. The fence of an entry is the
//! clock when its bucket was made, in microseconds, and its sequence: fences rise in the order of
//! the entries, and over an ensemble that has lost all data. (The number of a transaction is not
//! in the order of the clock: each election adds 2³² to it.)

use std::fmt::Write;

use crate::lock_key::LockKey;

/// The number of buckets. Another one would be another table of locks.
pub(super) const BUCKETS: u32 = 256;

/// After this sequence a bucket is replaced by a new one, as soon as it has no node. ZooKeeper
/// counts to 2³¹, and then gives the same sequence again and again, so that two entries could both
/// be the first one. A bucket that is still not empty after one and a half times this sequence
/// takes no further entry until it is.
pub(super) const LAST_SEQUENCE: i32 = 1 << 30;

/// The data of a root, with the number of this format.
pub(super) const ROOT_MARK: &[u8] = b"tower-lock 1";

/// In place of the name of an entry: a block.
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

/// The name and the sequence in `<name>-<sequence>`.
pub(super) fn entry(name: &str) -> Option<(&str, i32)> {
    let (name, digits) = name.rsplit_once('-')?;
    Some((name, digits.parse().ok()?))
}

/// The sequence of the entry at this path.
pub(super) fn sequence(path: &str) -> Option<i32> {
    entry(path).map(|(_, sequence)| sequence)
}

/// The bucket of a node.
pub(super) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// Whether this is the path of a node that may be a root.
pub(super) fn is_root(path: &str) -> bool {
    let is_name = |name: &str| !matches!(name, "" | "." | "..") && !name.contains(char::is_control);
    let mut names = path.split('/');
    names.next() == Some("") && path.len() <= 500 && names.next().is_some_and(is_name) && names.all(is_name)
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
    fn entry_has_an_id_and_a_sequence() {
        assert_eq!(entry("a:1:2-0000000007"), Some(("a:1:2", 7)));
        assert_eq!(entry("a-b:1:2-2147483647"), Some(("a-b:1:2", i32::MAX)));
        assert_eq!(entry("a:1:2"), None);
        assert_eq!(entry("a-x"), None);
        assert_eq!((sequence("/r/07/key~a-0000000007"), parent("/r/07/key~a-0000000007")), (Some(7), "/r/07"));
    }

    #[test]
    fn root_is_a_path() {
        assert!(["/a", "/shop/locks", "/shop.locks"].iter().all(|root| is_root(root)));
        for root in ["", "/", "a", "/a/", "/a//b", "/a/../b", "/.", "/a\n"] {
            assert!(!is_root(&root.replace("\\n", "\n")), "{root}");
        }
    }
}
