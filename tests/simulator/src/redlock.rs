//! Acquisitions on several independent servers: the shipped scripts and the shipped decisions, with
//! messages that are late, lost, and delivered in any order.
//!
//! Each server is a [fake Redis](crate::fake) with a clock of its own. A few clients acquire one
//! key, yield it, and release it. At most one server restarts without its data in each simulation.
//! After each step: the fence of each grant is larger than those of all grants before it, and no
//! two grants are within their deadlines, unless a server has lost its data within a lease.

use std::time::Duration;

use tower_lock::{
    __internals::{
        quorum::{Ballot, Raise, Replies},
        redis_wire::{Keyspace, RaiseRequest, Raised, ScriptCall, Timed, Vote, parse_raise, parse_vote},
    },
    AcquisitionId, LockKey,
    deadpool_redis::redis::Value,
    store::{AcquisitionIds, QueueConfig, ReleaseRequest},
};

use crate::fake::{FakeRedis, Patch};

/// The settings of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The number of servers.
    pub servers: usize,
    /// A server restarts without its data, and is down for this time.
    pub restarts_after: Option<Duration>,
    /// A broken rule.
    pub mutation: Option<Mutation>,
    /// Changed scripts.
    pub patches: &'static [Patch],
}

/// A broken rule of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// A grant counts after the vote: the largest fence of a majority, plus one.
    NoRaise,
    /// The fence of a grant is the smallest one of its majority.
    SmallestFence,
    /// A grant counts when one server less than a majority has its fence.
    SmallMajority,
    /// The deadline of a grant counts from its last reply.
    DeadlineFromReply,
    /// A grant counts although its deadline has passed.
    NoDeadline,
}

/// What happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// The grants that counted.
    pub grants: u64,
    /// Those of a later server set than the one before: by another client, or after a restart.
    pub handoffs: u64,
    /// The yields.
    pub yields: u64,
    /// The votes that no acquisition has won.
    pub lost_votes: u64,
}

const CLIENTS: usize = 3;
const STEPS: usize = 600;
const START: i64 = 1_700_000_000_000_000;
const LEASE: Duration = Duration::from_millis(400);
const VALID_FOR: Duration = Duration::from_millis(100);
/// The part of a lease and of a validity that is used.
const DRIFT: i64 = 5_000;
/// Clocks differ by at most twice this.
const SKEW: i64 = 20_000;

struct World {
    options: Options,
    rng: fastrand::Rng,
    names: Keyspace,
    key: LockKey,
    now: i64,
    servers: Vec<Server>,
    clients: Vec<Client>,
    messages: Vec<Message>,
    last_fence: u64,
    last_holder: usize,
    /// Until then a server has lost data that it has confirmed.
    lossy_until: i64,
    has_restarted: bool,
    report: Report,
}

struct Server {
    redis: FakeRedis,
    offset: i64,
    down_until: i64,
}

struct Client {
    ids: AcquisitionIds,
    state: State,
    /// The number of the question that is asked. Replies to others are ignored.
    question: u64,
    /// The deadline and the fence of the grant that it holds.
    holds: Option<(AcquisitionId, u64, i64)>,
}

#[derive(Clone, Debug)]
enum State {
    /// With the id of an acquisition that has failed, which may be repeated.
    Idle(Option<AcquisitionId>),
    Voting {
        id: AcquisitionId,
        called: i64,
        votes: Replies<Vote>,
    },
    Raising {
        id: AcquisitionId,
        called: i64,
        fence: u64,
        raised: Replies<Raised>,
    },
}

enum Message {
    /// The client and the question expect a reply, or nobody does.
    Request {
        server: usize,
        to: Option<(usize, u64)>,
        call: ScriptCall,
    },
    Reply {
        server: usize,
        client: usize,
        question: u64,
        reply: Value,
    },
}

/// Simulates one seed. An error names the rule that was broken.
///
/// # Errors
///
/// Fails if a fence does not rise, or two grants overlap.
///
/// # Panics
///
/// Panics if a script replies with an error.
pub fn run(seed: u64, options: Options) -> Result<Report, String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let servers = (0..options.servers).map(|_| Server {
        redis: FakeRedis::new(options.patches),
        offset: rng.i64(-SKEW..=SKEW),
        down_until: 0,
    });
    let servers = servers.collect();
    let client = |number: usize| Client {
        ids: AcquisitionIds::new("client", number as u64),
        state: State::Idle(None),
        question: 0,
        holds: None,
    };
    let mut world = World {
        options,
        rng,
        names: Keyspace::new("lock").expect("a prefix"),
        key: LockKey::from(("k",)),
        now: START,
        servers,
        clients: (0..CLIENTS).map(client).collect(),
        messages: Vec::new(),
        last_fence: 0,
        last_holder: 0,
        lossy_until: 0,
        has_restarted: false,
        report: Report::default(),
    };
    for step in 0..STEPS {
        world.step().map_err(|rule| format!("step {step}: {rule}"))?;
    }
    Ok(world.report)
}

