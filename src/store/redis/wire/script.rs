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
    /// By [`Variant::index`].
    scripts: [OnceLock<Script>; 4],
}

macro_rules! scripts {
    ($($name:ident = $file:literal;)*) => {$(
        pub(super) static $name: ScriptFile =
            ScriptFile::new($file, include_str!(concat!("lua/", $file, ".lua")));
    )*};
}

scripts! {
    ACQUIRE = "acquire";
    ACQUIRE_FREE = "acquire_free";
    RENEW = "renew";
    RELEASE = "release";
    RELEASE_UNQUEUED = "release_unqueued";
    YIELD = "yield";
    FORCE = "force";
    INSPECT = "inspect";
    DELETE_RECORD = "delete_record";
    SELF_TEST = "self_test";
    COMPLETE = "complete";
    NEXT_FENCE = "next_fence";
    READ_RECORD = "read_record";
    WRITE_RECORD = "write_record";
    DELETE_RECORD_ALONE = "delete_record_alone";
    LEAVE_QUEUE = "leave_queue";
    WAKE_QUEUE = "wake_queue";
    VOTE = "vote";
    RAISE = "raise";
    WITHDRAW = "withdraw";
}

/// The keys and the server that a script is for. Composed keys on a single server pay nothing for
/// the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Variant {
    /// Also wakes the waiters of Redisson.
    pub(super) is_raw: bool,
    /// For the nodes of a Cluster.
    pub(super) is_cluster: bool,
}

/// The starts of lines that only some variants have.
const RAW_LINE: &str = "--@raw ";
const CLUSTER_LINE: &str = "--@cluster ";
const SINGLE_LINE: &str = "--@single ";

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
        Self { name, text, scripts: [const { OnceLock::new() }; 4] }
    }

    /// The script for these keys.
    pub(super) fn of(&'static self, variant: Variant) -> &'static Script {
        self.scripts[variant.index()].get_or_init(|| Script::new(self.name, self.text, variant))
    }
}

impl Variant {
    fn index(self) -> usize {
        usize::from(self.is_raw) + 2 * usize::from(self.is_cluster)
    }

    /// A line without its markers. `None`: it is one of other variants.
    fn line(self, line: &str) -> Option<String> {
        let markers = [(RAW_LINE, self.is_raw), (CLUSTER_LINE, self.is_cluster), (SINGLE_LINE, !self.is_cluster)];
        let mut line = line.to_owned();
        while let Some((marker, is_kept)) = markers.iter().find(|(marker, _)| line.trim_start().starts_with(marker)) {
            if !is_kept {
                return None;
            }
            line = line.replacen(marker, "", 1);
        }
        Some(line)
    }
}

impl Script {
    fn new(name: &'static str, file: &str, variant: Variant) -> Self {
        let with_raw = include(file, "raw.lua", include_str!("lua/raw.lua"));
        let text = [
            ("cluster.lua", include_str!("lua/cluster.lua")),
            ("fence.lua", include_str!("lua/fence.lua")),
            ("queue.lua", include_str!("lua/queue.lua")),
            ("record.lua", include_str!("lua/record.lua")),
        ]
        .iter()
        .fold(with_raw, |text, (name, included)| include(&text, name, included));
        let text: String = text.split_inclusive('\n').filter_map(|line| variant.line(line)).collect();
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { name, is_raw: variant.is_raw, text, sha }
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
