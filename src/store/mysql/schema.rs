//! The tables and procedures of a store: their names, the migration, and statements. Pure.

use crate::{
    limits::MAX_MYSQL_PREFIX_BYTES,
    store::database::{Argument, micros},
};

/// The comment of the tables: their layout. No other one is understood.
pub(super) const VERSION: &str = "tower-lock 1";

/// The number of the procedures, which the comment of `leave_answer` has. A change of a procedure
/// gets the next one, or no database that has procedures gets the change.
///
/// Instances of an older release call the new procedures: a procedure keeps its name, its arguments
/// and the meaning of its replies.
pub(super) const PROCEDURES: u32 = 1;

/// The statements of the migration, in their order.
const TEXTS: [&str; 4] = [
    include_str!("sql/tables.sql"),
    include_str!("sql/rules.sql"),
    include_str!("sql/verbs.sql"),
    include_str!("sql/application.sql"),
];

/// What the texts have in several places.
const PARTS: [(&str, &str); 10] = [
    // Each statement of a procedure has its own time. Without the time zone of the session, whose
    // clock jumps.
    ("{now}", "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"),
    (
        "{begin}",
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET SESSION group_concat_max_len = 4194304; START TRANSACTION READ WRITE;",
    ),
    ("{rollback}", "DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;"),
    (
        "{each}",
        "SELECT q.at_, CAST(q.k AS BINARY) k, CAST(q.me AS BINARY) me, q.us FROM JSON_TABLE(requests, '$[*]' COLUMNS (\
         at_ FOR ORDINALITY, k VARCHAR(1025) CHARACTER SET utf8mb4 PATH '$[0]', \
         me VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[1]', us BIGINT PATH '$[2]')) q",
    ),
    // The reply to an acquire.
    (
        "{acquired}",
        "SELECT t <= expires_us, t, what, f, left_us, 0, r.head, r.body FROM {p}_floor \
         LEFT JOIN {p}_records r ON what = 'recorded' AND r.lock_key = k;",
    ),
    // Of a key `q`, and its row `l` if it is held or blocked.
    (
        "{status}",
        "q.lock_key, l.holder, l.fence, l.since_us, IFNULL(l.until_us - t, 0), 0, (SELECT r.until_us - t \
         FROM {p}_records r WHERE r.lock_key = q.lock_key AND r.until_us > t), (SELECT \
         JSON_ARRAYAGG(CONVERT(s.id USING utf8mb4)) {permits}), (SELECT JSON_ARRAYAGG(s.since_us) {permits})",
    ),
    (
        "{permits}",
        "FROM {p}_shares s WHERE s.lock_key = l.lock_key AND s.until_us > t AND s.id NOT LIKE '%:end' \
         AND s.id NOT LIKE '%:forced'",
    ),
    ("{live}", "LEFT JOIN {p}_locks l ON l.lock_key = q.lock_key AND l.until_us > t"),
    ("{verb}", "SQL SECURITY INVOKER COMMENT '{version}'"),
    ("{version}", VERSION),
];

/// Between two statements of the texts.
const DELIMITER: &str = ";;\n";

/// The tables and procedures whose names begin with a prefix.
#[derive(Clone, Debug)]
pub(super) struct Schema {
    pub(super) prefix: String,
}

impl Schema {
    /// The prefix has no character with a meaning in a statement. `None`: it has one, or is too
    /// long.
    pub(super) fn new(prefix: &str) -> Option<Self> {
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let is_name = prefix.starts_with(|c: char| c.is_ascii_lowercase())
            && prefix.chars().all(is_plain)
            && prefix.len() <= MAX_MYSQL_PREFIX_BYTES;
        is_name.then(|| Self { prefix: prefix.to_owned() })
    }

