//! The manifest and the pages: what they name exists.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::{files, pages, paths, read, root, section, stdout};

#[test]
fn manifest_names_direct_dependencies() {
    let manifest = read("Cargo.toml");
    let dependencies = section(&manifest, "\n[dependencies]\n", "\n[");
    for name in ["axum", "http", "serde_json", "tokio", "tower"] {
        assert!(
            dependencies.lines().any(|line| line.starts_with(&format!("{name} = "))),
            "{name} is no direct dependency"
        );
    }
    assert!(section(&manifest, "\n[features]\n", "\n[").contains(r#"default = ["axum", "memory", "signal"]"#));
    assert!(manifest.contains("edition = \"2024\"\nrust-version = \"1.88\"\n"));
}

/// With `test-util` the clock of Tokio is slower, and the crate reads it more often.
#[test]
fn benchmarks_have_no_features_of_tests() {
    let options =
        ["tree", "--package=tower-lock-benches", "--all-features", "--edges=features", "--prefix=none", "--locked"];
    let tree = stdout(env!("CARGO"), &options);
    assert!(tree.contains("tower-lock feature \"default\""), "{tree}");
    // Its dependencies are not those of the workspace, and may not be downloaded.
    let comparison = read("benches/comparison/Cargo.toml");
    for feature in ["test-util", "__internals"] {
        let enabled: Vec<_> = tree.lines().filter(|line| line.contains(&format!(" feature \"{feature}\""))).collect();
        assert_eq!(enabled, [""; 0], "cargo bench -p tower-lock-benches");
        assert!(!comparison.contains(feature), "benches/comparison: {feature}");
    }
}

/// Each folder of `src/` and each path on the page exist, and each file says in its first line what
/// it is for.
#[test]
fn architecture_page_has_each_folder_and_files_a_purpose() {
    let page = read("docs/architecture.md");
    let tree = section(&page, "## The tree", "\n## ");
    let is_source = |path: &Path| path.extension().is_some_and(|end| end == "rs" || end == "lua" || end == "sql");
    let sources: Vec<_> = paths(&root().join("src")).into_iter().filter(|path| is_source(path)).collect();
    let is_named = |name: &str| sources.iter().any(|path| path.ends_with(name));
    for name in page.replace("```", "").split('`').skip(1).step_by(2) {
        assert!(!is_source(Path::new(name)) || name.contains(' ') || is_named(name), "{name} is on the page alone");
    }
    for path in &sources {
        let folder = path.parent().and_then(Path::file_name).and_then(|name| name.to_str()).expect("a folder");
        assert!(tree.contains(&format!("{folder}/")), "the tree has no {folder}/");
        let text = std::fs::read_to_string(path).expect("a file");
        let first = text.lines().next().unwrap_or_default();
        assert!(["//! ", "-- "].iter().any(|start| first.starts_with(start)), "{}: {first}", path.display());
    }
    assert!(sources.len() >= 60, "{} files", sources.len());
}

/// The tests that carry the id of a guarantee: `/// Guarantee: G1, G5.` above their attributes.
fn tests_by_guarantee() -> BTreeMap<String, BTreeSet<String>> {
    let mut found = BTreeMap::<_, BTreeSet<_>>::new();
    let sources = ["src", "tests", "examples"].iter().flat_map(|folder| files(&root().join(folder)));
    for (_, text) in sources.filter(|(file, _)| !file.ends_with("repository/pages.rs")) {
        for part in text.split("/// Guarantee: ").skip(1) {
            let (ids, below) = part.split_once(".\n").expect("a sentence");
            let (attributes, function) = below.split_once("fn ").expect("a function");
            let is_code = |line: &str| line.starts_with('#') || line.starts_with("async") || line.is_empty();
            assert!(
                attributes.contains("test")
                    && attributes.lines().all(|line| is_code(line.trim()) || !line.contains(';')),
                "{ids}: not above a test: {attributes}"
            );
            let name = function.split_once('(').expect("arguments").0;
            for id in ids.split(", ") {
                found.entry(id.to_owned()).or_default().insert(name.to_owned());
            }
        }
    }
    found
}

#[test]
fn guarantees_name_their_tests_and_tests_their_guarantees() {
    let guarantees = read("docs/guarantees.md");
    let mut named = BTreeMap::<_, BTreeSet<_>>::new();
    // A table per guarantee. The last column names the tests.
    for (heading, rest) in guarantees.split("\n### G").skip(1).filter_map(|part| part.split_once('\n')) {
        let (number, _) = heading.split_once(". ").expect("a number");
        let section = rest.split_once("\n## ").map_or(rest, |(section, _)| section);
        let rows = section.lines().filter(|line| line.starts_with("| ") && !line.ends_with("| shown by |"));
        for row in rows {
            let cell = row.trim_end_matches(" |").rsplit(" | ").next().expect("a last column").trim_start_matches("| ");
            for name in cell.split(", ").filter(|name| *name != "—") {
                let name = name.strip_prefix('`').and_then(|name| name.strip_suffix('`'));
                let name = name.unwrap_or_else(|| panic!("not a list of tests: {row}"));
                named.entry(format!("G{number}")).or_default().insert(name.to_owned());
            }
        }
    }
    let commented = tests_by_guarantee();
    for id in named.keys().chain(commented.keys()) {
        let of = |tests: &BTreeMap<String, BTreeSet<String>>| tests.get(id).cloned().unwrap_or_default();
        let differences: Vec<_> = of(&named).symmetric_difference(&of(&commented)).cloned().collect();
        assert_eq!(differences, [""; 0], "{id}: on the page only, or in the comment of a test only");
    }
    let shown: usize = named.values().map(BTreeSet::len).sum();
    assert!(named.len() >= 17 && shown >= 200, "{} guarantees, {shown} tests: are these the tables?", named.len());
}

#[test]
fn each_topology_names_its_tests() {
    let page = read("docs/guide/topologies.md");
    let (_, rest) = page.split_once("## Which one?\n").expect("the table");
    let rows: Vec<_> =
        rest.lines().skip_while(|line| line.is_empty()).take_while(|line| line.starts_with('|')).collect();
    let known: BTreeSet<_> = tests_by_guarantee().into_values().flatten().collect();
    for row in &rows[2..] {
        let names: Vec<_> = row.rsplit(" | ").next().expect("a last column").split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "{row}");
        names.iter().for_each(|name| assert!(known.contains(*name), "{name} is no test of a guarantee"));
    }
    assert!(rows[0].ends_with("| shown by |") && rows.len() >= 8, "{} rows: is this the table?", rows.len());
}

/// The link definitions of a Markdown file: labels and targets.
fn links(page: &str) -> Vec<(&str, &str)> {
    let definitions = page.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: "));
    definitions.filter(|(_, target)| !target.contains(' ')).collect()
}

/// The Markdown file and the heading that a relative link leads to.
fn linked_page<'a>(page: &Path, target: &'a str) -> Option<(PathBuf, &'a str)> {
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    match file {
        "" => Some((page.to_owned(), anchor)),
        file if file.contains("://") || !file.ends_with(".md") => None,
        file => Some((page.parent().expect("a folder").join(file), anchor)),
    }
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let mut checked = 0;
    for page in ["", "docs", "docs/guide"].iter().flat_map(|folder| pages(folder)) {
        let text = read(&page);
        let inline = text.match_indices("](").filter_map(|(at, _)| Some(text[at + 2..].split_once(')')?.0));
        let defined = links(&text).into_iter().map(|(_, target)| target);
        for (file, anchor) in inline.chain(defined).filter_map(|target| linked_page(&page, target)) {
            let headings = read(&file);
            let headings = headings.lines().filter_map(|line| Some(line.strip_prefix('#')?.trim_start_matches('#')));
            let mut anchors = headings.map(|heading| {
                let heading = heading.trim().to_lowercase();
                let kept = heading.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
                kept.collect::<String>().replace(' ', "-")
            });
            let (page, file) = (page.display(), file.display());
            assert!(anchor.is_empty() || anchors.any(|name| name == anchor), "{page}: {file} has no heading #{anchor}");
            checked += 1;
        }
    }
    assert!(checked >= 40, "{checked} links: are these the definitions?");
}

