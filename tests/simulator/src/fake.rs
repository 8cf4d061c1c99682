//! A fake Redis with two dozen commands that runs scripts in the Lua version of Redis.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    rc::Rc,
};

use mlua::{Function, Lua, MultiValue, Table, Value as LuaValue};
use tower_lock::{__internals::redis_wire::ScriptCall, deadpool_redis::redis::Value};

/// A server without a network, with a settable clock.
#[derive(Debug)]
pub struct FakeRedis {
    lua: Lua,
    /// Runs a function and returns its error as a value.
    guarded: Function,
    /// Keyed by the address of the script text, which is static.
    scripts: HashMap<*const u8, Function>,
    named: HashMap<String, Function>,
    patches: Vec<Patch>,
    data: Rc<RefCell<Data>>,
}

/// A change of a script: the first match of a text is replaced.
#[derive(Clone, Copy, Debug)]
pub struct Patch {
    /// The name of the script. `None`: all scripts that contain the text.
    pub script: Option<&'static str>,
    /// The text to replace.
    pub old: &'static str,
    /// The replacement.
    pub new: &'static str,
}

/// The data of the server.
#[derive(Debug, Default)]
pub struct Data {
    /// The time of the server, in microseconds.
    pub now_us: i64,
    keys: HashMap<String, Entry>,
    /// The number of subscribers by channel.
    pub listeners: HashMap<String, i64>,
    /// Messages that had a subscriber, in order: channel and message.
    pub published: Vec<(String, String)>,
    /// The number of commands that the scripts have run.
    pub commands: u64,
    /// The keys of the script of the crate that runs. No other one may be touched: a Cluster, and
    /// some services, refuse such a script.
    declared: Option<Vec<String>>,
}

#[derive(Clone, Debug)]
struct Entry {
    kind: Kind,
    /// In milliseconds.
    expires: Option<i64>,
}

#[derive(Clone, Debug)]
enum Kind {
    Text(String),
    /// In insertion order.
    Hash(Vec<(String, String)>),
    List(VecDeque<String>),
    /// By score, then by member.
    Sorted(BTreeSet<(i64, String)>),
}

/// The type, content and TTL of a key, for comparisons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dump {
    /// `string`, `hash`, `list` or `zset`.
    pub kind: &'static str,
    /// Alternating fields and values of a hash, sorted by field; the elements of a list;
    /// alternating members and scores; or a string.
    pub content: Vec<String>,
    /// The reply of `PTTL`.
    pub ms_left: i64,
}

/// The reply of a command.
#[derive(Debug)]
enum CommandReply {
    Nothing,
    Number(i64),
    Text(String),
    Status(&'static str),
    Error(String),
    Many(Vec<Self>),
}

type Reply = Result<CommandReply, String>;

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

// === impl FakeRedis ===

impl FakeRedis {
    /// An empty server with patched scripts.
    ///
    /// # Panics
    ///
    /// Panics if Lua does not start.
    pub fn new(patches: &[Patch]) -> Self {
        Self::try_new(patches).expect("Lua starts")
    }

    fn try_new(patches: &[Patch]) -> mlua::Result<Self> {
        let lua = Lua::new();
        let data = Rc::new(RefCell::new(Data::default()));
        let shared = Rc::clone(&data);
        let run = lua.create_function(move |lua, arguments: MultiValue| {
            let arguments: Result<Vec<String>, String> = arguments.iter().map(argument).collect();
            let reply = match arguments {
                Ok(arguments) => shared.borrow_mut().run(&arguments).unwrap_or_else(CommandReply::Error),
                Err(error) => CommandReply::Error(error),
            };
            reply.into_lua(lua)
        })?;
        lua.globals().set("pcall_of_redis", run)?;
        let prelude = "
            local run = pcall_of_redis
            pcall_of_redis = nil
            redis = { pcall = run }
            function redis.call(...)
                local reply = run(...)
                if type(reply) == 'table' and reply.err then error(reply, 0) end
                return reply
            end
            KEYS, ARGV = {}, {}
            setmetatable(_G, {
                __newindex = function(_, name) error('Script attempted to create global variable ' .. tostring(name), 2) end,
                __index = function(_, name) error('Script attempted to access nonexistent global variable ' .. tostring(name), 2) end,
            })
            local pcall = pcall
            return function(script, keys, argv)
                KEYS, ARGV = keys, argv
                return pcall(script)
            end";
        let guarded = lua.load(prelude).set_name("prelude").eval()?;
        let (scripts, named) = (HashMap::new(), HashMap::new());
        Ok(Self { lua, guarded, scripts, named, patches: patches.to_vec(), data })
    }

