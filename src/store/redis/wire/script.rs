//! The Lua scripts and their calls.

use std::{
    fmt::{Display, Write},
    sync::LazyLock,
};

use bytes::Bytes;
use deadpool_redis::redis;

macro_rules! scripts {
    ($($name:ident = $file:literal, $keys:expr;)*) => {$(
        pub(super) static $name: LazyLock<Script> =
            LazyLock::new(|| Script::new($file, include_str!(concat!("lua/", $file, ".lua")), $keys));
    )*};
}

scripts! {
    ACQUIRE = "acquire", Keys::Composed;
    RENEW = "renew", Keys::Composed;
    RELEASE = "release", Keys::Composed;
    YIELD = "yield", Keys::Composed;
    FORCE = "force", Keys::Composed;
    INSPECT = "inspect", Keys::Composed;
    DELETE_RECORD = "delete_record", Keys::Composed;
    SELF_TEST = "self_test", Keys::Composed;
    RAW_ACQUIRE = "acquire", Keys::Raw;
    RAW_RELEASE = "release", Keys::Raw;
    RAW_YIELD = "yield", Keys::Raw;
    RAW_FORCE = "force", Keys::Raw;
}

/// The keys that a script is for. A script of a raw key also wakes the waiters of Redisson, and
/// composed keys pay nothing for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keys {
    Composed,
    Raw,
}

/// The start of a line that only the scripts of raw keys have.
const RAW_LINE: &str = "--@raw ";

/// One script. Redis executes it atomically.
#[derive(Debug)]
pub struct Script {
    #[cfg_attr(not(feature = "__internals"), allow(dead_code, reason = "read by the simulator and by `Debug`"))]
    name: &'static str,
    #[cfg_attr(not(feature = "__internals"), allow(dead_code, reason = "read by the simulator and by `Debug`"))]
    keys: Keys,
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

impl Script {
    fn new(name: &'static str, file: &'static str, keys: Keys) -> Self {
        let text = file
            .replace("--@include fence.lua", include_str!("lua/fence.lua"))
            .replace("--@include queue.lua", include_str!("lua/queue.lua"))
            .replace("--@include record.lua", include_str!("lua/record.lua"));
        let text = match keys {
            Keys::Raw => text.replace(RAW_LINE, "").replace("--@include raw.lua", include_str!("lua/raw.lua")),
            Keys::Composed => {
                let lines = text.split_inclusive('\n').filter(|line| !line.trim_start().starts_with(RAW_LINE));
                lines.collect()
            }
        };
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { name, keys, text, sha }
    }
}

#[cfg(feature = "__internals")]
impl ScriptCall {
    /// The name of the script.
    pub fn name(&self) -> &'static str {
        self.script.name
    }

    /// Whether it is the script of that name for a raw key.
    pub fn is_raw(&self) -> bool {
        self.script.keys == Keys::Raw
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
