//! The direction of imports in `src`: between modules by rank, within a folder without cycles.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::{files, root, sources};

/// The top-level modules by rank. A module imports only modules of lower ranks.
const RANKS: [&[&str]; 17] = [
    &["limits"],
    &["acquisition", "clock", "fencing", "origin", "process", "runtime", "sync"],
    &["background"],
    &["lock_key", "trace"],
    &["store"],
    &["error", "owner"],
    &["proto"],
    &["policy", "telemetry"],
    &["lock"],
    &["rejection"],
    &["body"],
    &["key_source"],
    &["middleware"],
    &["replay"],
    &["extract"],
    &["console", "tickets"],
    &["internals", "key", "lib", "test_util"],
];

/// A file of `src` as a module.
struct Module {
    file: PathBuf,
    path: Vec<String>,
    /// Without comments, tests, and the re-exports of a `mod.rs`.
    code: String,
    /// Of a `mod.rs`: re-exported names, and the child that each comes from.
    reexports: BTreeMap<String, String>,
}

// === impl Module ===

impl Module {
    fn all() -> Vec<Self> {
        let src = root().join("src");
        let files = files(&src).into_iter().filter(|(file, _)| !file.to_string_lossy().ends_with("tests.rs"));
        files.map(|(file, text)| Self::new(file.strip_prefix(&src).expect("in src"), &text)).collect()
    }

    fn new(file: &Path, text: &str) -> Self {
        let mut path: Vec<_> = file.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
        let has_children = file.ends_with("mod.rs") || file.ends_with("lib.rs");
        if has_children {
            path.pop();
        }
        let mut code = without_comments(without_tests(text));
        let mut reexports = BTreeMap::new();
        if has_children {
            for statement in statements(&code, "pub use ").into_iter().chain(statements(&code, "pub(crate) use ")) {
                for path in expand(statement.trim_start_matches("self::")) {
                    if let [child, .., name] = &*path {
                        reexports.insert(name.clone(), child.clone());
                    }
                }
            }
            for visibility in ["pub use ", "pub(crate) use "] {
                for statement in statements(&code, visibility).into_iter().map(str::to_owned).collect::<Vec<_>>() {
                    code = code.replace(&format!("{visibility}{statement};"), "");
                }
            }
        }
        Self { file: file.to_owned(), path, code, reexports }
    }

    fn top(&self) -> &str {
        self.path.first().map_or("lib", String::as_str)
    }

    /// All paths in the code that start at the crate, the parent or the module itself, as seen from
    /// the crate root.
    fn imports(&self) -> Vec<Vec<String>> {
        let mut found = Vec::new();
        for (at, _) in self.code.match_indices("crate::") {
            if !self.code[..at].ends_with(|c: char| c == '$' || c == '_' || c.is_alphanumeric()) {
                found.extend(expand(&self.code[at + "crate::".len()..]));
            }
        }
        for (at, _) in self.code.match_indices("super::") {
            if self.code[..at].ends_with("::") {
                continue;
            }
            let mut rest = &self.code[at..];
            let mut base = self.path.clone();
            while let Some(parent) = rest.strip_prefix("super::") {
                base.pop();
                rest = parent;
            }
            found.extend(expand(rest).into_iter().map(|path| [base.clone(), path].concat()));
        }
        for (at, _) in self.code.match_indices("self::") {
            let paths = expand(&self.code[at + "self::".len()..]);
            found.extend(paths.into_iter().map(|path| [self.path.clone(), path].concat()));
        }
        found
    }
}

fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod ").next().expect("code")
}

fn without_comments(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// The text of each statement between this start and its semicolon.
fn statements<'a>(code: &'a str, start: &str) -> Vec<&'a str> {
    code.split(start).skip(1).filter_map(|rest| rest.split(';').next()).collect()
}

/// The paths of a use tree at the start of a text: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn expand(text: &str) -> Vec<Vec<String>> {
    let text = text.trim_start();
    if let Some(tree) = text.strip_prefix('{') {
        let (mut depth, mut start, mut found) = (0, 0, Vec::new());
        for (at, c) in tree.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                '}' => {
                    found.extend(expand(&tree[start..at]));
                    break;
                }
                ',' if depth == 0 => {
                    found.extend(expand(&tree[start..at]));
                    start = at + 1;
                }
                _ => {}
            }
        }
        return found;
    }
    let end = text.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    if name.is_empty() {
        return Vec::new();
    }
    let inner = rest.strip_prefix("::").map(expand).unwrap_or_default();
    if inner.is_empty() {
        return vec![vec![name.to_owned()]];
    }
    inner.into_iter().map(|path| [vec![name.to_owned()], path].concat()).collect()
}