/// A page of the guide is a file on the web and a module of the documentation. There each of its
/// links leads to an item or to another module.
#[test]
fn every_guide_page_is_a_module_whose_links_are_items() {
    let (readme, lib, items) = (read("README.md"), read("src/lib.rs"), read("src/links.md"));
    let pictures = read("src/pictures.txt");
    let items = [links(&items), links(&pictures)].concat();
    let guide = pages("docs/guide");
    assert!(guide.len() >= 11, "{guide:?}");
    for page in guide.into_iter().chain(["docs/migrating-from-redisson.md".into()]) {
        let name = page.file_stem().expect("a name").to_str().expect("UTF-8");
        let module = name.replace('-', "_");
        let is_module = [format!("        {module} = \"{name}.md\",\n"), format!("    pub mod {module} {{}}\n")];
        assert!(is_module.iter().any(|module| lib.contains(module)), "no module for {name}");
        let page = page.display();
        assert!(readme.contains(&format!("]({page})")), "the README has no link to {page}");
        for (label, _) in links(&read(page.to_string())) {
            let is_defined = items.iter().any(|(item, _)| item.eq_ignore_ascii_case(label));
            assert!(is_defined, "{page}: src/links.md does not define [{label}]");
        }
    }
}

/// A page on the web shows a file, and the documentation the same bytes. `scripts/screenshots.py`
/// makes both.
#[test]
fn pictures_of_the_guide_are_small_and_exist_twice() {
    let embedded = read("src/pictures.txt");
    let mut checked = 0;
    for page in pages("docs/guide") {
        let text = read(&page);
        for (label, file) in links(&text).into_iter().filter(|(_, file)| file.ends_with(".png")) {
            let path = root().join("docs/guide").join(file);
            let size = std::fs::metadata(&path).unwrap_or_else(|error| panic!("{file}: {error}")).len();
            assert!(size < 60_000, "{file}: {size} bytes");
            let (_, data) = embedded.split_once(&format!("[{label}]: data:image/png;base64,")).expect(label);
            let data = data.lines().next().expect("a line");
            assert_eq!(data.len() as u64, size.div_ceil(3) * 4, "{file} is another picture than that of rustdoc");
            assert!(text.contains(&format!("][{label}]")), "{}: {label} is not shown", page.display());
            checked += 1;
        }
    }
    assert_eq!(checked, 3, "pictures");
}