    /// Runs a script of the crate, at the time that was set.
    ///
    /// # Panics
    ///
    /// Panics if the script is not valid Lua, or touches a key that it does not declare.
    pub fn run(&mut self, call: &ScriptCall) -> Value {
        let function = match self.scripts.get(&call.text().as_ptr()) {
            Some(function) => function.clone(),
            None => {
                let text = self.patched(call.name(), call.text());
                let function = self.lua.load(text).set_name(call.name()).into_function().expect("a script");
                self.scripts.insert(call.text().as_ptr(), function.clone());
                function
            }
        };
        let data = call.data().iter().map(|data| String::from_utf8_lossy(data).into_owned());
        let args: Vec<_> = call.args().into_iter().chain(data).collect();
        let keys = call.keys();
        self.data.borrow_mut().declared = Some(keys.clone());
        let reply = self.call(&function, &keys, &args);
        self.data.borrow_mut().declared = None;
        reply
    }

    /// Runs any script, for example of another program.
    ///
    /// # Panics
    ///
    /// Panics if the script is not valid Lua.
    pub fn eval(&mut self, script: &str, keys: &[&str], args: &[&str]) -> Value {
        if !self.named.contains_key(script) {
            let function = self.lua.load(script).into_function().expect("a script");
            self.named.insert(script.to_owned(), function);
        }
        let function = self.named[script].clone();
        let owned = |arguments: &[&str]| arguments.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        self.call(&function, &owned(keys), &owned(args))
    }

    /// Runs one command.
    pub fn command(&mut self, arguments: &[&str]) -> Value {
        let arguments: Vec<_> = arguments.iter().map(|&word| word.to_owned()).collect();
        self.data.borrow_mut().run(&arguments).unwrap_or_else(CommandReply::Error).into_value()
    }

    /// The data of the server.
    pub fn data(&self) -> std::cell::RefMut<'_, Data> {
        self.data.borrow_mut()
    }

    fn patched(&self, name: &str, text: &str) -> String {
        let patches = self.patches.iter().filter(|patch| patch.script.is_none_or(|script| script == name));
        patches.fold(text.to_owned(), |text, patch| {
            assert!(patch.script.is_none() || text.contains(patch.old), "{name} has no {:?}", patch.old);
            text.replace(patch.old, patch.new)
        })
    }

    fn call(&self, function: &Function, keys: &[String], args: &[String]) -> Value {
        let table = |arguments: &[String]| self.lua.create_sequence_from(arguments.iter().map(String::as_str));
        let run = || -> mlua::Result<Value> {
            let (ok, result): (bool, LuaValue) = self.guarded.call((function, table(keys)?, table(args)?))?;
            Ok(if ok { script_reply(&result)? } else { raised(&result)? })
        };
        run().expect("Lua runs")
    }
}

/// Converts the result of a script as Redis does: numbers are truncated, an array ends at its first
/// nil.
fn script_reply(result: &LuaValue) -> mlua::Result<Value> {
    Ok(match result {
        LuaValue::Boolean(true) => Value::Int(1),
        LuaValue::Integer(number) => Value::Int(*number),
        #[expect(clippy::cast_possible_truncation, reason = "as Redis does")]
        LuaValue::Number(number) => Value::Int(*number as i64),
        LuaValue::String(text) => Value::BulkString(text.as_bytes().to_vec()),
        LuaValue::Table(table) => {
            if let Some(error) = field(table, "err")? {
                return Ok(server_error(&error));
            }
            if let Some(status) = field(table, "ok")? {
                return Ok(Value::SimpleString(status));
            }
            let mut items = Vec::new();
            for at in 1.. {
                match table.raw_get(at)? {
                    LuaValue::Nil => break,
                    item => items.push(script_reply(&item)?),
                }
            }
            Value::Array(items)
        }
        _ => Value::Nil,
    })
}

