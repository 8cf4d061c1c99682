//! The language of the repository: widths of comments, and words that are no longer used.

use std::{collections::BTreeSet, fs, path::Path};

use super::{paths, root};

/// Phrases that are no longer used, in lower case. They match in prose and as parts of identifiers,
/// for example in snake case and in camel case.
const PHRASES: [&str; 32] = [
    "give back",
    "gives back",
    "given back",
    "giving back",
    "gave back",
    "give backs",
    "way back",
    "in vain",
    "turned away",
    "turn away",
    "broken off",
    "breaks off",
    "break off",
    "line up",
    "lines up",
    "lined up",
    "lining up",
    "hand over",
    "hands over",
    "handed over",
    "hand overs",
    "owner id",
    "owner ids",
    "whoever",
    "whomever",
    "somebody",
    "everybody",
    "told",
    "newcomer",
    "three in the morning",
    "void after",
    "keep taken",
];

/// Parts of type names that are no longer used. They match in camel case only.
const PARTS: [&str; 9] = ["Conversation", "Trouble", "Lane", "Shell", "Referee", "Duty", "Moment", "Mishap", "OwnerId"];

/// Exact texts of code that are no longer used.
const CODE: [&str; 7] =
    ["Locks::", "LocksLayer", "LocksBuilder", "&Locks", ".die(", "yield_to_line", "MaxHoldExceeded"];

const FOLDERS: [&str; 6] = ["src", "tests", "examples", "benches", "docs", "scripts"];

/// The text files of the repository with these extensions, except for this file.
fn texts(extensions: &[&str]) -> Vec<(String, String)> {
    let folders = FOLDERS.iter().flat_map(|folder| paths(&root().join(folder)));
    let pages = ["README.md", "CHANGELOG.md"].map(|page| root().join(page));
    let is_wanted = |path: &Path| {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        extensions.contains(&extension) && !path.ends_with(file!())
    };
    let files = folders.chain(pages).filter(|path| is_wanted(path));
    let name = |path: &Path| path.strip_prefix(root()).expect("in the repository").display().to_string();
    files.map(|path| (name(&path), without_glossary(&fs::read_to_string(&path).expect("text")))).collect()
}

/// The glossary of `docs/architecture.md` lists the words that each term replaces.
fn without_glossary(text: &str) -> String {
    let Some((before, rest)) = text.split_once("\n## Glossary\n") else { return text.to_owned() };
    let after = rest.find("\n## ").map_or("", |at| &rest[at..]);
    format!("{before}{after}")
}

/// The words of a line, with identifiers split at underscores and in camel case.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = ' ';
    for c in line.chars() {
        if !c.is_alphanumeric() || (c.is_uppercase() && before.is_lowercase()) {
            words.push(String::new());
        }
        if c.is_alphanumeric() {
            words.last_mut().expect("one").extend(c.to_lowercase());
        }
        before = c;
    }
    words.retain(|word| !word.is_empty());
    words
}

/// A line with a URL, a row of a table and code cannot be wrapped.
#[test]
fn lines_of_comments_and_docs_have_at_most_100_columns() {
    let mut wide = Vec::new();
    for (file, text) in texts(&["md"]) {
        // Outside of blocks of code: every other part.
        for (part, text) in text.split("```").enumerate().step_by(2) {
            let is_wide = |line: &&str| line.chars().count() > 100 && !line.contains("://") && !line.starts_with('|');
            wide.extend(text.lines().filter(is_wide).map(|line| format!("{file}, part {part}: {line}")));
        }
    }
    for (file, text) in texts(&["rs", "lua", "sql"]) {
        for (number, line) in text.lines().enumerate() {
            let comment = line.trim_start();
            let Some(comment) = comment.strip_prefix("//").or(comment.strip_prefix("--")) else { continue };
            let comment = comment.trim_start_matches(['/', '!']).trim_start();
            let can_wrap = !comment.contains("://");
            if can_wrap && line.chars().count() > 100 {
                wide.push(format!("{file}:{}", number + 1));
            }
        }
    }
    assert!(wide.is_empty(), "{wide:#?}");
}

/// A longer name is not read as a sentence.
#[test]
fn names_of_tests_have_at_most_60_characters() {
    let mut long = Vec::new();
    for (file, text) in texts(&["rs"]) {
        let names = text.lines().filter_map(|line| line.split_once("fn ")?.1.split(['(', '<']).next());
        long.extend(names.filter(|name| name.len() > 60 && name.contains('_')).map(|name| format!("{file}: {name}")));
    }
    assert!(long.is_empty(), "{long:#?}");
}

/// Those of tests on real servers are in `tests/testkit/src/limits.rs`.
#[test]
fn time_limits_of_tests_on_servers_are_in_one_file() {
    const FOLDERS: [&str; 4] = ["tests/it/redis/", "tests/it/postgres/", "tests/storm/", "examples/tests/"];
    const LIMITS: [&str; 4] = [" timeout(ms(", " timeout(Duration::", "elapsed() < ms(", "elapsed() < Duration::"];
    let mut found = Vec::new();
    for (file, text) in texts(&["rs"]).iter().filter(|(file, _)| FOLDERS.iter().any(|folder| file.starts_with(folder)))
    {
        let lines = text.lines().enumerate().filter(|(_, line)| LIMITS.iter().any(|limit| line.contains(limit)));
        found.extend(lines.map(|(number, _)| format!("{file}:{}", number + 1)));
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn retired_words_do_not_return() {
    let mut found = BTreeSet::new();
    for (file, text) in texts(&["rs", "lua", "sql", "md", "sh", "toml"]) {
        // A phrase may continue on the next line.
        let mut last: Option<String> = None;
        for (number, line) in text.lines().enumerate() {
            let own = words(line);
            let joined = last.iter().chain(&own).map(String::as_str).collect::<Vec<_>>().join(" ");
            let padded = format!(" {joined} ");
            let is_here = |phrase: &str| {
                let mut words = own.iter().map(String::as_str);
                if phrase.contains(' ') {
                    padded.contains(&format!(" {phrase} "))
                } else {
                    words.any(|word| word == phrase)
                }
            };
            let phrases = PHRASES.iter().filter(|phrase| is_here(phrase));
            let parts = PARTS.iter().filter(|part| is_part(line, part));
            let code = CODE.iter().filter(|code| is_code(line, code));
            for word in phrases.chain(parts).chain(code) {
                found.insert(format!("{file}:{}: {word}", number + 1));
            }
            last = own.last().filter(|_| own.len() > 1).cloned();
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// Whether this is in the line, and not the end of a longer name.
fn is_code(line: &str, code: &str) -> bool {
    line.match_indices(code).any(|(at, _)| !line[..at].ends_with(char::is_alphanumeric))
}

/// Whether a word of a camel-case name, not only a prefix of one.
fn is_part(line: &str, part: &str) -> bool {
    line.match_indices(part).any(|(at, _)| {
        let after = line[at + part.len()..].chars().next();
        let before = line[..at].chars().next_back();
        !after.is_some_and(char::is_lowercase) && !before.is_some_and(char::is_uppercase)
    })
}
