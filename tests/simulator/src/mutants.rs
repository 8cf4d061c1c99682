//! Mutants: changed scripts and changed processes, each of which breaks one rule.

use crate::fake::Patch;

/// One broken rule.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// The name that selects it.
    pub name: &'static str,
    /// The behaviour of the mutant.
    pub description: &'static str,
    /// The change.
    pub how: How,
    /// The option that a simulation needs to detect it.
    pub option: Option<&'static str>,
}

/// The part that is changed.
#[derive(Clone, Copy, Debug)]
pub enum How {
    /// The scripts.
    Script(&'static [Patch]),
    /// The driver, between the state machine and the connections.
    Driver(Mutation),
}

/// A change of the driver of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// The deadline of a grant counts from its reply.
    DeadlineFromReply,
    /// The deadline of a renewal counts from its reply.
    RenewalFromReply,
    /// A late reply is handled as the reply to the current call.
    UncorrelatedReplies,
    /// All acquisitions of a process have the same id.
    SameId,
    /// An acquire in flight never expires.
    NoCallExpiry,
    /// The server clock is estimated from the time of the request, not of the reply.
    ClockFromRequest,
    /// An id is released once, even if an acquire is in doubt.
    ReleaseOnce,
    /// An acquire in doubt is not released.
    NoReleaseInDoubt,
    /// A release is sent once.
    NoReleaseRetry,
    /// An acquire in flight is not awaited after its last waiter has cancelled.
    NoWaitForReply,
    /// An id that has yielded is not released, even if a call is in doubt.
    ForgetYieldedId,
    /// The deadline is not checked before a poll.
    NoDeadlineCheck,
    /// Local handoffs continue without a yield.
    NoYield,
    /// A process continues to hold a key that it has yielded.
    HoldAfterYield,
    /// Waiters rely on messages and never poll.
    NoPolls,
    /// Waiters do not poll after a gap in the messages.
    NoPollAfterGap,
    /// No grant is renewed.
    NoRenewal,
    /// An abnormal end releases the key without a lock-delay.
    NoLockDelay,
    /// The retry of a release has no lock-delay.
    NoLockDelayOnRetry,
    /// Revocation messages are ignored.
    IgnoreRevocation,
    /// An offer to an id that has ended is not released.
    IgnoreStaleOffer,
    /// Each acquire decides anew whether to enqueue.
    EnqueuePerCall,
    /// All clients get records.
    RecordForPlain,
    /// A duplicate continues under a grant that ignored the record.
    JoinPlainGrant,
    /// A duplicate of an owner joins the section of the owner.
    JoinOwner,
    /// The duplicates get a record before the store has confirmed it.
    RecordBeforeReply,
    /// The duplicates get a record that the store has refused.
    RecordDespiteLoss,
    /// The retry of a release has no record.
    NoRecordOnRetry,
    /// The requests of a shared call get the replies of others.
    RepliesOutOfOrder,
    /// After a shared call without a reply, only its first request is in doubt.
    LostReplyOfFirstOnly,
    /// A key with waiters is granted without a call.
    FreeDespiteQueue,
    /// A blocked key is granted without a call.
    FreeDespiteBlock,
    /// A key is freed without a call although an acquire is in doubt.
    FreeDespiteDoubt,
    /// The keys of a caller are not sorted.
    WaitsForSmaller,
    /// A caller keeps the keys behind a busy one.
    KeepsGreater,
    /// A caller that is rejected, or has lost a key, forgets one of its keys.
    ForgetsOneAtALoss,
    /// A client that needs its key alone gets a permit.
    ShareForAlone,
    /// A dropped guard leaves its key to its ticket.
    DroppedIsKept,
    /// The retry of a release leaves the key to no ticket.
    NoHeirOnRetry,
    /// After a call in place of a ticket that had no reply, the key does not go back.
    NoReturnToTicket,
    /// The orderly end of a section that was replaced has a lock-delay.
    DelayAfterReplaced,
}

const fn patch(script: &'static str, old: &'static str, new: &'static str) -> Patch {
    Patch { script: Some(script), old, new }
}

