//! The code blocks of the pages: each one is run, parsed, or on a list with a reason.

use std::path::PathBuf;

use serde_json::Value;

use super::{pages, read, stdout};

/// A fenced block of a page.
struct Block {
    page: PathBuf,
    /// The text after the opening fence.
    language: String,
    text: String,
}

fn blocks() -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    for page in ["", "docs", "docs/guide"].iter().flat_map(|folder| pages(folder)) {
        let mut is_open = false;
        for line in read(&page).lines() {
            if let Some(language) = line.trim_start().strip_prefix("```") {
                is_open = !is_open;
                if is_open {
                    found.push(Block { page: page.clone(), language: language.to_owned(), text: String::new() });
                }
            } else if is_open {
                let block = found.last_mut().expect("an open block");
                block.text += line;
                block.text.push('\n');
            }
        }
        assert!(!is_open, "{}: a block without an end", page.display());
    }
    assert!(found.len() >= 60, "{} blocks: are these the pages?", found.len());
    found
}

/// A block with this code may be `no_run`, for this reason.
const NO_RUN: [(&str, &str); 6] = [
    ("axum::serve(", "serves until a signal arrives"),
    ("RedisStore::", "needs a server; `tests/it/redis` connects"),
    ("RedlockStore::", "the same"),
    ("PostgresStore::", "needs a server; `tests/it/postgres` connects"),
    ("MysqlStore::", "needs a server; `tests/it/mysql` connects"),
    ("ZooKeeperStore::", "needs a server; `tests/it/zookeeper` connects"),
];

#[test]
fn every_rust_block_is_a_doctest() {
    let (lib, examples) = (read("src/lib.rs"), read("examples/support/lib.rs"));
    let tested_guide = lib.split("all():").nth(1).and_then(|rest| rest.split('}').next()).expect("the guide");
    let mut checked = 0;
    for Block { page, language, text } in blocks().iter().filter(|block| block.language.starts_with("rust")) {
        let page = page.display().to_string();
        // Pages that need a database are tested with the examples.
        let is_tested = lib.contains(&format!("#[doc = include_str!(\"../{page}\")]"))
            || tested_guide.contains(&format!("= \"{}\",", page.trim_start_matches("docs/guide/")))
            || examples.contains(&format!("#[doc = include_str!(\"../../{page}\")]"));
        assert!(is_tested, "{page}: its examples are not tested");
        let is_allowed = match language.as_str() {
            "rust" => true,
            "rust,no_run" => NO_RUN.iter().any(|(code, _)| text.contains(code)),
            // With versions that the library does not depend on.
            "rust,ignore" => *text == read("tests/otlp/src/open_telemetry.rs"),
            _ => false,
        };
        assert!(is_allowed, "{page}: `{language}` without a reason:\n{text}");
        checked += 1;
    }
    assert!(checked >= 40, "{checked} blocks");
}

#[test]
fn every_block_has_a_language_that_is_checked() {
    for Block { page, language, text } in blocks() {
        // `text` is for output and figures; `sql` is run by the tests of fencing, of PostgreSQL and
        // of MySQL.
        let is_known = language.starts_with("rust") || ["sh", "toml", "text", "sql"].contains(&&*language);
        assert!(is_known, "{}: `{language}`:\n{text}", page.display());
    }
}

/// A page on the web shows them, and they are not for its reader.
#[test]
fn no_block_has_lines_that_rustdoc_hides() {
    let hidden = |Block { page, language, text }: Block| {
        let is_hidden = |line: &&str| *line == "#" || line.trim_start().starts_with("# ");
        let lines: Vec<_> = text.lines().filter(is_hidden).map(|line| format!("{}: {line}", page.display())).collect();
        if language.starts_with("rust") { lines } else { Vec::new() }
    };
    let hidden: Vec<_> = blocks().into_iter().flat_map(hidden).collect();
    assert!(hidden.is_empty(), "{hidden:#?}");
}