impl World {
    fn step(&mut self) -> Result<(), String> {
        match self.rng.u32(0..100) {
            0..80 if !self.messages.is_empty() => {
                let at = self.rng.usize(0..self.messages.len());
                let message = self.messages.swap_remove(at);
                return self.deliver(message);
            }
            80..82 if !self.messages.is_empty() => {
                let at = self.rng.usize(0..self.messages.len());
                self.messages.swap_remove(at);
            }
            82..88 => self.now += self.rng.i64(0..8_000),
            88 => self.now += self.rng.i64(0..2 * micros(LEASE)),
            89 if self.options.restarts_after.is_some() && !self.has_restarted => self.restart(),
            _ => {
                let client = self.rng.usize(0..CLIENTS);
                return self.act(client);
            }
        }
        Ok(())
    }

    /// A server restarts without its data. Its connections break.
    fn restart(&mut self) {
        self.has_restarted = true;
        let (at, down) =
            (self.rng.usize(0..self.servers.len()), micros(self.options.restarts_after.unwrap_or_default()));
        self.messages.retain(|message| match message {
            Message::Request { server, .. } | Message::Reply { server, .. } => *server != at,
        });
        let server = &mut self.servers[at];
        server.redis = FakeRedis::new(self.options.patches);
        server.down_until = self.now + down;
        self.lossy_until = self.now + micros(LEASE);
    }

    fn deliver(&mut self, message: Message) -> Result<(), String> {
        match message {
            Message::Request { server: at, to, call } => {
                let server = &mut self.servers[at];
                if self.now < server.down_until {
                    return Ok(());
                }
                server.redis.data().now_us = self.now + server.offset;
                let reply = server.redis.run(&call);
                assert!(!matches!(reply, Value::ServerError(_)), "{}: {reply:?}", call.name());
                if let Some((client, question)) = to {
                    self.messages.push(Message::Reply { server: at, client, question, reply });
                }
                Ok(())
            }
            Message::Reply { server, client, question, reply } => {
                if self.clients[client].question != question {
                    return Ok(());
                }
                match &mut self.clients[client].state {
                    State::Idle(_) => return Ok(()),
                    State::Voting { votes, .. } => votes.set(server, one(parse_vote(&reply, 1))),
                    State::Raising { raised, .. } => raised.set(server, one(parse_raise(&reply, 1))),
                }
                self.decide(client)
            }
        }
    }

    /// A client does something on its own: it acquires, yields, releases, or waits no longer.
    fn act(&mut self, at: usize) -> Result<(), String> {
        let without_raise = self.options.mutation == Some(Mutation::NoRaise);
        let client = &mut self.clients[at];
        match &mut client.state {
            State::Idle(failed) => match client.holds.clone() {
                Some((id, fence, until)) if until > self.now && !without_raise && self.rng.u8(0..3) > 0 => {
                    self.report.yields += 1;
                    self.raise(at, id, self.now, fence + 1);
                }
                Some((id, ..)) => {
                    client.holds = None;
                    self.release(&id);
                }
                None => {
                    let id = failed.take().unwrap_or_else(|| client.ids.next());
                    self.vote(at, id);
                }
            },
            // Mostly it waits for more replies.
            State::Voting { .. } | State::Raising { .. } if self.rng.u8(0..8) > 0 => {}
            State::Voting { votes, .. } => {
                votes.close();
                return self.decide(at);
            }
            State::Raising { raised, .. } => {
                raised.close();
                return self.decide(at);
            }
        }
        Ok(())
    }

    fn vote(&mut self, at: usize, id: AcquisitionId) {
        let (names, key) = (self.names.clone(), self.key.clone());
        // Without a raise, the vote must give the lease.
        let lease = if self.options.mutation == Some(Mutation::NoRaise) { LEASE } else { VALID_FOR };
        self.ask(at, |expires_at| names.vote([(&key, &id)].into_iter(), lease, expires_at).expect("a name"));
        let votes = Replies::new(self.servers.len());
        self.clients[at].state = State::Voting { id, called: self.now, votes };
    }

    fn raise(&mut self, at: usize, id: AcquisitionId, called: i64, fence: u64) {
        let request = RaiseRequest { key: self.key.clone(), id: id.clone(), fence, lease: LEASE };
        let names = self.names.clone();
        let validity = called + micros(VALID_FOR) - DRIFT - self.now;
        self.ask_until(at, validity, |expires_at| {
            names.raise(std::slice::from_ref(&request), expires_at).expect("a name")
        });
        let raised = Replies::new(self.servers.len());
        self.clients[at].state = State::Raising { id, called, fence, raised };
    }

    fn ask(&mut self, at: usize, call: impl Fn(i64) -> ScriptCall) {
        self.ask_until(at, micros(VALID_FOR) - DRIFT, call);
    }

    /// Asks all servers, for as long as the call is valid by the clock of each.
    fn ask_until(&mut self, at: usize, validity: i64, call: impl Fn(i64) -> ScriptCall) {
        self.clients[at].question += 1;
        let to = Some((at, self.clients[at].question));
        for (server, Server { offset, .. }) in self.servers.iter().enumerate() {
            let call = call(self.now + offset + validity);
            self.messages.push(Message::Request { server, to, call });
        }
    }