const fn everywhere(old: &'static str, new: &'static str) -> Patch {
    Patch { script: None, old, new }
}

const fn script(name: &'static str, description: &'static str, patches: &'static [Patch]) -> Mutant {
    Mutant { name, description, how: How::Script(patches), option: None }
}

const fn driver(name: &'static str, description: &'static str, mutation: Mutation) -> Mutant {
    Mutant { name, description, how: How::Driver(mutation), option: None }
}

impl Mutant {
    /// The parts of scripts that the mutant replaces.
    pub fn patched(&self) -> impl Iterator<Item = &'static str> {
        let patches = if let How::Script(patches) = self.how { patches } else { &[] };
        patches.iter().map(|patch| patch.old)
    }

    const fn with(self, option: &'static str) -> Self {
        Self { option: Some(option), ..self }
    }

    /// The mutant with this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        MUTANTS.iter().find(|mutant| mutant.name == name)
    }

    /// The changes of the scripts.
    pub fn patches(&self) -> &'static [Patch] {
        match self.how {
            How::Script(patches) => patches,
            How::Driver(_) => &[],
        }
    }

    /// The change of the driver.
    pub fn mutation(&self) -> Option<Mutation> {
        match self.how {
            How::Script(_) => None,
            How::Driver(mutation) => Some(mutation),
        }
    }
}

