//! The Lua scripts and their calls.

use std::sync::LazyLock;

use bytes::Bytes;
use deadpool_redis::redis;

macro_rules! scripts {
    ($($name:ident = $file:literal;)*) => {$(
        pub(super) static $name: LazyLock<Script> = LazyLock::new(|| Script::new($file, include_str!(concat!("lua/", $file, ".lua"))));
    )*};
}

scripts! {
    ACQUIRE = "acquire";
    RENEW = "renew";
    RELEASE = "release";
    YIELD = "yield";
    FORCE = "force";
    INSPECT = "inspect";
    SELF_TEST = "self_test";
}

/// One script. Redis executes it atomically.
#[derive(Debug)]
pub struct Script {
    #[cfg_attr(not(feature = "__internals"), allow(dead_code, reason = "read by the simulator and by `Debug`"))]
    name: &'static str,
    text: String,
    sha: String,
}

/// A call of a script.
#[derive(Clone, Debug)]
pub struct ScriptCall {
    pub(super) script: &'static Script,
    pub(super) keys: Vec<String>,
    pub(super) args: Vec<String>,
    /// Further arguments, which may be any bytes.
    pub(super) data: Vec<Bytes>,
}

impl Script {
    fn new(name: &'static str, file: &'static str) -> Self {
        let text = file
            .replace("--@include fence.lua", include_str!("lua/fence.lua"))
            .replace("--@include queue.lua", include_str!("lua/queue.lua"))
            .replace("--@include record.lua", include_str!("lua/record.lua"));
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { name, text, sha }
    }
}

#[cfg(feature = "__internals")]
impl ScriptCall {
    /// The name of the script.
    pub fn name(&self) -> &'static str {
        self.script.name
    }

    /// The text of the script, with its includes.
    pub fn text(&self) -> &'static str {
        &self.script.text
    }

    /// Its `KEYS`.
    pub fn keys(&self) -> &[String] {
        &self.keys
    }

    /// The first part of its `ARGV`.
    pub fn args(&self) -> &[String] {
        &self.args
    }

    /// The rest of its `ARGV`.
    pub fn data(&self) -> &[Bytes] {
        &self.data
    }
}

impl ScriptCall {
    /// The command for a server that knows the script.
    pub fn eval_sha(&self) -> redis::Cmd {
        self.command("EVALSHA", &self.script.sha)
    }

    /// The command for any server.
    pub fn eval(&self) -> redis::Cmd {
        self.command("EVAL", &self.script.text)
    }

    fn command(&self, name: &str, script: &str) -> redis::Cmd {
        let mut command = redis::cmd(name);
        command.arg(script).arg(self.keys.len()).arg(&self.keys).arg(&self.args);
        for data in &self.data {
            command.arg(&data[..]);
        }
        command
    }
}