    fn release(&mut self, id: &AcquisitionId) {
        let queue = QueueConfig::new(LEASE, LEASE, 1);
        let request = ReleaseRequest::new(self.key.clone(), id.clone(), Duration::ZERO, queue);
        self.send(&self.names.release(&[request]).expect("a name"), |_| true);
    }

    fn send(&mut self, call: &ScriptCall, is_addressed: impl Fn(usize) -> bool) {
        let addressed = (0..self.servers.len()).filter(|server| is_addressed(*server));
        self.messages.extend(addressed.map(|server| Message::Request { server, to: None, call: call.clone() }));
    }

    fn decide(&mut self, at: usize) -> Result<(), String> {
        let mutation = self.options.mutation;
        match self.clients[at].state.clone() {
            State::Idle(_) => {}
            State::Voting { id, called, votes } => match votes.decide() {
                None => {}
                Some(Ballot::Won { fence }) if mutation == Some(Mutation::NoRaise) => {
                    self.clients[at].state = State::Idle(None);
                    return self.granted(at, id, called, fence + 1);
                }
                Some(Ballot::Won { fence }) => {
                    let smallest = || {
                        (0..self.servers.len()).filter_map(|server| match votes.of(server) {
                            Some(Vote::Granted { fence }) => Some(*fence),
                            _ => None,
                        })
                    };
                    let fence = if mutation == Some(Mutation::SmallestFence) { smallest().min() } else { Some(fence) };
                    self.raise(at, id, called, fence.expect("granted"));
                }
                Some(Ballot::Lost { .. } | Ballot::Undecided) => {
                    self.report.lost_votes += 1;
                    if mutation == Some(Mutation::NoRaise) {
                        self.clients[at].state = State::Idle(None);
                        self.release(&id);
                        return Ok(());
                    }
                    let call = self.names.withdraw([(&self.key, &id)].into_iter()).expect("a name");
                    self.send(&call, |server| !matches!(votes.of(server), Some(Vote::Busy { .. })));
                    self.failed(at, id);
                }
            },
            State::Raising { id, called, fence, raised } => {
                let decided = raised.decide(fence);
                let held = (0..self.servers.len())
                    .filter(|server| matches!(raised.of(*server), Some(Raised::Held { .. })))
                    .count();
                let is_enough = mutation == Some(Mutation::SmallMajority) && held + 1 >= raised.majority();
                match decided {
                    _ if is_enough => {
                        self.clients[at].state = State::Idle(None);
                        return self.granted(at, id, called, fence);
                    }
                    None => {}
                    Some(Raise::Held { fence }) => {
                        self.clients[at].state = State::Idle(None);
                        return self.granted(at, id, called, fence);
                    }
                    Some(Raise::NotHolder | Raise::Undecided) => self.failed(at, id),
                }
            }
        }
        Ok(())
    }

    /// A call failed: it is repeated, or the acquisition is released.
    fn failed(&mut self, at: usize, id: AcquisitionId) {
        if self.clients[at].holds.take().is_none() && self.rng.bool() {
            self.clients[at].state = State::Idle(Some(id));
        } else {
            self.release(&id);
            self.clients[at].state = State::Idle(None);
        }
    }

    /// A grant counts, if its deadline has not passed.
    fn granted(&mut self, at: usize, id: AcquisitionId, called: i64, fence: u64) -> Result<(), String> {
        let mutation = self.options.mutation;
        let from = if mutation == Some(Mutation::DeadlineFromReply) { self.now } else { called };
        let until = match mutation {
            Some(Mutation::NoDeadline) => self.now + micros(LEASE),
            _ => from + micros(LEASE) - DRIFT,
        };
        self.clients[at].holds = None;
        if until <= self.now {
            self.release(&id);
            return Ok(());
        }
        let others = self.clients.iter().enumerate().filter(|(other, _)| *other != at);
        let overlap = others.filter_map(|(_, other)| other.holds.as_ref()).find(|(.., until)| *until > self.now);
        if let Some((other, ..)) = overlap.filter(|_| self.now >= self.lossy_until || !self.may_overlap()) {
            return Err(format!("{id} holds the key beside {other}"));
        }
        if fence <= self.last_fence {
            return Err(format!("{id} has the fence {fence} after {}", self.last_fence));
        }
        self.report.grants += 1;
        self.report.handoffs += u64::from(self.last_holder != at);
        (self.last_fence, self.last_holder) = (fence, at);
        self.clients[at].holds = Some((id, fence, until));
        Ok(())
    }

    /// A server that comes back before the leases that it has confirmed have ended.
    fn may_overlap(&self) -> bool {
        self.options.restarts_after.is_some_and(|down| down < LEASE)
    }
}

/// The replies of a call that expires.
type TimedReplies<T, E> = Timed<Vec<Result<T, E>>>;

/// The reply about the only key. An expired call counts as an error.
fn one<T, E, F: std::fmt::Debug>(reply: Result<(i64, TimedReplies<T, E>), F>) -> Option<T> {
    match reply.expect("a reply of the script").1 {
        Timed::Done(replies) => replies.into_iter().next()?.ok(),
        Timed::Expired => None,
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).expect("short")
}
