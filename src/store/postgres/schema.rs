//! The schema of a store: its name, its migration, and its statements. Pure.

use crate::limits::MAX_POSTGRES_SCHEMA_BYTES;

/// The comment of the table of locks: the layout of the tables. No other one is understood.
pub(super) const VERSION: &str = "tower-lock 1";

/// The number of the functions, which the comment of `check_fence` has. A change of a function gets
/// the next one, or no database that has functions gets the change.
///
/// Instances of an older release call the new functions, and calls under way go on with them: a
/// function keeps its name, its arguments and the meaning of its replies, also if only functions
/// call it. Another reply, which `CREATE OR REPLACE` refuses, is a function with another name.
pub(super) const FUNCTIONS: u32 = 1;

const MIGRATION: &str = include_str!("sql/migration.sql");

/// The parts of the migration, in the order in which they are replaced.
const PARTS: [(&str, &str); 7] = [
    ("{rules}", include_str!("sql/rules.sql")),
    ("{verbs}", include_str!("sql/verbs.sql")),
    ("{application}", include_str!("sql/application.sql")),
    (
        "{settings}",
        "SET lock_timeout = '200ms' SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan \
         SET search_path = pg_catalog, pg_temp",
    ),
    (
        "{read_committed}",
        "IF current_setting('transaction_isolation') <> 'read committed' THEN \
         RAISE EXCEPTION 'the isolation level of the session is %', current_setting('transaction_isolation') \
         USING ERRCODE = 'TL002', HINT = 'Another client of a pooler may have set it: give the locks their own user.'; \
         END IF;",
    ),
    // Of the row `l`, at the time `t`: see `grant_key`.
    (
        "{next_fence}",
        "greatest({schema}.us(t), 1 + CASE l.fence WHEN 0 THEN (SELECT f.fence FROM {schema}.floor f WHERE f.one) \
         ELSE l.fence END)",
    ),
    ("{version}", VERSION),
];

/// The names of the functions. A schema may have others, of other programs.
pub(super) fn function_names() -> impl Iterator<Item = &'static str> {
    let texts = PARTS.iter().flat_map(|(_, text)| text.split("CREATE OR REPLACE FUNCTION {schema}.").skip(1));
    texts.filter_map(|text| Some(text.split_once('(')?.0))
}

/// A schema, whose name is a part of statements.
#[derive(Clone, Debug)]
pub(super) struct Schema {
    pub(super) name: String,
}

impl Schema {
    /// The name has no character with a meaning in a statement. `None`: it has one, or the database
    /// cannot have this name.
    pub(super) fn new(name: &str) -> Option<Self> {
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let is_name = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
            && name.chars().all(is_plain)
            && name.len() <= MAX_POSTGRES_SCHEMA_BYTES
            && !name.starts_with("pg_");
        is_name.then(|| Self { name: name.to_owned() })
    }

    /// The statement that calls a function with this many arguments.
    pub(super) fn call(&self, function: &str, arguments: usize) -> String {
        let arguments: Vec<_> = (1..=arguments).map(|n| format!("${n}")).collect();
        format!("SELECT * FROM \"{}\".{function}({})", self.name, arguments.join(", "))
    }

    /// The statement that reads the id of the tables. Its value is `NULL` if there are none.
    pub(super) fn tables_id(&self) -> String {
        format!("SELECT pg_catalog.obj_description(pg_catalog.to_regclass('\"{}\".floor'), 'pg_class')", self.name)
    }

    /// The statement that fails if a function is missing, or the server accepts no writes. Of a key
    /// that no caller has, and no row.
    pub(super) fn check(&self) -> String {
        let schema = &self.name;
        format!(
            "SELECT 1 FROM \"{schema}\".inspect('+health') JOIN \"{schema}\".floor f ON f.fence < 0 FOR UPDATE OF f"
        )
    }

    /// The text that makes the tables and the functions, or replaces older functions.
    pub(super) fn migration(&self) -> String {
        let text = PARTS.iter().fold(MIGRATION.to_owned(), |text, (part, replacement)| text.replace(part, replacement));
        let names: Vec<_> = function_names().map(|name| format!("'{name}'")).collect();
        text.replace("{functions}", &FUNCTIONS.to_string())
            .replace("{names}", &names.join(", "))
            .replace("{schema}", &format!("\"{}\"", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        limits::TABLES_NAME,
        lock_key::LockKey,
        store::{
            database::driver::{key, name},
            postgres::connection::Connector,
        },
    };

    #[test]
    fn name_of_a_schema_has_no_character_with_a_meaning() {
        for name in [TABLES_NAME, "shop", "_1", "user"] {
            assert!(Schema::new(name).is_some(), "{name}");
        }
        let long = "a".repeat(MAX_POSTGRES_SCHEMA_BYTES + 1);
        for name in ["", "1a", "Shop", "a.b", "a\"b", "a b", "a'", "é", "pg_temp", &long] {
            assert!(Schema::new(name).is_none(), "{name}");
        }
    }

    #[test]
    fn migration_has_its_schema_and_its_numbers() {
        let text = Schema::new("shop").expect("a name").migration();
        assert!(!text.contains('{') && !text.contains("tower_lock"));
        for comment in [
            format!("COMMENT ON TABLE \"shop\".locks IS '{VERSION}'"),
            format!(
                "COMMENT ON FUNCTION \"shop\".check_fence(text, bigint, text) IS 'tower-lock functions {FUNCTIONS}'"
            ),
        ] {
            assert!(text.contains(&comment), "{comment}");
        }
    }

    #[test]
    fn raw_key_and_composed_key_have_different_names() {
        let raw = LockKey::raw("order:7").expect("a name");
        let composed = LockKey::from(("order", 7));
        for each in [&raw, &composed] {
            assert_eq!(key(&name::<Connector>(each).expect("valid")), *each);
        }
        assert_ne!(name::<Connector>(&raw).expect("valid"), name::<Connector>(&composed).expect("valid"));
        let odd = LockKey::from(("*a", "b*"));
        assert_eq!(key(&name::<Connector>(&odd).expect("valid")), odd, "it is escaped");
        assert!(name::<Connector>(&LockKey::raw("a\0b").expect("a name")).is_none(), "the database has no such text");
    }
}
