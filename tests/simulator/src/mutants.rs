//! What could be wrong: scripts that were changed, and processes that keep to a rule less.

use crate::fake::Patch;

/// One thing that is wrong.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// By which it is chosen.
    pub name: &'static str,
    /// What is wrong.
    pub what: &'static str,
    /// How it comes about.
    pub how: How,
    /// What goes wrong as well, so that it shows.
    pub option: Option<&'static str>,
}

/// Where it is wrong.
#[derive(Clone, Copy, Debug)]
pub enum How {
    /// In the scripts.
    Script(&'static [Patch]),
    /// Between the decisions and the wire.
    Shell(Wrong),
}

/// What a process does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// A grant is counted from its receipt.
    RecvTime,
    /// A renewal is counted from its receipt.
    RenewRecv,
    /// A late answer goes to whatever attempt there is.
    NoCorr,
    /// One owner id for a process.
    SameId,
    /// Acquires are never void.
    NoUntil,
    /// The server's clock is thought to be as far as it was when its answer was *asked for*.
    UntilUpper,
    /// What was given back once is never given back again.
    LeaveOnce,
    /// What got no answer is not given back.
    NoGivebackUnknown,
    /// A give-back that got no answer is not repeated.
    OneTry,
    /// A question that is under way is not waited for.
    NoClose,
    /// Of an id that has yielded nothing is left, whatever became of its calls.
    YieldClean,
    /// A deadline is not looked at before a poll.
    NoPollCheck,
    /// Others never have their turn.
    NoYield,
    /// It goes on after its turn was given away.
    YieldKeeps,
    /// It waits for a message alone.
    NoCheckin,
    /// It does not ask again after a gap.
    NoGapCheckin,
    /// Nothing is renewed.
    NoRenew,
    /// A bad end gives the key on at once.
    AbandonReleases,
    /// A bad end whose give-back got no answer gives the key on at once.
    RepeatFrees,
    /// It does not hear that its key was taken away.
    ForceDeaf,
    /// It does not hear what is offered to an id that is over.
    PushIgnored,
    /// Whether to line up is decided anew for every question.
    QFresh,
}

const fn patch(script: &'static str, old: &'static str, new: &'static str) -> Patch {
    Patch { script: Some(script), old, new }
}

const fn everywhere(old: &'static str, new: &'static str) -> Patch {
    Patch { script: None, old, new }
}

const fn script(name: &'static str, what: &'static str, patches: &'static [Patch]) -> Mutant {
    Mutant { name, what, how: How::Script(patches), option: None }
}

const fn shell(name: &'static str, what: &'static str, wrong: Wrong) -> Mutant {
    Mutant { name, what, how: How::Shell(wrong), option: None }
}

impl Mutant {
    const fn with(self, option: &'static str) -> Self {
        Self { option: Some(option), ..self }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        MUTANTS.iter().find(|mutant| mutant.name == name)
    }

    /// What is wrong with the scripts.
    pub fn patches(&self) -> &'static [Patch] {
        match self.how {
            How::Script(patches) => patches,
            How::Shell(_) => &[],
        }
    }

    /// What is wrong with the processes.
    pub fn wrong(&self) -> Option<Wrong> {
        match self.how {
            How::Script(_) => None,
            How::Shell(wrong) => Some(wrong),
        }
    }
}