    /// The statement that calls a procedure, or for several keys the one over a JSON array. The
    /// literals have no character that a setting of the session gives a meaning.
    pub(super) fn call(&self, procedure: &str, arguments: &[Argument<'_>]) -> String {
        let (mut texts, mut suffix) = (Vec::with_capacity(9), "");
        for argument in arguments {
            match *argument {
                Argument::Number(number) => texts.push(number.to_string()),
                Argument::Flag(flag) => texts.push(u8::from(flag).to_string()),
                Argument::Time(time) => texts.push(micros(time).to_string()),
                Argument::Text(text) => texts.push(literal(text.map(str::as_bytes))),
                Argument::Bytes(bytes) => texts.push(literal(bytes)),
                Argument::Requests(batch) => match &batch.requests[..] {
                    [of] => {
                        texts.extend([&*of.name, &of.id].map(|text| literal(Some(text.as_bytes()))));
                        texts.push(micros(of.time).to_string());
                    }
                    requests => {
                        suffix = "_many";
                        let rows: Vec<_> = requests.iter().map(|of| (&of.name, &of.id, micros(of.time))).collect();
                        let json = serde_json::to_vec(&rows).expect("texts and numbers");
                        texts.push(format!("_utf8mb4 {}", literal(Some(&json))));
                    }
                },
                // There is no queue.
                Argument::Queue(_) | Argument::Offer(_) | Argument::Traces(_) | Argument::Trace(_) => {}
            }
        }
        format!("CALL {}_{procedure}{suffix}({})", self.prefix, texts.join(", "))
    }

    /// The statements that make the tables and the procedures. `replaces`: in place of older
    /// procedures, whose calls fail until the new ones are there.
    pub(super) fn statements(&self, replaces: bool) -> Vec<String> {
        let texts = TEXTS.iter().flat_map(|text| text.split(DELIMITER)).filter(|text| !text.trim().is_empty());
        let of_text = |text: &str| {
            let name = created(text).filter(|_| replaces && text.contains("CREATE PROCEDURE"));
            let drop = name.map(|name| format!("DROP PROCEDURE IF EXISTS {}_{name}", self.prefix));
            drop.into_iter().chain([self.filled(text)])
        };
        texts.flat_map(of_text).collect()
    }

    /// The same for the client of the server.
    pub(super) fn migration(&self) -> String {
        format!("DELIMITER ;;\n{};;\nDELIMITER ;\n", self.statements(true).join(";;\n"))
    }

    fn filled(&self, text: &str) -> String {
        let text = PARTS.iter().fold(text.to_owned(), |text, (part, replacement)| text.replace(part, replacement));
        text.replace("{procedures}", &format!("tower-lock procedures {PROCEDURES}")).replace("{p}", &self.prefix)
    }

    /// The statement that reads name, comment and engine of each table and procedure with one of
    /// these names.
    pub(super) fn objects(&self) -> String {
        let names: Vec<_> = TEXTS.iter().flat_map(|text| text.split(DELIMITER)).filter_map(created).collect();
        let names = names.iter().map(|name| format!("'{}_{name}'", self.prefix)).collect::<Vec<_>>().join(", ");
        format!(
            "SELECT CAST(table_name AS BINARY), CAST(table_comment AS BINARY), CAST(engine AS BINARY) \
             FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name IN ({names}) UNION ALL \
             SELECT CAST(routine_name AS BINARY), CAST(routine_comment AS BINARY), NULL \
             FROM information_schema.routines WHERE routine_schema = DATABASE() AND routine_name IN ({names})"
        )
    }
}

/// Bytes in a statement.
fn literal(bytes: Option<&[u8]>) -> String {
    let Some(bytes) = bytes else { return "NULL".to_owned() };
    let mut literal = String::with_capacity(3 + 2 * bytes.len());
    literal.push_str("x'");
    for byte in bytes {
        literal.extend([byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)])));
    }
    literal.push('\'');
    literal
}

/// The name of the table or the procedure that a statement makes.
fn created(statement: &str) -> Option<&str> {
    let (before, name) = statement.split_once("{p}_")?;
    before.contains("CREATE ").then(|| name.split([' ', '(']).next().unwrap_or(name))
}