fn raised(error: &LuaValue) -> mlua::Result<Value> {
    let text = match error {
        LuaValue::Table(table) => field(table, "err")?.unwrap_or_default(),
        LuaValue::String(text) => format!("ERR {}", text.to_string_lossy()),
        other => format!("ERR {other:?}"),
    };
    Ok(server_error(&text))
}

fn field(table: &Table, name: &str) -> mlua::Result<Option<String>> {
    match table.raw_get(name)? {
        LuaValue::String(text) => Ok(Some(text.to_string_lossy())),
        _ => Ok(None),
    }
}

/// Marks an error of the server, unlike any reply of our scripts.
fn server_error(text: &str) -> Value {
    Value::SimpleString(format!("-{text}"))
}

/// Converts an argument of `redis.call` as Redis does.
fn argument(value: &LuaValue) -> Result<String, String> {
    match value {
        LuaValue::String(text) => Ok(text.to_string_lossy()),
        LuaValue::Integer(number) => Ok(number.to_string()),
        LuaValue::Number(number) if number.fract() == 0.0 && number.abs() < 1e15 => Ok(format!("{number:.0}")),
        // `%.17g`
        LuaValue::Number(number) if number.fract() == 0.0 && number.abs() < 1e17 => Ok(format!("{number:.0}")),
        LuaValue::Number(number) => Ok(number.to_string()),
        _ => Err("ERR Lua redis lib command arguments must be strings or integers".to_owned()),
    }
}

// === impl Data ===

impl Data {
    /// All keys that have not expired.
    pub fn dump(&mut self) -> BTreeMap<String, Dump> {
        let now = self.now_ms();
        self.keys.retain(|_, entry| !entry.is_expired(now));
        let dump = |entry: &Entry| {
            let (kind, content) = match &entry.kind {
                Kind::Text(text) => ("string", vec![text.clone()]),
                Kind::Hash(fields) => {
                    let mut fields = fields.clone();
                    fields.sort();
                    ("hash", fields.into_iter().flat_map(|(field, value)| [field, value]).collect())
                }
                Kind::List(list) => ("list", list.iter().cloned().collect()),
                Kind::Sorted(members) => {
                    let pairs = members.iter().flat_map(|(score, member)| [member.clone(), score.to_string()]);
                    ("zset", pairs.collect())
                }
            };
            Dump { kind, content, ms_left: entry.expires.map_or(-1, |at| at - now) }
        };
        self.keys.iter().map(|(key, entry)| (key.clone(), dump(entry))).collect()
    }

    /// The fields and values of a hash; empty for other types.
    pub fn hash(&self, key: &str) -> Vec<(String, String)> {
        match self.live(key).map(|entry| &entry.kind) {
            Some(Kind::Hash(fields)) => fields.clone(),
            _ => Vec::new(),
        }
    }

    /// The elements of a list; empty for other types.
    pub fn list(&self, key: &str) -> Vec<String> {
        match self.live(key).map(|entry| &entry.kind) {
            Some(Kind::List(list)) => list.iter().cloned().collect(),
            _ => Vec::new(),
        }
    }

    /// The members and scores of a sorted set; empty for other types.
    pub fn sorted(&self, key: &str) -> Vec<(i64, String)> {
        match self.live(key).map(|entry| &entry.kind) {
            Some(Kind::Sorted(members)) => members.iter().cloned().collect(),
            _ => Vec::new(),
        }
    }