/// All that a test shows to be noticed.
pub const MUTANTS: &[Mutant] = &[
    shell("recv_time", "the deadline of a grant counts from the receipt", Wrong::RecvTime),
    shell("renew_recv", "the deadline of a renewal counts from the receipt", Wrong::RenewRecv),
    shell("no_corr", "a late answer goes to whatever attempt there is", Wrong::NoCorr),
    shell("same_id", "one owner id for a process", Wrong::SameId),
    shell("no_until", "an acquire is never void", Wrong::NoUntil),
    shell("until_upper", "the server's clock is taken from the asking instead of the answer", Wrong::UntilUpper),
    shell("leave_once", "one give-back, whatever may be under way", Wrong::LeaveOnce),
    shell("no_giveback_unknown", "what got no answer is not given back", Wrong::NoGivebackUnknown),
    shell("one_try", "a give-back is sent once", Wrong::OneTry),
    shell("no_close", "an answer that is under way is not waited for", Wrong::NoClose),
    shell("yield_clean", "an id that has yielded is over, whatever became of its calls", Wrong::YieldClean),
    shell("no_poll_check", "no look at the deadline before a poll", Wrong::NoPollCheck),
    shell("no_yield", "others never have their turn", Wrong::NoYield),
    shell("yield_keeps", "goes on after it has given its turn away", Wrong::YieldKeeps),
    shell("no_checkin", "waits for messages alone", Wrong::NoCheckin),
    shell("no_renew", "nothing is renewed", Wrong::NoRenew),
    shell("abandon_releases", "a bad end gives the key on at once", Wrong::AbandonReleases),
    shell("repeat_frees", "a bad end whose give-back is repeated gives the key on at once", Wrong::RepeatFrees),
    shell("force_deaf", "does not hear that its key was taken away", Wrong::ForceDeaf).with("force"),
    shell("push_ignored", "what is offered to an id that is over is not given back", Wrong::PushIgnored),
    shell("no_gap_checkin", "does not ask again after a gap of its inbox", Wrong::NoGapCheckin),
    shell("q_fresh", "whether to line up is decided anew for every question", Wrong::QFresh),
    script(
        "barge",
        "acquire looks at the lock alone",
        &[
            patch("acquire", "redis.call('EXISTS', KEYS[2], KEYS[3]) == 0", "redis.call('EXISTS', KEYS[2]) == 0"),
            everywhere("local next = offer_next(fence_key, lock, queue, id, offer_ms)", "local next = false"),
        ],
    ),
    script("fence_clock", "the fence is the clock", &[everywhere("if last >= fence then", "if false then")])
        .with("back"),
    script(
        "release_any",
        "a release does not look whose the key is",
        &[patch("release", "ignore_wrong_type('HDEL', KEYS[2], ARGV[1])", "redis.pcall('DEL', KEYS[2])")],
    ),
    script(
        "renew_blind",
        "a renewal looks at the key and not at whose it is",
        &[patch("renew", "redis.pcall('HEXISTS', KEYS[i], ARGV[2 * i - 1])", "redis.pcall('EXISTS', KEYS[i])")],
    ),
    script(
        "leave_no_lock",
        "a release takes only the place in the line",
        &[patch("release", "ignore_wrong_type('HDEL', KEYS[2], ARGV[1]) ~= 1", "true")],
    ),
    script(
        "leave_no_pass",
        "a release does not give on",
        &[patch(
            "release",
            "if redis.call('EXISTS', KEYS[3]) == 0 then return {'freed'} end",
            "do return {'freed'} end",
        )],
    ),
    script(
        "abandon_no_lrem",
        "a release that finds no lock leaves the place in the line",
        &[patch("release", "ignore_wrong_type('LREM', KEYS[3], 1, ARGV[1])", "")],
    ),
    script(
        "leave_raises",
        "a release at a key of another type is an error",
        &[patch("release", "not string.find(result.err, 'WRONGTYPE', 1, true)", "true")],
    ),
    script(
        "end_keeps_field",
        "a key that is kept taken keeps the field of its last owner",
        &[patch(
            "release",
            "redis.call('HSET', KEYS[2], ARGV[1] .. ':end', 1)",
            "redis.call('HSET', KEYS[2], ARGV[1], 1)",
        )],
    ),
    script(
        "no_skip_dead",
        "who does not listen is offered the key all the same",
        &[everywhere("head .. ' ' .. lock) > 0 then", "head .. ' ' .. lock) > -1 then")],
    ),
    script(
        "no_purge",
        "a full line keeps the entries of the dead",
        &[everywhere("if waiting >= capacity then waiting = drop_dead(queue, waiting) end", "")],
    ),
    script(
        "dup_line",
        "enters the line without a look",
        &[everywhere("local ahead = redis.call('LPOS', queue, id)", "local ahead = nil")],
    ),
    script(
        "offer_no_ttl",
        "an offer without an end",
        &[everywhere("      redis.call('PEXPIRE', lock, offer_ms)\n", "")],
    ),
    script(
        "line_short_ttl",
        "a place lasts for less than a check-in",
        &[everywhere("redis.call('PEXPIRE', queue, entry_ms)", "redis.call('PEXPIRE', queue, 700)")],
    ),
    script(
        "yield_keeps_own",
        "a yield leaves the field of who yields",
        &[patch("yield", "  redis.call('HDEL', KEYS[2], ARGV[4])\n", "")],
    ),
    script(
        "yield_any_fence",
        "a copy of a yield does not see that it was done",
        &[patch("yield", "stored and stored ~= ARGV[8]", "false")],
    )
    .with("copies"),
    script(
        "yield_no_extend",
        "a yield that goes on does not extend the lease",
        &[patch("yield", "redis.call('PEXPIRE', KEYS[2], ARGV[3])", "")],
    ),
    script(
        "no_retake",
        "acquire does not know its own grant",
        &[everywhere("if fence then\n    local set", "if false then\n    local set")],
    ),
    script(
        "claim_no_lease",
        "who comes for an offer keeps the short lease of it",
        &[everywhere("redis.call('PEXPIRE', lock, lease_ms, 'GT')", "redis.call('EXISTS', lock)")],
    ),
];
