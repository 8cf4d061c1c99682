//! The scripts.

use std::sync::LazyLock;

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

/// One script: Redis runs it without anybody in between.
#[derive(Debug)]
pub struct Script {
    #[cfg_attr(not(feature = "__internals"), allow(dead_code, reason = "who reads a log wants to know"))]
    name: &'static str,
    text: String,
    sha: String,
}

/// One question to Redis.
#[derive(Clone, Debug)]
pub struct ScriptCall {
    pub(super) script: &'static Script,
    pub(super) keys: Vec<String>,
    pub(super) args: Vec<String>,
}

impl Script {
    fn new(name: &'static str, file: &'static str) -> Self {
        let text = file
            .replace("--@include fence.lua", include_str!("lua/fence.lua"))
            .replace("--@include give_on.lua", include_str!("lua/give_on.lua"));
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { name, text, sha }
    }
}

#[cfg(feature = "__internals")]
impl ScriptCall {
    /// Which script.
    pub fn name(&self) -> &'static str {
        self.script.name
    }

    /// Its text, with what it includes.
    pub fn text(&self) -> &'static str {
        &self.script.text
    }

    /// Its `KEYS`.
    pub fn keys(&self) -> &[String] {
        &self.keys
    }

    /// Its `ARGV`.
    pub fn args(&self) -> &[String] {
        &self.args
    }
}

impl ScriptCall {
    /// As a server that knows it is asked.
    pub fn eval_sha(&self) -> redis::Cmd {
        self.command("EVALSHA", &self.script.sha)
    }

    /// As any server is asked.
    pub fn eval(&self) -> redis::Cmd {
        self.command("EVAL", &self.script.text)
    }

    fn command(&self, verb: &str, script: &str) -> redis::Cmd {
        let mut command = redis::cmd(verb);
        command.arg(script).arg(self.keys.len()).arg(&self.keys).arg(&self.args);
        command
    }
}