    /// The reply of `TYPE`.
    pub fn kind(&self, key: &str) -> &'static str {
        match self.live(key).map(|entry| &entry.kind) {
            None => "none",
            Some(Kind::Text(_)) => "string",
            Some(Kind::Hash(_)) => "hash",
            Some(Kind::List(_)) => "list",
            Some(Kind::Sorted(_)) => "zset",
        }
    }

    /// The reply of `PTTL`.
    pub fn ms_left(&self, key: &str) -> i64 {
        let Some(entry) = self.live(key) else { return -2 };
        entry.expires.map_or(-1, |at| at - self.now_ms())
    }

    /// Removes all data.
    pub fn flush(&mut self) {
        self.keys.clear();
    }

    fn now_ms(&self) -> i64 {
        self.now_us / 1000
    }

    fn live(&self, key: &str) -> Option<&Entry> {
        self.keys.get(key).filter(|entry| !entry.is_expired(self.now_ms()))
    }

    /// The entry of a key that has not expired.
    fn entry(&mut self, key: &str) -> Option<&mut Entry> {
        let now = self.now_ms();
        if self.keys.get(key)?.is_expired(now) {
            self.keys.remove(key);
        }
        self.keys.get_mut(key)
    }

    fn hash_mut(&mut self, key: &str, make: bool) -> Result<Option<&mut Vec<(String, String)>>, String> {
        if self.entry(key).is_none() && make {
            self.keys.insert(key.to_owned(), Entry { kind: Kind::Hash(Vec::new()), expires: None });
        }
        match self.entry(key).map(|entry| &mut entry.kind) {
            None => Ok(None),
            Some(Kind::Hash(fields)) => Ok(Some(fields)),
            Some(_) => Err(WRONG_TYPE.to_owned()),
        }
    }

    fn list_mut(&mut self, key: &str, make: bool) -> Result<Option<&mut VecDeque<String>>, String> {
        if self.entry(key).is_none() && make {
            self.keys.insert(key.to_owned(), Entry { kind: Kind::List(VecDeque::new()), expires: None });
        }
        match self.entry(key).map(|entry| &mut entry.kind) {
            None => Ok(None),
            Some(Kind::List(list)) => Ok(Some(list)),
            Some(_) => Err(WRONG_TYPE.to_owned()),
        }
    }

    fn sorted_mut(&mut self, key: &str, make: bool) -> Result<Option<&mut BTreeSet<(i64, String)>>, String> {
        if self.entry(key).is_none() && make {
            self.keys.insert(key.to_owned(), Entry { kind: Kind::Sorted(BTreeSet::new()), expires: None });
        }
        match self.entry(key).map(|entry| &mut entry.kind) {
            None => Ok(None),
            Some(Kind::Sorted(members)) => Ok(Some(members)),
            Some(_) => Err(WRONG_TYPE.to_owned()),
        }
    }

    fn text(&mut self, key: &str) -> Result<Option<String>, String> {
        match self.entry(key).map(|entry| &entry.kind) {
            None => Ok(None),
            Some(Kind::Text(text)) => Ok(Some(text.clone())),
            Some(_) => Err(WRONG_TYPE.to_owned()),
        }
    }

    fn set(&mut self, key: &str, value: &str, options: &[&str]) -> Reply {
        let has = |option| options.iter().any(|given| given.eq_ignore_ascii_case(option));
        let old = if has("GET") { self.text(key)? } else { None };
        if !(has("NX") && self.entry(key).is_some()) {
            let expires = match options {
                ["PX", ms] => Some(self.now_ms() + ms.parse::<i64>().map_err(|_| "ERR syntax error")?),
                _ => None,
            };
            self.keys.insert(key.to_owned(), Entry { kind: Kind::Text(value.to_owned()), expires });
        }
        Ok(if has("GET") { old.map_or(CommandReply::Nothing, CommandReply::Text) } else { CommandReply::Status("OK") })
    }

    fn run(&mut self, arguments: &[String]) -> Reply {
        self.commands += 1;
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let [verb, arguments @ ..] = arguments.as_slice() else { return Err("ERR no command".to_owned()) };
        let verb = verb.to_ascii_uppercase();
        if let Some(declared) = &self.declared {
            let keys = match verb.as_str() {
                "EXISTS" | "DEL" => arguments,
                "TIME" | "PUBLISH" | "PUBSUB" => &[],
                _ => &arguments[..1],
            };
            let other = keys.iter().find(|key| !declared.iter().any(|declared| declared == *key));
            assert_eq!(other, None, "{verb}: a key that the script does not declare");
        }
        let number =
            |text: &str| text.parse::<i64>().map_err(|_| "ERR value is not an integer or out of range".to_owned());
        let count = |yes: bool| CommandReply::Number(i64::from(yes));
        match (verb.as_str(), arguments) {
            ("TIME", []) => {
                let parts = [self.now_us / 1_000_000, self.now_us % 1_000_000];
                Ok(CommandReply::Many(parts.map(|part| CommandReply::Text(part.to_string())).into()))
            }
            ("EXISTS", keys) => {
                Ok(CommandReply::Number(keys.iter().map(|key| i64::from(self.entry(key).is_some())).sum()))
            }
            ("SET", [key, value, options @ ..]) => self.set(key, value, options),
            ("GET", [key]) => Ok(self.text(key)?.map_or(CommandReply::Nothing, CommandReply::Text)),
            ("DEL", keys) => {
                let removed = keys.iter().filter(|key| self.entry(key).is_some() && self.keys.remove(**key).is_some());
                let removed = removed.count();
                Ok(CommandReply::Number(i64::try_from(removed).expect("few")))
            }
            ("PEXPIRE", [key, ms, options @ ..]) => {
                let (ms, now) = (number(ms)?, self.now_ms());
                let Some(entry) = self.entry(key) else { return Ok(count(false)) };
                // A key without a TTL never expires.
                if options == ["GT"] && entry.expires.is_none_or(|expires| now + ms <= expires) {
                    return Ok(count(false));
                }
                entry.expires = Some(now + ms);
                if ms <= 0 {
                    self.keys.remove(*key);
                }
                Ok(count(true))
            }
            ("PTTL", [key]) => Ok(CommandReply::Number(self.ms_left(key))),
            ("TYPE", [key]) => Ok(CommandReply::Status(self.kind(key))),
            (_, [key, arguments @ ..]) if verb.starts_with('H') => self.run_hash(&verb, key, arguments),
            (_, [key, arguments @ ..]) if verb.starts_with('L') || verb.starts_with('R') => {
                self.run_list(&verb, key, arguments)
            }
            (_, [key, arguments @ ..]) if verb.starts_with('Z') => self.run_sorted(&verb, key, arguments),
            ("PUBLISH", [channel, message]) => {
                let receivers = self.listeners.get(*channel).copied().unwrap_or(0);
                if receivers > 0 {
                    self.published.push(((*channel).to_owned(), (*message).to_owned()));
                }
                Ok(CommandReply::Number(receivers))
            }
            ("PUBSUB", [subcommand, channels @ ..]) if subcommand.eq_ignore_ascii_case("NUMSUB") => {
                let counts = channels.iter().flat_map(|channel| {
                    let receivers = self.listeners.get(*channel).copied().unwrap_or(0);
                    [CommandReply::Text((*channel).to_owned()), CommandReply::Number(receivers)]
                });
                Ok(CommandReply::Many(counts.collect()))
            }
            _ => Err(format!("ERR unknown command or wrong number of arguments: {arguments:?}")),
        }
    }

    fn run_hash(&mut self, verb: &str, key: &str, arguments: &[&str]) -> Reply {
        let make = matches!(verb, "HSET" | "HINCRBY");
        let mut nothing = Vec::new();
        let fields = self.hash_mut(key, make)?.unwrap_or(&mut nothing);
        let find = |fields: &[(String, String)], name: &str| fields.iter().position(|(field, _)| field == name);
        match (verb, arguments) {
            ("HSET", pairs) if !pairs.is_empty() && pairs.len() % 2 == 0 => {
                let before = fields.len();
                for pair in pairs.chunks_exact(2) {
                    match find(fields, pair[0]) {
                        Some(at) => pair[1].clone_into(&mut fields[at].1),
                        None => fields.push((pair[0].to_owned(), pair[1].to_owned())),
                    }
                }
                Ok(CommandReply::Number(i64::try_from(fields.len() - before).expect("few")))
            }
            ("HINCRBY", [field, by]) => {
                let by: i64 = by.parse().map_err(|_| "ERR value is not an integer or out of range")?;
                let at = find(fields, field).unwrap_or_else(|| {
                    fields.push(((*field).to_owned(), "0".to_owned()));
                    fields.len() - 1
                });
                let sum = by + fields[at].1.parse::<i64>().map_err(|_| "ERR hash value is not an integer")?;
                fields[at].1 = sum.to_string();
                Ok(CommandReply::Number(sum))
            }
            ("HGET", [field]) => {
                Ok(find(fields, field).map_or(CommandReply::Nothing, |at| CommandReply::Text(fields[at].1.clone())))
            }
            ("HEXISTS", [field]) => Ok(CommandReply::Number(i64::from(find(fields, field).is_some()))),
            ("HDEL", [field]) => {
                let Some(at) = find(fields, field) else { return Ok(CommandReply::Number(0)) };
                fields.remove(at);
                if fields.is_empty() {
                    self.keys.remove(key);
                }
                Ok(CommandReply::Number(1))
            }
            // A small hash is returned in one reply.
            ("HSCAN", ["0", "COUNT", _]) => {
                let all = fields.iter().flat_map(|(field, value)| [field, value]);
                let all = all.map(|text| CommandReply::Text(text.clone())).collect();
                Ok(CommandReply::Many(vec![CommandReply::Text("0".to_owned()), CommandReply::Many(all)]))
            }
            _ => Err(format!("ERR unknown command or wrong number of arguments: {verb}")),
        }
    }

    fn run_list(&mut self, verb: &str, key: &str, arguments: &[&str]) -> Reply {
        let mut nothing = VecDeque::new();
        let list = self.list_mut(key, verb == "RPUSH")?.unwrap_or(&mut nothing);
        let length = |list: &VecDeque<String>| i64::try_from(list.len()).expect("short");
        match (verb, arguments) {
            ("RPUSH", values) => {
                list.extend(values.iter().map(|&value| value.to_owned()));
                Ok(CommandReply::Number(length(list)))
            }
            ("LPOP", []) => {
                let head = list.pop_front();
                if list.is_empty() {
                    self.keys.remove(key);
                }
                Ok(head.map_or(CommandReply::Nothing, CommandReply::Text))
            }
            ("LLEN", []) => Ok(CommandReply::Number(length(list))),
            ("LRANGE", [from, to]) => {
                let at = |text: &str| {
                    let at: i64 = text.parse().map_err(|_| "ERR value is not an integer or out of range")?;
                    Ok::<_, String>(usize::try_from(if at < 0 { length(list) + at } else { at }).unwrap_or(0))
                };
                let (from, to) = (at(from)?, at(to)?);
                let range = list.iter().skip(from).take((to + 1).saturating_sub(from));
                Ok(CommandReply::Many(range.cloned().map(CommandReply::Text).collect()))
            }
            ("LPOS", [value, options @ ..]) => {
                let most = match options {
                    [] => list.len(),
                    ["MAXLEN", most] => most.parse().map_err(|_| "ERR value is not an integer or out of range")?,
                    _ => return Err("ERR syntax error".to_owned()),
                };
                let at = list.iter().take(most).position(|element| element == value);
                Ok(at.map_or(CommandReply::Nothing, |at| CommandReply::Number(i64::try_from(at).expect("short"))))
            }
            ("LREM", [count @ ("1" | "-1"), value]) => {
                let found = |element: &String| element == value;
                let at = if *count == "1" { list.iter().position(found) } else { list.iter().rposition(found) };
                let Some(at) = at else {
                    return Ok(CommandReply::Number(0));
                };
                list.remove(at);
                if list.is_empty() {
                    self.keys.remove(key);
                }
                Ok(CommandReply::Number(1))
            }
            _ => Err(format!("ERR unknown command or wrong number of arguments: {verb}")),
        }
    }
}

