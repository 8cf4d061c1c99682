//! Checks of the repository itself: manifest, pages, imports and language.

mod pages;
mod code_blocks;
mod imports;
mod language;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The folder of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("tests/it in the repository")
}

pub(crate) fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(root().join(&path)).unwrap_or_else(|error| panic!("{}: {error}", path.as_ref().display()))
}

/// The text of a section of a TOML or Markdown file, up to the next one.
fn section<'a>(text: &'a str, heading: &str, next: &str) -> &'a str {
    let (_, rest) = text.split_once(heading).unwrap_or_else(|| panic!("no {heading}"));
    rest.split(next).next().expect("the rest")
}

/// The Rust files of a folder in `src`, by their paths in it.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let src = root().join("src");
    let files = files(&src.join(folder)).into_iter();
    files.map(|(path, text)| (path.strip_prefix(&src).expect("in src").to_owned(), text)).collect()
}

/// The Rust files of a folder, with their text.
fn files(folder: &Path) -> Vec<(PathBuf, String)> {
    let is_rust = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "rs");
    let rust = paths(folder).into_iter().filter(is_rust);
    rust.map(|path| (path.clone(), read(&path))).collect()
}

/// All files of a folder, and of the folders in it. Of a file, itself.
fn paths(folder: &Path) -> Vec<PathBuf> {
    if folder.is_file() {
        return vec![folder.to_owned()];
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(paths(&path));
        } else {
            found.push(path);
        }
    }
    found
}

/// The Markdown files of a folder, by their paths in the repository.
fn pages(folder: &str) -> Vec<PathBuf> {
    let found = fs::read_dir(root().join(folder)).expect("a folder");
    let found = found.map(|entry| Path::new(folder).join(entry.expect("an entry").file_name()));
    found.filter(|page| page.extension().is_some_and(|extension| extension == "md")).collect()
}

/// The output of a program that runs in the repository.
fn stdout(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).current_dir(root()).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}