/// A doctest compiles no test function.
#[test]
fn tests_of_the_testing_page_are_run() {
    let program = read("tests/handlers.rs");
    let of_page = |block: &Block| block.page.ends_with("testing-handlers.md") && block.language == "rust";
    let items = |text: &str| text.split_once(";\n\n").map_or(text, |(_, items)| items).to_owned();
    let blocks: Vec<_> = blocks().into_iter().filter(of_page).collect();
    for Block { text, .. } in &blocks {
        // Without its imports.
        let last_import = text.rsplit_once("\nuse ").map_or(&**text, |(_, rest)| rest);
        let items = if text.starts_with("use ") { items(last_import) } else { text.clone() };
        assert!(program.contains(items.trim_end()), "not in tests/handlers.rs:\n{items}");
    }
    assert!(blocks.len() >= 7, "{} blocks", blocks.len());
}

/// The packages of the workspace and their dependencies, as Cargo resolves them.
fn packages() -> Vec<Value> {
    // The packages of other systems need not be downloaded.
    let version = stdout("rustc", &["-vV"]);
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("a host");
    let options = ["metadata", "--locked", "--format-version=1", "--filter-platform", host];
    let metadata: Value = serde_json::from_str(&stdout(env!("CARGO"), &options)).expect("JSON");
    metadata["packages"].as_array().expect("packages").clone()
}

#[test]
fn dependencies_of_the_pages_exist_with_their_features() {
    let packages = packages();
    let mut checked = 0;
    for Block { page, text, .. } in blocks().iter().filter(|block| block.language == "toml") {
        // A comment may show another form of the line.
        let commented =
            text.lines().filter_map(|line| Some((line.split_once(" = ")?.0, line.split_once("for Redis: ")?.1)));
        let other: String = commented.map(|(name, form)| format!("[dependencies]\n{name} = {form}\n")).collect();
        for text in [text, &other] {
            let table: Value = toml::from_str(text).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
            for (section, dependencies) in table.as_object().expect("a table") {
                assert!(["dependencies", "dev-dependencies"].contains(&&**section), "{}: [{section}]", page.display());
                for (name, dependency) in dependencies.as_object().expect("a table") {
                    assert_exists(&packages, name, dependency);
                    checked += 1;
                }
            }
        }
    }
    assert!(checked >= 9, "{checked} dependencies");
}