impl Data {
    fn run_sorted(&mut self, verb: &str, key: &str, arguments: &[&str]) -> Reply {
        let mut nothing = BTreeSet::new();
        let members = self.sorted_mut(key, verb == "ZADD")?.unwrap_or(&mut nothing);
        let score = |text: &str| text.parse::<i64>().map_err(|_| "ERR value is not a valid float".to_owned());
        let find = |members: &BTreeSet<(i64, String)>, name: &str| {
            members.iter().find(|(_, member)| member == name).map(|(score, _)| *score)
        };
        let number = |number: usize| CommandReply::Number(i64::try_from(number).expect("few"));
        let reply = match (verb, arguments) {
            ("ZADD", [options @ .., new, member]) => {
                let (new, old) = (score(new)?, find(members, member));
                let refused =
                    old.map_or(options.contains(&"XX"), |old| options.contains(&"GT") && new <= old || new == old);
                if !refused {
                    members.retain(|(_, other)| other != member);
                    members.insert((new, (*member).to_owned()));
                }
                number(usize::from(!refused && (old.is_none() || options.contains(&"CH"))))
            }
            ("ZREM", [member]) => {
                let before = members.len();
                members.retain(|(_, other)| other != member);
                number(before - members.len())
            }
            ("ZREMRANGEBYSCORE", ["-inf", most]) => {
                let (before, most) = (members.len(), score(most)?);
                members.retain(|(score, _)| *score > most);
                number(before - members.len())
            }
            ("ZCARD", []) => number(members.len()),
            ("ZSCORE", [member]) => {
                find(members, member).map_or(CommandReply::Nothing, |score| CommandReply::Text(score.to_string()))
            }
            ("ZRANGE", [from, "+inf", "BYSCORE", "LIMIT", "0", most]) => {
                let from = score(from.trim_start_matches('('))?;
                let most = usize::try_from(score(most)?).expect("few");
                let found = members.iter().filter(|(score, _)| *score > from).take(most);
                CommandReply::Many(found.map(|(_, member)| CommandReply::Text(member.clone())).collect())
            }
            ("ZRANGE", [from, to, options @ ..]) => {
                let all: Vec<_> = members.iter().collect();
                let at = |text: &str| {
                    let (at, length) = (score(text)?, i64::try_from(all.len()).expect("few"));
                    Ok::<_, String>(if at < 0 { length + at } else { at })
                };
                let (from, to) = (at(from)?, at(to)?);
                let with_scores = options == ["WITHSCORES"];
                let range = all.iter().zip(0..).filter(|(_, at)| (from..=to).contains(at)).map(|(pair, _)| pair);
                let words = range.flat_map(|(score, member)| {
                    let score = with_scores.then(|| score.to_string());
                    [Some(member.clone()), score].into_iter().flatten()
                });
                CommandReply::Many(words.map(CommandReply::Text).collect())
            }
            _ => return Err(format!("ERR unknown command or wrong number of arguments: {verb}")),
        };
        if self.sorted_mut(key, false)?.is_some_and(|members| members.is_empty()) {
            self.keys.remove(key);
        }
        Ok(reply)
    }
}

