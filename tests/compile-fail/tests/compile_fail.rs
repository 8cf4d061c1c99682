//! The mistakes a person makes first do not compile, and the compiler says how to mend them.

use std::{fs, io::Write, path::Path, process::Command};

/// Each new compiler words its part of an error anew. To take over its words:
/// `TRYBUILD=overwrite cargo test -p compile-fail`, and read the difference.
const PINNED: &str = "rustc 1.95.";

/// The mistake, and the words that mend it.
const MISTAKES: [(&str, &[&str]); 9] = [
    (
        "body_extractor_not_last",
        &["is not a key function", "only the last may read the body (`Json`, `Form`, `Bytes`)"],
    ),
    ("by_forgotten", &["is not a key source", "wrap the key function: `LockLayer::new(&locks, by("]),
    ("extractor_without_state", &["is not a key function", "needs `by_with_state(state, ..)`"]),
    ("five_extractors", &["is not a key function", "takes up to four extractors"]),
    ("float_in_a_key", &["`{float}` cannot be part of a lock key", "floats are refused on purpose"]),
    ("float_in_an_answer", &["a float is none: `0.1 + 0.2` and `0.3` would be two locks"]),
    ("namespace_not_static", &["is not an answer of a key function", "the namespace, a `&'static str`"]),
    ("no_extractor", &["is not a key function", "takes up to four extractors, each with its type written out"]),
    ("no_namespace", &["`u64` is not an answer of a key function", "(`(\"order\", id)`)"]),
];

#[test]
fn a_mistake_does_not_compile() {
    let rustc = Command::new("rustc").arg("--version").output().expect("a compiler");
    let version = String::from_utf8_lossy(&rustc.stdout);
    if !version.starts_with(PINNED) {
        // Past the harness, which shows what a passing test says to nobody.
        let skipped = format!("SKIPPED compile-fail: this is {}, the words are those of {PINNED}*\n", version.trim());
        std::io::stderr().write_all(skipped.as_bytes()).expect("stderr");
        return;
    }
    trybuild::TestCases::new().compile_fail("tests/mistakes/*.rs");
}

#[test]
fn the_error_says_how_to_mend_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mistakes");
    for (mistake, words) in MISTAKES {
        let error = fs::read_to_string(folder.join(mistake).with_extension("stderr")).expect(mistake);
        for word in words {
            assert!(error.contains(word), "{mistake}: \"{word}\" is not in\n{error}");
        }
    }
    let kept = fs::read_dir(folder)
        .expect("the folder")
        .filter(|file| file.as_ref().expect("a file").path().extension().is_some_and(|extension| extension == "rs"));
    assert_eq!(kept.count(), MISTAKES.len(), "each mistake is listed here");
}