/// Some package has the name, the version and all features of the dependency.
fn assert_exists(packages: &[Value], name: &str, dependency: &Value) {
    let version = dependency.as_str().or(dependency["version"].as_str()).expect("a version");
    let features: Vec<_> = dependency["features"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let fits = |package: &&Value| {
        let is_version = |own: &str| own == version || own.starts_with(&format!("{version}."));
        package["name"] == name
            && package["version"].as_str().is_some_and(is_version)
            && features.iter().all(|feature| !feature.starts_with('_') && package["features"].get(feature).is_some())
    };
    assert!(packages.iter().any(|package| fits(&package)), "{name} = {dependency}");
}

/// The commands of the pages, each with the file that runs it, and the text there.
const COMMANDS: [(&str, &str, &str); 32] = [
    ("scripts/test.sh", ".github/workflows/ci.yml", " scripts/test.sh\n"),
    ("scripts/test.sh --checks", ".github/workflows/ci.yml", " scripts/test.sh --checks\n"),
    ("cargo run --example reward_claim", "scripts/test.sh", " cargo run --quiet --example reward_claim"),
    ("cargo run --features mysql --example stock_sale", "examples/tests/programs.rs", "example(\"stock_sale\")"),
    ("cargo run --features redis --example reward_claim", "examples/tests/instances.rs", "\"reward_claim\""),
    ("cargo run --features redis --example nightly_mail -- --once monday", "examples/tests/instances.rs", "\"--once\""),
    (
        "cargo run --features postgres --example idempotent_payment",
        "examples/tests/programs.rs",
        "nothing_but_a_database",
    ),
    ("export DATABASE_URL=postgres://user:password@localhost/shop", "examples/tests/programs.rs", "\"DATABASE_URL\""),
    ("cargo run --features console --example console", "examples/tests/programs.rs", "example(\"console\")"),
    ("cargo run --features redis --example leader", "examples/tests/instances.rs", "example(\"leader\")"),
    ("export LOCK_URL=redis://localhost DATABASE_URL=sqlite://shop.db", "examples/tests/instances.rs", "\"LOCK_URL\""),
    ("claim() {", "examples/tests/shown_commands.rs", "getting-started.md"),
    ("cargo test --lib", "scripts/test.sh", TESTS),
    ("cargo test -p tower-lock-tests --test it", "scripts/test.sh", TESTS),
    ("cargo test -p tower-lock-tests --test it random", "scripts/test.sh", TESTS),
    ("cargo test -p tower-lock-storm --test storm", "scripts/test.sh", TESTS),
    ("cargo test -p tower-lock-storm --test postgres", "scripts/test.sh", TESTS),
    ("cargo test -p tower-lock-storm --test replay", "scripts/test.sh", TESTS),
    ("scripts/redisson.sh", "scripts/test.sh", " scripts/redisson.sh\n"),
    (
        "cargo test -p tower-lock-storm --test failovers -- --nocapture",
        "scripts/test.sh",
        " --test failovers -- --nocapture",
    ),
    (
        "cargo test -p tower-lock-storm --test masters -- --nocapture",
        "scripts/test.sh",
        " --test masters -- --nocapture",
    ),
    ("cargo test -p tower-lock-storm --test kills", "scripts/test.sh", " --test kills"),
    ("cargo test -p compile-fail", "scripts/test.sh", " --test compile_fail"),
    ("cargo test --lib shuttle_tests", "scripts/test.sh", "RUSTC_WORKSPACE_WRAPPER"),
    ("cargo fuzz run --sanitizer none reply -- -max_len=4096", "scripts/test.sh", "cargo fuzz run --sanitizer none"),
    ("cargo run -p tower-lock-simulator -- 0 10000", "scripts/test.sh", SIMULATOR),
    ("cargo run -p tower-lock-simulator -- 2549 --trace", "scripts/test.sh", SIMULATOR),
    ("cargo run -p tower-lock-simulator -- 0 1000 --option force", "scripts/test.sh", "'' force flush"),
    (
        "cargo run -p tower-lock-simulator -- 0 1000 --mutant no_call_expiry --stop",
        "tests/simulator/tests/mutants.rs",
        "no_call_expiry",
    ),
    ("cargo run --example edit_lock", "examples/tests/programs.rs", "example(\"edit_lock\")"),
    ("redis-cli", "tests/it/redis/runbook.rs", "redis-in-production.md"),
    ("date -d", "tests/it/redis/runbook.rs", "redis-in-production.md"),
];
const TESTS: &str = "cargo test \"${all[@]}\" --no-run";
const SIMULATOR: &str = "cargo run --quiet -p tower-lock-simulator --";

/// The command of a line without variables and its comment.
fn command(line: &str) -> &str {
    let mut command = line.split("  #").next().expect("a first part").trim();
    while let Some((variable, rest)) = command.split_once(' ')
        && !variable.is_empty()
        && variable.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
    {
        // A value in quotes may have spaces.
        command = match variable.split_once("='") {
            Some(_) => command.splitn(3, '\'').nth(2).expect("a closing quote").trim_start(),
            None => rest,
        };
    }
    command
}

#[test]
fn every_command_of_a_page_is_run_by_a_test() {
    let mut used = vec![false; COMMANDS.len()];
    for Block { page, text, .. } in blocks().iter().filter(|block| block.language == "sh") {
        let joined = text.replace("\\\n", " ");
        let lines: Vec<_> = match joined.starts_with("claim() {") {
            // One shell function, and its calls.
            true => vec!["claim() {"],
            false => joined.lines().map(command).collect(),
        };
        for line in lines {
            let is_tool =
                |shown: &str| ["redis-cli", "date -d"].contains(&shown) && line.starts_with(&format!("{shown} "));
            let known = COMMANDS.iter().position(|(shown, ..)| *shown == line || is_tool(shown));
            let known = known.unwrap_or_else(|| panic!("{}: which test runs `{line}`?", page.display()));
            let (_, file, evidence) = COMMANDS[known];
            assert!(read(file).contains(evidence), "{file} does not run `{line}`: no `{evidence}`");
            used[known] = true;
        }
    }
    let unused: Vec<_> = COMMANDS.iter().zip(used).filter(|(_, used)| !used).map(|((shown, ..), _)| shown).collect();
    assert!(unused.is_empty(), "on no page: {unused:?}");
}