impl Entry {
    fn is_expired(&self, now_ms: i64) -> bool {
        self.expires.is_some_and(|at| now_ms > at)
    }
}

// === impl CommandReply ===

impl CommandReply {
    /// The value as Lua sees it: nil is `false`.
    fn into_lua(self, lua: &Lua) -> mlua::Result<LuaValue> {
        let named = |name: &str, text: &str| {
            let table = lua.create_table()?;
            table.raw_set(name, text)?;
            Ok(LuaValue::Table(table))
        };
        match self {
            Self::Nothing => Ok(LuaValue::Boolean(false)),
            #[expect(clippy::cast_precision_loss, reason = "as in Redis: numbers are doubles")]
            Self::Number(number) => Ok(LuaValue::Number(number as f64)),
            Self::Text(text) => Ok(LuaValue::String(lua.create_string(text)?)),
            Self::Status(status) => named("ok", status),
            Self::Error(error) => named("err", &error),
            Self::Many(items) => {
                let items: mlua::Result<Vec<_>> = items.into_iter().map(|item| item.into_lua(lua)).collect();
                Ok(LuaValue::Table(lua.create_sequence_from(items?)?))
            }
        }
    }

    fn into_value(self) -> Value {
        match self {
            Self::Nothing => Value::Nil,
            Self::Number(number) => Value::Int(number),
            Self::Text(text) => Value::BulkString(text.into_bytes()),
            Self::Status(status) => Value::SimpleString(status.to_owned()),
            Self::Error(error) => server_error(&error),
            Self::Many(items) => Value::Array(items.into_iter().map(Self::into_value).collect()),
        }
    }
}
