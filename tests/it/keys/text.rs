//! A key names what is locked: injective, readable, bounded.

use std::collections::HashMap;

use proptest::prelude::*;
use tower_lock::LockKey;

/// Parts that could be confused in the text of a key.
const NASTY: [&str; 17] =
    ["", ":", "%", "a", "%3A", "~", "+", "a:", ":a", "{", "}", " ", "1", "é", "\u{202e}", "\n", "~0123456789abcdef"];

const NAMESPACES: [&str; 6] = ["n", "n:", "", "n:a", "%3A", "~"];

fn nasty_text() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => prop::collection::vec(prop::sample::select(&NASTY[..]), 0..4).prop_map(|texts| texts.concat()),
        1 => any::<String>(),
        1 => "[:%~+{}a-c]{0,8}",
        1 => "[a:%é]{200,300}",
    ]
}

fn part_list() -> impl Strategy<Value = (&'static str, Vec<String>)> {
    (prop::sample::select(&NAMESPACES[..]), prop::collection::vec(nasty_text(), 0..5))
}

/// One text, split at some of its separators in two ways.
fn two_splits() -> impl Strategy<Value = (Vec<String>, Vec<String>)> {
    let pieces = prop::collection::vec(("[a:%3A~]{0,3}", any::<bool>(), any::<bool>()), 1..6);
    pieces.prop_map(|pieces| {
        let join = |cut: fn(&(String, bool, bool)) -> bool| {
            let mut parts = vec![String::new()];
            for piece in &pieces {
                let last = parts.last_mut().expect("at least one");
                last.push_str(&piece.0);
                if cut(piece) {
                    parts.push(String::new());
                } else {
                    last.push(':');
                }
            }
            parts
        };
        (join(|piece| piece.1), join(|piece| piece.2))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    /// Guarantee: G14.
    #[test]
    fn distinct_part_lists_have_distinct_texts((a_space, a) in part_list(), (b_space, b) in part_list(), (c, d) in two_splits()) {
        let (one, two) = (LockKey::from_parts(a_space, &a), LockKey::from_parts(b_space, &b));
        prop_assert_eq!((a_space, &a) == (b_space, &b), one.as_str() == two.as_str(), "{} {}", one, two);
        let (one, two) = (LockKey::from_parts("n", &c), LockKey::from_parts("n", &d));
        prop_assert_eq!(c == d, one.as_str() == two.as_str(), "{:?} and {:?}: {} {}", c, d, one, two);
    }

    #[test]
    fn similar_part_lists_have_distinct_texts((space, parts) in part_list(), at in any::<prop::sample::Index>(), text in nasty_text()) {
        // One part more, one less, one split, two joined: all that a client could try.
        let key = LockKey::from_parts(space, &parts);
        let mut longer = parts.clone();
        longer.insert(at.index(parts.len() + 1), text.clone());
        prop_assert_ne!(&key, &LockKey::from_parts(space, &longer));
        if parts.len() >= 2 {
            let mut joined = parts.clone();
            let last = joined.pop().expect("two");
            joined.last_mut().expect("one").push_str(&format!(":{last}"));
            prop_assert_ne!(&key, &LockKey::from_parts(space, &joined));
        }
    }

    #[test]
    fn key_text_is_bounded_and_printable((space, parts) in part_list(), long in "\\PC{0,400}") {
        for key in [LockKey::from_parts(space, &parts), LockKey::from((space, &long)), LockKey::hashed((space, &long))] {
            prop_assert!(key.as_str().len() <= 256);
            prop_assert!(!key.as_str().contains(|c: char| c.is_control() || c.is_whitespace()), "{:?}", key.as_str());
        }
    }

    #[test]
    fn numbers_equal_their_text_as_parts(n in any::<i128>(), m in any::<u64>()) {
        prop_assert_eq!(LockKey::from(("n", n, m)), LockKey::from(("n", n.to_string(), m.to_string())));
    }
}

#[test]
fn short_lists_of_special_characters_are_distinct() {
    let mut lists: Vec<Vec<&str>> = vec![vec![]];
    for a in NASTY {
        lists.push(vec![a]);
        for b in NASTY {
            lists.push(vec![a, b]);
            lists.extend(NASTY.map(|c| vec![a, b, c]));
        }
    }
    let mut texts = HashMap::new();
    for list in &lists {
        let key = LockKey::from_parts("n", list);
        if let Some(other) = texts.insert(key.as_str().to_owned(), list) {
            panic!("{list:?} and {other:?} both give {key}");
        }
    }
    assert_eq!(texts.len(), 1 + 17 + 17 * 17 + 17 * 17 * 17);
}

/// A client cannot write the mark of a hash.
#[test]
fn no_part_imitates_the_hash_of_a_longer_key() {
    let long = LockKey::from(("n", "x".repeat(400)));
    let (_, spelled) = long.as_str().split_once(':').expect("a part");
    assert_ne!(LockKey::from(("n", spelled)).as_str(), long.as_str());
    let hashed = LockKey::hashed(("n", "x"));
    let (_, spelled) = hashed.as_str().split_once(':').expect("a part");
    assert_ne!(LockKey::from(("n", spelled)).as_str(), hashed.as_str());
}
