//! What of other crates can be seen in our public API: each of them can force a major version on us.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::Path,
    process::{Command, Stdio},
};

use serde_json::Value;
use tower_lock_faults::skipped;

/// The one format of rustdoc's JSON that is understood here: that of Rust 1.95.
const FORMAT: u64 = 57;
/// The allowed ones.
const LIST: &str = "docs/public-types.txt";

/// What rustdoc knows of the crate.
struct Api {
    json: Value,
    /// Of each crate the one or more versions that are built.
    versions: BTreeMap<String, BTreeSet<String>>,
}

// === impl Api ===

impl Api {
    /// As docs.rs builds it. `None`, said past the harness: this toolchain cannot.
    fn read() -> Option<Self> {
        let rustdoc = at_root("tests/it/support/rustdoc.sh");
        let told = Command::new(&rustdoc)
            .args(["-Z", "unstable-options", "--output-format", "json", "--version"])
            .stderr(Stdio::null())
            .output();
        if !told.is_ok_and(|told| told.status.success()) {
            skipped("the types of others in the public API", "a rustdoc that writes JSON");
            return None;
        }
        let tests = env::current_exe().expect("a path");
        let target = tests.ancestors().nth(3).expect("target/debug/deps/it");
        let built = Command::new(env!("CARGO"))
            .args(["rustdoc", "--quiet", "-p", "tower-lock", "--lib", "--all-features", "--target-dir"])
            .arg(target)
            .args(["--", "-Z", "unstable-options", "--output-format", "json", "--cfg", "docsrs", "-D", "warnings"])
            .env("RUSTDOC", rustdoc)
            .env_remove("RUSTDOCFLAGS")
            .current_dir(at_root("."))
            .status()
            .expect("cargo runs");
        assert!(built.success(), "docs.rs could not build this");
        let json: Value = serde_json::from_slice(&fs::read(target.join("doc/tower_lock.json")).expect("written"))
            .expect("what rustdoc writes");
        if json["format_version"] != FORMAT {
            skipped("the types of others in the public API", &format!("a rustdoc of format {FORMAT}"));
            return None;
        }
        Some(Self { json, versions: versions() })
    }

    /// Every type and trait of others, as `crate version path`, and where it is met first.
    fn foreign(&self) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let mut to_see = vec![(id(&self.json["root"]).expect("a root"), "the crate".to_owned())];
        while let Some((id, from)) = to_see.pop() {
            if let Some(line) = self.line(id) {
                found.entry(line).or_insert(from);
                continue;
            }
            let item = &self.json["index"][id.to_string()];
            // Not there: it is private, or hidden. An impl of an auto trait, or for every type, says nothing of ours.
            let Some((kind, inner)) = item["inner"].as_object().and_then(|inner| inner.iter().next()) else { continue };
            let nobodys = kind == "impl" && (inner["is_synthetic"] == true || !inner["blanket_impl"].is_null());
            if nobodys || !seen.insert(id) {
                continue;
            }
            let here = match item["name"].as_str() {
                Some(name) => format!("{kind} `{name}`"),
                None => format!("{kind} in {from}"),
            };
            let mut ids = Vec::new();
            mentioned(inner, &mut ids);
            to_see.extend(ids.into_iter().map(|id| (id, here.clone())));
        }
        found
    }

    /// `None`: it is ours, or of the standard library.
    fn line(&self, id: u64) -> Option<String> {
        let summary = &self.json["paths"][id.to_string()];
        let number = summary["crate_id"].as_u64().filter(|number| *number != 0)?;
        let name = self.json["external_crates"][number.to_string()]["name"].as_str().expect("a crate has a name");
        let path: Vec<_> = summary["path"].as_array().expect("a path").iter().filter_map(Value::as_str).collect();
        // What a macro leaves behind is not meant to be named.
        if ["std", "core", "alloc"].contains(&name) || path.contains(&"__private") {
            return None;
        }
        let versions = self.versions.get(name).map(|versions| Vec::from_iter(versions.clone()).join(" or "));
        Some(format!("{name} {} {}", versions.unwrap_or_else(|| "?".into()), path.join("::")))
    }
}

/// All that an item is made of: what its signature names, and what is in it.
fn mentioned(inner: &Value, ids: &mut Vec<u64>) {
    match inner {
        Value::Object(fields) => {
            for (name, value) in fields {
                match name.as_str() {
                    // Of a path or a re-export; of an item, what is in it.
                    "id" | "items" | "fields" | "variants" | "impls" | "implementations" | "tuple" => {
                        ids.extend(id(value));
                        ids.extend(value.as_array().into_iter().flatten().filter_map(id));
                    }
                    _ => {}
                }
                mentioned(value, ids);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| mentioned(value, ids)),
        _ => {}
    }
}

fn id(value: &Value) -> Option<u64> {
    value.as_u64()
}

/// As far as they matter: `1` of 1.4.0, `0.5` of 0.5.2.
fn versions() -> BTreeMap<String, BTreeSet<String>> {
    let lock = fs::read_to_string(at_root("Cargo.lock")).expect("a lock file");
    let mut found = BTreeMap::<_, BTreeSet<_>>::new();
    for package in lock.split("[[package]]").skip(1) {
        let field = |name: &str| package.lines().find_map(|line| line.strip_prefix(name)?.strip_suffix('"'));
        let (name, version) = field("name = \"").zip(field("version = \"")).expect("a package");
        let numbers: Vec<_> = version.split('.').collect();
        let matters = numbers.iter().position(|number| *number != "0").unwrap_or(2);
        found.entry(name.replace('-', "_")).or_default().insert(numbers[..=matters].join("."));
    }
    found
}

fn at_root(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[test]
fn public_api_exposes_only_listed_external_types() {
    let Some(api) = Api::read() else { return };
    let met = api.foreign();
    let list = fs::read_to_string(at_root(LIST)).expect(LIST);
    let lines: Vec<_> = list.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
    assert!(lines.is_sorted(), "{LIST} is not sorted");
    let listed: BTreeSet<_> = lines.into_iter().collect();
    let new: Vec<_> = met.iter().filter(|(line, _)| !listed.contains(line.as_str())).collect();
    let new: String = new.iter().map(|(line, from)| format!("  {line}    ({from})\n")).collect();
    assert!(
        new.is_empty(),
        "the public API shows what it did not before:\n\n{new}\nA major version of that crate is a major version of ours. Can it be \
         hidden behind a type of our own? If it is meant, write it into {LIST}."
    );
    let gone: Vec<_> = listed.into_iter().filter(|line| !met.contains_key(*line)).collect();
    assert!(gone.is_empty(), "the public API does not show these any more; take them out of {LIST}: {gone:#?}");
}

/// `Api::read` builds it so.
#[test]
fn docs_rs_shows_all_features_and_their_requirements() {
    let manifest = fs::read_to_string(at_root("Cargo.toml")).expect("a manifest");
    let told = manifest.split_once("[package.metadata.docs.rs]\n").expect("a section").1;
    assert!(told.starts_with("all-features = true\nrustdoc-args = [\"--cfg\", \"docsrs\"]\n"), "{told:.100}");
    let lib = fs::read_to_string(at_root("src/lib.rs")).expect("a crate");
    assert!(lib.contains("#![cfg_attr(docsrs, feature(doc_cfg))]"));
}