fn rank(module: &str) -> Option<usize> {
    RANKS.iter().position(|modules| modules.contains(&module))
}

#[test]
fn imports_point_to_lower_ranks() {
    let modules = Module::all();
    assert!(modules.len() >= 60, "{} modules: is this src?", modules.len());
    let mut wrong = BTreeSet::new();
    for module in &modules {
        let top = module.top();
        let own = rank(top).unwrap_or_else(|| panic!("{top} has no rank"));
        for import in module.imports() {
            let is_lower = import[0] == top || rank(&import[0]).is_none_or(|rank| rank < own);
            if !is_lower && top != "lib" {
                wrong.insert(format!("{} imports {}", module.file.display(), import.join("::")));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Imports between the files of a folder, where each subfolder counts as one file. A `mod.rs` that
/// only re-exports takes no part: its names stand for the files that define them.
#[test]
fn files_of_a_folder_import_without_cycles() {
    let modules = Module::all();
    let mut cycles = Vec::new();
    for folder in modules.iter().filter(|module| module.file.ends_with("mod.rs")) {
        let depth = folder.path.len();
        let inside: Vec<_> = modules.iter().filter(|module| module.path.starts_with(&folder.path)).collect();
        let children: BTreeSet<_> = inside.iter().filter_map(|module| module.path.get(depth)).collect();
        let item = |line: &str| {
            let line = line.trim_start_matches("pub(crate) ").trim_start_matches("pub ");
            ["fn ", "struct ", "enum ", "trait ", "const ", "impl", "static ", "type "]
                .iter()
                .any(|kind| line.starts_with(kind))
        };
        let has_items = folder.code.lines().any(item);
        let mut graph = BTreeMap::<&str, BTreeSet<&str>>::new();
        for module in &inside {
            let from = module.path.get(depth).map_or("mod", String::as_str);
            for import in module.imports() {
                if !import.starts_with(&folder.path) || import.len() == depth {
                    continue;
                }
                let name = &import[depth];
                let name = folder.reexports.get(name).filter(|_| !children.contains(name)).unwrap_or(name);
                let to = children.get(name).map_or("mod", |child| child.as_str());
                if from != to && (has_items || (from != "mod" && to != "mod")) {
                    graph.entry(from).or_default().insert(to);
                }
            }
        }
        let reaches = |from: &str, to: &str| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
            while let Some(node) = next.pop() {
                for import in graph.get(node).into_iter().flatten() {
                    if *import == to {
                        return true;
                    }
                    if seen.insert(*import) {
                        next.push(*import);
                    }
                }
            }
            false
        };
        let cyclic: Vec<_> = graph.keys().filter(|node| reaches(node, node)).collect();
        if !cyclic.is_empty() {
            cycles.push(format!("src/{}: {cyclic:?}", folder.path.join("/")));
        }
    }
    assert!(cycles.is_empty(), "{cycles:#?}");
}

/// The layers below do not know the ones above by name, and pure modules have no effects.
#[test]
fn modules_avoid_words_of_other_layers() {
    let not_in = |folder: &str, words: &[&str]| {
        let files = sources(folder).into_iter().filter(|(file, _)| !file.to_string_lossy().ends_with("tests.rs"));
        let mut checked = 0;
        for (file, text) in files {
            let code = without_comments(without_tests(&text));
            for line in code.lines() {
                for word in words {
                    assert!(!has_word(line, word), "{}: {}", file.display(), line.trim());
                }
            }
            checked += 1;
        }
        assert!(checked > 0, "{folder}");
    };
    not_in("lock", &["http::", "axum::", "StatusCode", "memory::"]);
    not_in("store", &["http::", "axum::"]);
    not_in("store/memory", &["tokio::spawn", ".await"]);
    not_in("store/redis", &["memory::"]);
    for folder in ["store/redis/wire", "store/remote/batch.rs", "store/remote/server_clock.rs"] {
        not_in(folder, &["tokio", ".await", "async", "spawn", "clock.now", "Pool"]);
    }
    not_in("middleware", &["LockStore", "MemoryStore", "AcquireRequest", "ReleaseRequest"]);
    not_in("proto", &["tokio", ".await", "async", "spawn", "clock.now", "tracing", "metrics", "Notify"]);
}

/// Whether a line has this text, and not only at the start of a longer word.
fn has_word(line: &str, word: &str) -> bool {
    let is_part = |c: char| c == '_' || c.is_alphanumeric();
    line.match_indices(word).any(|(at, _)| !word.ends_with(is_part) || !line[at + word.len()..].starts_with(is_part))
}