/// As `wc -w` counts. A new feature is a line of the guide, and seldom one of the README.
#[test]
fn readme_has_at_most_900_words() {
    let words = read("README.md").split_whitespace().count();
    assert!((500..=900).contains(&words), "{words}");
}

#[test]
fn observability_page_lists_every_metric() {
    let names = |text: &str| -> BTreeSet<String> {
        let parts = text.split("tower_lock_").skip(1);
        let ends = parts.map(|part| part.split(|c: char| !c.is_ascii_lowercase() && c != '_').next());
        ends.map(|name| name.expect("a first part").to_owned()).collect()
    };
    let recorded = names(&read("src/telemetry/metrics.rs"));
    assert_eq!(names(&read("docs/guide/observability.md")), recorded);
    // The exporter of Prometheus adds these endings to histograms.
    let metric = |name: String| {
        ["_bucket", "_count", "_sum"].iter().find_map(|end| name.strip_suffix(end).map(str::to_owned)).unwrap_or(name)
    };
    for file in ["grafana.json", "alerts.yml"] {
        let used: BTreeSet<_> = names(&read(format!("docs/observability/{file}"))).into_iter().map(metric).collect();
        assert!(used.is_subset(&recorded) && used.len() >= 6, "{file}: {used:?}");
    }
    let dashboard = serde_json::from_str::<serde_json::Value>(&read("docs/observability/grafana.json")).expect("JSON");
    assert!(dashboard["panels"].as_array().is_some_and(|panels| panels.len() >= 8));
    assert!(recorded.len() >= 9, "{recorded:?}");
}

#[test]
fn docs_rs_shows_all_features_and_their_requirements() {
    let manifest = read("Cargo.toml");
    let settings = section(&manifest, "[package.metadata.docs.rs]\n", "\n[");
    assert!(settings.starts_with("all-features = true\nrustdoc-args = [\"--cfg\", \"docsrs\"]\n"), "{settings:.100}");
    assert!(read("src/lib.rs").contains("#![cfg_attr(docsrs, feature(doc_cfg))]"));
}
