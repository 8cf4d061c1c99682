//! Frequent mistakes do not compile, and the compiler message names the fix.

use std::{fs, io::Write, path::Path, process::Command};

/// Compilers change the text of their messages. To record the new text, run `TRYBUILD=overwrite
/// cargo test -p compile-fail` and review the difference.
const PINNED: &str = "rustc 1.95.";

/// The file, and texts of its message. The first one is in the first line.
const CASES: [(&str, &[&str]); 25] = [
    (
        "body_extractor_not_last",
        &[
            "let only the last one read the body",
            "`Json<u64>` is not an extractor of this key function",
            "the last may read the body (`Json`, `Form`, `Bytes`)",
        ],
    ),
    ("from_fn_forgotten", &["write `key::from_fn(..)`", "is not a key source", "wrap the key function"]),
    (
        "closure_as_a_field",
        &["write `key::from_fields(\"order\", key::path_param(\"id\"))`", "for a key function use `key::from_fn("],
    ),
    (
        "deserialize_forgotten",
        &[
            "derive `Deserialize` for its type",
            "`Json<Claim>` is not an extractor",
            "Path<Claim>` is not an extractor",
            "a type with `#[derive(Deserialize)]`",
        ],
    ),
    (
        "extractor_without_state",
        &["or pass the state: `State<Db>` is not an extractor", "needs `key::from_fn_with_state(state, ..)`"],
    ),
    ("five_extractors", &["take up to four extractors", "is not a key function"]),
    ("five_fields", &["a tuple of two to four fields"]),
    (
        "float_as_a_field",
        &["write `key::from_fields(\"order\", key::path_param(\"id\"))`", "a field is `key::header(\"..\")`"],
    ),
    (
        "float_in_a_key",
        &["use an integer, a string", "`{float}` cannot be part of a lock key", "floats are refused on purpose"],
    ),
    (
        "float_in_an_answer",
        &[
            "with integers, strings, `bool` or `char` as parts (`Uuid` needs the feature `uuid`)",
            "a `&'static str` (`(\"order\", id)`)",
        ],
    ),
    ("float_in_several_keys", &["use an integer, a string", "cannot be part of a lock key"]),
    ("float_in_an_extension", &["use an integer, a string", "`f64` cannot be part of a lock key"]),
    (
        "name_as_a_field",
        &["write `key::from_fields(\"order\", key::path_param(\"id\"))`", "a field is `key::header(\"..\")`"],
    ),
    (
        "namespace_not_static",
        &[
            "return `(\"namespace\", part, ..)`",
            "is not a return type of a key function",
            "the namespace, a `&'static str`",
        ],
    ),
    ("no_extractor", &["`Claim` is not an extractor of this key function"]),
    (
        "no_namespace",
        &["return `(\"namespace\", part, ..)`", "`u64` is not a return type of a key function", "(`(\"order\", id)`)"],
    ),
    ("redis_without_its_feature", &["`tower_lock::RedisStore`", "gated behind the `redis` feature"]),
    (
        "service_not_clone",
        &["the trait bound `Counter: Clone` is not satisfied", "annotating `Counter` with `#[derive(Clone)]`"],
    ),
    (
        "several_keys_as_a_scope",
        &["a `ReplayLayer` keeps one answer for each of its keys", "put a `LockLayer` with `key::all([..])` inside"],
    ),
    ("test_util_without_its_feature", &["`tower_lock::test_util`", "gated behind the `test-util` feature"]),
    ("value_without_a_key", &["`u64` has no lock key", "a type of your own around it (`struct FamilyId(u64)`)"]),
    (
        "newtype_in_a_key",
        &["return `(\"namespace\", part, ..)`", "a type of your own that implements `tower_lock::key::KeyPart`"],
    ),
    (
        "text_as_a_key",
        &[
            "write `(\"namespace\", part, ..)`: `&str` is not a lock key",
            "`String` is not a lock key",
            "a `&'static str`: `(\"order\", id)`, `(\"nightly\",)`",
        ],
    ),
    (
        "uuid_without_serde",
        &["Path<Uuid>` is not an extractor of this key function", "`Uuid` has it with its feature `serde`"],
    ),
    ("uuid_without_its_feature", &["turn on the feature `uuid` for `Uuid`: `Uuid` cannot be part of a lock key"]),
];

#[test]
fn misuse_does_not_compile() {
    let rustc = Command::new("rustc").arg("--version").output().expect("a compiler");
    let version = String::from_utf8_lossy(&rustc.stdout);
    if !version.starts_with(PINNED) {
        // Past the test harness, which hides the output of a passing test.
        let skipped =
            format!("SKIPPED compile-fail: this is {}, the recorded messages are of {PINNED}*\n", version.trim());
        std::io::stderr().write_all(skipped.as_bytes()).expect("stderr");
        return;
    }
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}

#[test]
fn compiler_message_names_the_fix() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ui");
    for (case, texts) in CASES {
        let error = fs::read_to_string(folder.join(case).with_extension("stderr")).expect(case);
        let first_line = error.lines().next().expect("a line");
        assert!(first_line.contains(texts[0]), "{case}: the first line does not name the fix: {first_line}");
        for text in texts {
            assert!(error.contains(text), "{case}: \"{text}\" is not in\n{error}");
        }
    }
    let kept = fs::read_dir(folder)
        .expect("the folder")
        .filter(|file| file.as_ref().expect("a file").path().extension().is_some_and(|extension| extension == "rs"));
    assert_eq!(kept.count(), CASES.len(), "each case is listed here");
}
