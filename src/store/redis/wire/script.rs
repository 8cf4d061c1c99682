//! The Lua scripts and their calls.

use std::{
    fmt::{Display, Write},
    sync::OnceLock,
};

use bytes::Bytes;
use deadpool_redis::redis;

/// The scripts of one file. A script is assembled at its first use.
#[derive(Debug)]
pub(super) struct ScriptFile {
    name: &'static str,
    text: &'static str,
    /// For composed keys, and for a raw one.
    scripts: [OnceLock<Script>; 2],
}

macro_rules! scripts {
    ($($name:ident = $file:literal;)*) => {$(
        pub(super) static $name: ScriptFile =
            ScriptFile::new($file, include_str!(concat!("lua/", $file, ".lua")));
    )*};
}

scripts! {
    ACQUIRE = "acquire";
    ACQUIRE_SHARE = "acquire_share";
    RENEW = "renew";
    RELEASE = "release";
    RELEASE_SHARE = "release_share";
    KEEP = "keep";
    REDEEM = "redeem";
    YIELD = "yield";
    FORCE = "force";
    INSPECT = "inspect";
    DELETE_RECORD = "delete_record";
    SELF_TEST = "self_test";
    VOTE = "vote";
    RAISE = "raise";
    WITHDRAW = "withdraw";
}

/// The start of the lines that only scripts of raw keys have: they also wake the waiters of
/// Redisson. Composed keys pay nothing for them.
const RAW_LINE: &str = "--@raw ";

/// One script. Redis executes it atomically.
#[derive(Debug)]
pub struct Script {
    #[cfg_attr(not(feature = "__internals"), allow(dead_code, reason = "read by the simulator and by `Debug`"))]
    name: &'static str,
    #[cfg_attr(not(feature = "__internals"), allow(dead_code, reason = "read by the simulator and by `Debug`"))]
    is_raw: bool,
    text: String,
    sha: String,
}

/// A call of a script.
#[derive(Clone, Debug)]
pub struct ScriptCall {
    pub(super) script: &'static Script,
    /// Keys and then arguments, one after another: a call of many keys needs two allocations.
    words: String,
    /// Where each word ends.
    ends: Vec<usize>,
    key_count: usize,
    /// Further arguments, which may be any bytes.
    pub(super) data: Vec<Bytes>,
}

impl ScriptFile {
    const fn new(name: &'static str, text: &'static str) -> Self {
        Self { name, text, scripts: [const { OnceLock::new() }; 2] }
    }

    /// The script for composed keys, or for a raw one.
    pub(super) fn of(&'static self, is_raw: bool) -> &'static Script {
        self.scripts[usize::from(is_raw)].get_or_init(|| Script::new(self.name, self.text, is_raw))
    }
}

impl Script {
    fn new(name: &'static str, file: &str, is_raw: bool) -> Self {
        let text = [
            ("raw.lua", include_str!("lua/raw.lua")),
            ("fence.lua", include_str!("lua/fence.lua")),
            ("queue.lua", include_str!("lua/queue.lua")),
            ("newest.lua", include_str!("lua/newest.lua")),
            ("record.lua", include_str!("lua/record.lua")),
            ("each.lua", include_str!("lua/each.lua")),
        ]
        .iter()
        .fold(file.to_owned(), |text, (name, included)| include(&text, name, included));
        let lines = text.split_inclusive('\n').filter(|line| is_raw || !line.trim_start().starts_with(RAW_LINE));
        let text: String = lines.map(|line| line.replacen(RAW_LINE, "", 1)).collect();
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { name, is_raw, text, sha }
    }
}

/// Replaces a line that includes another file. The lines of that file have the markers of the
/// line.
fn include(text: &str, name: &str, included: &str) -> String {
    let directive = format!("--@include {name}");
    let lines = text.split_inclusive('\n').map(|line| match line.split_once(&directive) {
        Some((markers, _)) => included.split_inclusive('\n').map(|line| format!("{markers}{line}")).collect(),
        None => line.to_owned(),
    });
    lines.collect()
}

#[cfg(feature = "__internals")]
impl ScriptCall {
    /// The name of the script.
    pub fn name(&self) -> &'static str {
        self.script.name
    }

    /// Whether it is the script of that name for a raw key.
    pub fn is_raw(&self) -> bool {
        self.script.is_raw
    }

    /// The text of the script, with its includes.
    pub fn text(&self) -> &'static str {
        &self.script.text
    }

    /// Its `KEYS`.
    pub fn keys(&self) -> Vec<String> {
        self.words().take(self.key_count).map(str::to_owned).collect()
    }

    /// The first part of its `ARGV`.
    pub fn args(&self) -> Vec<String> {
        self.words().skip(self.key_count).map(str::to_owned).collect()
    }

    /// The rest of its `ARGV`.
    pub fn data(&self) -> &[Bytes] {
        &self.data
    }
}

impl ScriptCall {
    /// A call without keys and arguments.
    pub(super) fn new(script: &'static Script) -> Self {
        Self { script, words: String::new(), ends: Vec::new(), key_count: 0, data: Vec::new() }
    }

    /// Reserves the space of this number of words.
    pub(super) fn reserve(&mut self, words: usize) {
        const TYPICAL_WORD_BYTES: usize = 24;
        self.ends.reserve(words);
        self.words.reserve(words * TYPICAL_WORD_BYTES);
    }

    /// Appends a key. All keys precede the arguments.
    pub(super) fn key(&mut self, key: impl Display) {
        debug_assert_eq!(self.key_count, self.ends.len());
        self.arg(key);
        self.key_count += 1;
    }

    /// Appends an argument.
    pub(super) fn arg(&mut self, arg: impl Display) {
        // Writing to a `String` does not fail.
        let _ = write!(self.words, "{arg}");
        self.ends.push(self.words.len());
    }

    fn words(&self) -> impl Iterator<Item = &str> {
        let mut start = 0;
        self.ends.iter().map(move |&end| &self.words[std::mem::replace(&mut start, end)..end])
    }

    /// The hash of the script, by which a server knows it.
    pub fn sha(&self) -> &'static str {
        &self.script.sha
    }

    /// The command for a server that knows the script.
    pub fn eval_sha(&self) -> redis::Cmd {
        self.command("EVALSHA", &self.script.sha)
    }

    /// The command for any server.
    pub fn eval(&self) -> redis::Cmd {
        self.command("EVAL", &self.script.text)
    }

    fn command(&self, name: &str, script: &str) -> redis::Cmd {
        let data: usize = self.data.iter().map(Bytes::len).sum();
        let mut command = redis::Cmd::with_capacity(
            self.ends.len() + self.data.len() + 3,
            self.words.len() + data + name.len() + script.len() + 8,
        );
        command.arg(name).arg(script).arg(self.key_count);
        for word in self.words() {
            command.arg(word);
        }
        for data in &self.data {
            command.arg(&data[..]);
        }
        command
    }
}