/// All mutants.
pub const MUTANTS: &[Mutant] = &[
    driver("deadline_from_reply", "the deadline of a grant counts from its reply", Mutation::DeadlineFromReply),
    driver("renewal_from_reply", "the deadline of a renewal counts from its reply", Mutation::RenewalFromReply),
    driver(
        "uncorrelated_replies",
        "a late reply is handled as the reply to the current call",
        Mutation::UncorrelatedReplies,
    ),
    driver("same_id", "all acquisitions of a process have the same id", Mutation::SameId),
    driver("no_call_expiry", "an acquire in flight never expires", Mutation::NoCallExpiry),
    driver(
        "clock_from_request",
        "the server clock is estimated from the time of the request, not of the reply",
        Mutation::ClockFromRequest,
    ),
    driver("release_once", "an id is released once, even if an acquire is in doubt", Mutation::ReleaseOnce),
    driver("no_release_in_doubt", "an acquire in doubt is not released", Mutation::NoReleaseInDoubt),
    driver("no_release_retry", "a release is sent once", Mutation::NoReleaseRetry),
    driver(
        "no_wait_for_reply",
        "an acquire in flight is not awaited after its last waiter has cancelled",
        Mutation::NoWaitForReply,
    ),
    driver(
        "forget_yielded_id",
        "an id that has yielded is not released, even if a call is in doubt",
        Mutation::ForgetYieldedId,
    ),
    driver("no_deadline_check", "the deadline is not checked before a poll", Mutation::NoDeadlineCheck),
    driver("no_yield", "local handoffs continue without a yield", Mutation::NoYield),
    driver("hold_after_yield", "a process continues to hold a key that it has yielded", Mutation::HoldAfterYield),
    driver("no_polls", "waiters rely on messages and never poll", Mutation::NoPolls),
    driver("no_renewal", "no grant is renewed", Mutation::NoRenewal),
    driver("no_lock_delay", "an abnormal end releases the key without a lock-delay", Mutation::NoLockDelay),
    driver("no_lock_delay_on_retry", "the retry of a release has no lock-delay", Mutation::NoLockDelayOnRetry),
    driver("ignore_revocation", "revocation messages are ignored", Mutation::IgnoreRevocation).with("force"),
    driver("ignore_stale_offer", "an offer to an id that has ended is not released", Mutation::IgnoreStaleOffer),
    driver("no_poll_after_gap", "waiters do not poll after a gap in the messages", Mutation::NoPollAfterGap),
    driver("enqueue_per_call", "each acquire decides anew whether to enqueue", Mutation::EnqueuePerCall),
    driver("record_for_plain", "a client that asked for no record gets one", Mutation::RecordForPlain).with("records"),
    driver("join_plain_grant", "a duplicate continues under a grant that ignored the record", Mutation::JoinPlainGrant)
        .with("records"),
    driver("join_owner", "a duplicate of an owner joins the section of the owner", Mutation::JoinOwner).with("records"),
    driver(
        "record_before_reply",
        "the duplicates get a record before the store has confirmed it",
        Mutation::RecordBeforeReply,
    )
    .with("records"),
    driver(
        "record_despite_loss",
        "the duplicates get a record that the store has refused",
        Mutation::RecordDespiteLoss,
    )
    .with("records"),
    driver("no_record_on_retry", "the retry of a release has no record", Mutation::NoRecordOnRetry).with("records"),
    driver("replies_out_of_order", "requests of a shared call get the replies of others", Mutation::RepliesOutOfOrder)
        .with("batches"),
    driver(
        "lost_reply_of_first_only",
        "after a shared call without a reply, only its first request is in doubt",
        Mutation::LostReplyOfFirstOnly,
    )
    .with("batches"),
    driver("free_despite_queue", "a key with waiters is granted without a call", Mutation::FreeDespiteQueue)
        .with("free"),
    driver("free_despite_block", "a blocked key is granted without a call", Mutation::FreeDespiteBlock).with("free"),
    driver(
        "free_despite_doubt",
        "a key is freed without a call although an acquire is in doubt",
        Mutation::FreeDespiteDoubt,
    )
    .with("free"),
    driver("waits_for_smaller", "a caller of several keys acquires them in any order", Mutation::WaitsForSmaller)
        .with("several"),
    driver("keeps_greater", "a caller of several keys keeps those behind a busy one", Mutation::KeepsGreater)
        .with("several"),
    driver(
        "forgets_one_at_a_loss",
        "a caller of several keys releases all but one of them",
        Mutation::ForgetsOneAtALoss,
    )
    .with("several"),
    script(
        "fast_path_of_first_key",
        "a shared acquire grants all keys if the first one is free",
        &[patch(
            "acquire",
            "redis.call('EXISTS', unpack(KEYS, 1, #KEYS - 1)) == 0",
            "redis.call('EXISTS', KEYS[1], KEYS[n + 1]) == 0",
        )],
    )
    .with("batches"),
    script(
        "queue_of_first_key",
        "a shared acquire uses the queue of its first key for all",
        &[patch("acquire", "KEYS[i], KEYS[n + i], id", "KEYS[i], KEYS[n + 1], id")],
    )
    .with("batches"),
    script(
        "release_of_first_key",
        "a shared release frees only its first key",
        &[patch(
            "release",
            "held[i] or pcall_redis('HDEL', KEYS[i], id)",
            "held[i] or i > 1 and 1 or pcall_redis('HDEL', KEYS[i], id)",
        )],
    )
    .with("batches"),
    script(
        "lease_of_first_key",
        "a shared acquire gives only its first key a TTL",
        &[patch(
            "acquire",
            "call('PEXPIRE', KEYS[i], ARGV[4 * i + 3])",
            "if i == 1 then call('PEXPIRE', KEYS[i], ARGV[4 * i + 3]) end",
        )],
    )
    .with("batches"),
    script(
        "type_of_one_key_fails_all",
        "a key of another type fails all requests of its call",
        &[patch(
            "acquire",
            "if not string.find(text, 'WRONGTYPE', 1, true) then error({err = text}) end",
            "error({err = text})",
        )],
    )
    .with("batches"),
    script(
        "block_of_first_key",
        "a shared release gives only its first key a lock-delay",
        &[patch("release", "if has_block and pcall_redis", "if has_block and i == 1 and pcall_redis")],
    )
    .with("batches"),
    script(
        "free_key_ignores_record",
        "an acquire of a free key ignores the record",
        &[patch(
            "acquire",
            "redis.call('EXISTS', unpack(KEYS, 1, #KEYS - 1))",
            "redis.call('EXISTS', unpack(KEYS, 1, 2 * n))",
        )],
    )
    .with("records"),
    script(
        "busy_key_ignores_record",
        "an acquire of a busy key ignores the record",
        &[patch("acquire", "recorded(KEYS[1], queue, record, ARGV[6], ARGV[3])\n    or acquire(", "acquire(")],
    )
    .with("records"),
    script(
        "yield_ignores_record",
        "the next id of a yield ignores the record",
        &[patch("yield", "recorded(lock, queue, record, ARGV[6], ARGV[3])\n    or acquire(", "acquire(")],
    )
    .with("records"),
    script(
        "record_of_any",
        "a release leaves its record without holding the key",
        &[patch(
            "release",
            "if record and ignore_wrong_type(redis.pcall('HEXISTS', KEYS[1], ARGV[3])) == 1 then",
            "if record then",
        )],
    )
    .with("records"),
    script(
        "record_of_former_holder",
        "a late copy of a release leaves its record while another client holds the key",
        &[patch(
            "release",
            "ignore_wrong_type(redis.pcall('HEXISTS', KEYS[1], ARGV[3])) == 1 then",
            "redis.call('EXISTS', KEYS[1]) == 1 then",
        )],
    )
    .with("records"),
    script(
        "record_without_ttl",
        "a record has no TTL",
        &[patch("release", "  redis.call('PEXPIRE', record, ARGV[6])\n", "")],
    )
    .with("records"),
    script(
        "record_keeps_body",
        "a record without a body keeps the body of an earlier one",
        &[patch("release", "else redis.call('HDEL', record, 'body') end", "end")],
    )
    .with("records"),
    script(
        "any_record_before",
        "the repetition of a release takes any record for its own",
        &[patch("release", "left_by == id", "redis.call('HEXISTS', record, 'id') == 1")],
    )
    .with("records"),
    script(
        "no_record_before",
        "the repetition of a release does not find its record",
        &[patch("release", "left_by == id", "false")],
    )
    .with("records"),
    script(
        "recorded_keeps_entry",
        "an acquire that gets the record keeps its queue entry",
        &[everywhere(
            "  redis.call('LREM', queue, 1, id)\n  redis.pcall('HDEL', lock, id)\n",
            "  redis.pcall('HDEL', lock, id)\n",
        )],
    )
    .with("records"),
    script(
        "recorded_keeps_offer",
        "an acquire that gets the record keeps its offer",
        &[everywhere(
            "  redis.pcall('HDEL', lock, id)\n  local count = count_places(",
            "  local count = count_places(",
        )],
    )
    .with("records"),
    script(
        "recorded_without_offer",
        "an acquire that gets the record does not pass its offer on",
        &[everywhere("    local offered = offer(lock, queue, count, false, offer_ms)\n", "    local offered\n")],
    )
    .with("records"),
    script(
        "ignore_queue",
        "an acquire checks only the lock, not the queue",
        &[
            patch(
                "acquire",
                "redis.call('EXISTS', unpack(KEYS, 1, #KEYS - 1))",
                "redis.call('EXISTS', unpack(KEYS, 1, n))",
            ),
            everywhere("local next = offer(lock, queue, 0, id, offer_ms)", "local next = false"),
        ],
    ),
    script(
        "fence_from_clock",
        "the fence is the server clock, even if a later one exists",
        &[everywhere("elseif tonumber(stored) >= tonumber(now) then", "elseif false then")],
    )
    .with("back"),
    script(
        "release_any_holder",
        "a release does not check the holder",
        &[
            patch("release", "redis.pcall('HDEL', KEYS[1], ARGV[3])", "redis.pcall('DEL', KEYS[1])"),
            patch("release", "pcall_redis('HDEL', KEYS[i], id)", "redis.pcall('DEL', KEYS[i])"),
        ],
    ),
    script(
        "renew_any_holder",
        "a renewal checks that the lock exists, not its holder",
        &[patch("renew", "redis.pcall('HEXISTS', KEYS[i], ARGV[2 * i - 1])", "redis.pcall('EXISTS', KEYS[i])")],
    ),
    script(
        "release_keeps_lock",
        "a release removes only the queue entry",
        &[
            patch("release", "redis.pcall('HDEL', KEYS[1], ARGV[3])", "0"),
            patch("release", "pcall_redis('HDEL', KEYS[i], id)", "0"),
        ],
    ),
    script(
        "release_without_offer",
        "a release makes no offer to the next waiter",
        &[
            patch("release", "if not first then return 'freed' end", "do return 'freed' end"),
            patch(
                "release",
                "if n > 1 and all_freed and redis.call('EXISTS', unpack(KEYS, n + 1, 2 * n)) == 0 then",
                "if all_freed then",
            ),
        ],
    ),
    script(
        "release_keeps_entry",
        "a release that finds no lock keeps the queue entry",
        &[patch("release", "ignore_wrong_type(redis.pcall('LREM', queue, 1, id))", "")],
    ),
    script(
        "release_fails_on_type",
        "a release fails if the key holds another type",
        &[patch("release", "not string.find(result.err, 'WRONGTYPE', 1, true)", "true")],
    ),
    script(
        "lock_delay_keeps_holder",
        "a key in its lock-delay keeps the field of its last holder",
        &[patch("release", "id .. ':end', 1)", "id, 1)")],
    ),
    script(
        "offer_to_dead",
        "a waiter without a subscription gets an offer",
        &[everywhere("head .. ' ' .. lock) > 0 then", "head .. ' ' .. lock) > -1 then")],
    ),
    script(
        "full_queue_keeps_dead",
        "a full queue keeps the entries of dead waiters",
        &[everywhere("if waiting >= capacity then waiting = drop_dead(queue, waiting) end", "")],
    ),
    script(
        "duplicate_entries",
        "a queued id enqueues again",
        &[everywhere("redis.call('LPOS', queue, id, 'MAXLEN', max_queue)", "nil")],
    ),
    script(
        "offer_without_ttl",
        "an offer has no TTL",
        &[everywhere("      redis.call('PEXPIRE', lock, offer_ms)\n", "")],
    ),
    script(
        "short_entry_ttl",
        "a queue entry expires before the next poll",
        &[everywhere("redis.call('PEXPIRE', queue, entry_ms)", "redis.call('PEXPIRE', queue, 700)")],
    ),
    script(
        "yield_keeps_holder",
        "a yield keeps the field of the holder",
        &[patch("yield", "  redis.pcall('HDEL', lock, ARGV[8])\n", "")],
    ),
    script(
        "yield_ignores_fence",
        "a copy of a yield does not check the fence",
        &[patch("yield", "stored and stored ~= ARGV[9]", "false")],
    )
    .with("copies"),
    script(
        "yield_without_extension",
        "a yield that continues does not extend the lease",
        &[patch("yield", "redis.call('PEXPIRE', lock, ARGV[7])", "")],
    ),
    script(
        "no_repeated_acquire",
        "a repeated acquire does not recognize its own grant",
        &[everywhere("if fence then\n    local is_longer", "if false then\n    local is_longer")],
    ),
    script(
        "claim_keeps_offer_ttl",
        "the acquire that claims an offer keeps the short TTL of the offer",
        &[everywhere("redis.call('PEXPIRE', lock, lease_ms, 'GT')", "redis.call('EXISTS', lock)")],
    ),
    driver("share_for_alone", "a client that needs its key alone gets a permit", Mutation::ShareForAlone)
        .with("shares"),
    script(
        "share_drops_waiter_that_does_not_fit",
        "a waiter that does not fit is dropped from the queue",
        &[everywhere("redis.call('PUBSUB', 'NUMSUB', inbox(next))[2] > 0", "false")],
    )
    .with("shares"),
    script(
        "share_passes_queue",
        "a share does not look at the queue",
        &[patch(
            "acquire_share",
            "next, count = offer(lock, queue, count, id, ARGV[3])",
            "next = count < limit_of(id) and id",
        )],
    )
    .with("shares"),
    script(
        "share_shortens_others",
        "a share ends the others with its own lease",
        &[everywhere("redis.call('PEXPIRE', lock, ms, 'GT')", "redis.call('PEXPIRE', lock, ms)")],
    )
    .with("shares"),
    script(
        "ended_shares_count",
        "shares that have ended keep their places",
        &[everywhere("'ZREMRANGEBYSCORE', lock, '-inf', now_ms", "'ZREMRANGEBYSCORE', lock, '-inf', 0")],
    )
    .with("shares"),
    script(
        "share_without_block",
        "the place of a share is free at once",
        &[patch("release_share", "if ARGV[4] ~= '0' then", "if false then")],
    )
    .with("shares"),
    script(
        "renewal_of_the_shared_key_alone",
        "a renewal extends the key, and not the share",
        &[patch("renew", "redis.pcall('ZADD', lock, 'XX', 'GT', now_ms + lease_ms, id)", "1")],
    )
    .with("shares"),
    script(
        "renewal_of_the_share_alone",
        "a renewal extends the share, and not its key",
        &[patch("renew", "set = redis.pcall('PEXPIRE', lock, lease_ms, 'GT')", "set = 1")],
    )
    .with("shares"),
    script(
        "share_beside_whole",
        "a share replaces a holder that is alone",
        &[patch(
            "acquire_share",
            "count_places(lock, now_ms), nil\n",
            "count_places(lock, now_ms), nil\nif not count then redis.call('DEL', lock) count = 0 end\n",
        )],
    )
    .with("shares"),
    script(
        "limit_not_read",
        "a share is granted beside any number of others",
        &[everywhere("count < limit_of(next)", "limit_of(next) > 1")],
    )
    .with("shares"),
    script(
        "offered_share_not_counted",
        "an offer to a share takes no place",
        &[everywhere("offered, count = head, count + 1", "offered = head")],
    )
    .with("shares"),
    script(
        "inbox_without_limit",
        "the channel of a share has its limit in its name",
        &[everywhere("'^(.*):[%d/]+$') or id)", "'^(.*):%d+$') or id)")],
    )
    .with("shares"),
    script(
        "ticket_stays_after_redeem",
        "a ticket can be redeemed twice",
        &[patch("redeem", "redis.call('HDEL', lock, ticket)", "redis.call('HEXISTS', lock, ticket)")],
    )
    .with("tickets"),
    script(
        "ticket_without_lease",
        "a ticket holds its key for the rest of the lease of the section",
        &[patch("keep", "  redis.call('PEXPIRE', lock, ARGV[4])\n", "")],
    )
    .with("tickets"),
    script(
        "redeem_under_the_same_fence",
        "a section has the fence of its ticket",
        &[patch("redeem", "local fence = next_fence()", "local fence = redis.call('HGET', lock, ticket)")],
    )
    .with("tickets"),
    script(
        "redeem_of_a_free_key",
        "a ticket is redeemed though its key is free",
        &[patch(
            "redeem",
            "redis.call('HEXISTS', lock, ticket) == 0",
            "redis.call('HEXISTS', lock, ticket) == 0 and redis.call('EXISTS', lock) == 1",
        )],
    )
    .with("tickets"),
    driver("dropped_is_kept", "a dropped guard leaves its key to its ticket", Mutation::DroppedIsKept).with("tickets"),
    driver("no_heir_on_retry", "the retry of a release leaves the key to no ticket", Mutation::NoHeirOnRetry)
        .with("tickets"),
    driver(
        "no_return_to_ticket",
        "a call in place of a ticket that had no reply is not released",
        Mutation::NoReturnToTicket,
    )
    .with("tickets"),
    script(
        "newer_before_the_end",
        "a newer acquisition takes the key before its holder has ended",
        &[everywhere(
            "local left = redis.call('PTTL', lock)\n  if left == -2",
            "local left = is_replaceable(id) and -2 or redis.call('PTTL', lock)\n  if left == -2 then redis.call('DEL', lock) end\n  if left == -2",
        )],
    )
    .with("supersede"),
    script(
        "replaced_waiter_is_granted",
        "a waiter that was replaced is granted",
        &[everywhere("if has_newer(queue, id) and (fence", "if false and (fence")],
    )
    .with("supersede"),
    script(
        "fresh_id_is_superseded",
        "an acquisition that has just come is replaced by an older one",
        &[everywhere(
            "(fence or redis.call('LPOS', queue, id, 'MAXLEN', max_queue)) then",
            "true then",
        )],
    )
    .with("supersede"),
    driver(
        "delay_after_replaced",
        "the orderly end of a section that was replaced has a lock-delay",
        Mutation::DelayAfterReplaced,
    )
    .with("supersede"),
];
