//! The server, and the checks after every script.

use tower_lock::{
    __internals::redis_wire::{Timed, parse_acquire, parse_release, parse_yield},
    store::{AcquireReply, ReleaseReply, YieldReply},
};

use super::{batches::ScriptRequest, newest::has_newer, shares::limit_of, *};

impl Simulation {
    pub(super) fn server_us(&self) -> i64 {
        self.server_ahead + i64::try_from(self.now / 1_000).expect("some minutes")
    }

    pub(super) fn key_data(&self, key: usize) -> KeyData {
        let mut data = self.fake.data();
        data.now_us = self.server_us();
        let queue = format!("tower-lock:lock:q:{{{}}}", self.locks[key]);
        let now_ms = data.now_us / 1_000;
        let shares = data.sorted(&self.locks[key]).into_iter().filter(|(ends, _)| *ends > now_ms);
        let shares = shares.map(|(_, id)| (id, String::new()));
        let holders = data.hash(&self.locks[key]).into_iter().chain(shares).collect();
        KeyData { holders, queue: data.list(&queue) }
    }

    pub(super) fn execute(&mut self, process: Option<usize>, script: &ScriptCall) -> Value {
        self.scripts += 1;
        let before: Vec<_> = (0..self.keys.len()).map(|key| self.key_data(key)).collect();
        let reply = self.fake.run(script);
        self.log(|w| {
            let from = process.map_or("foreign", |process| w.processes[process].label.as_str());
            format!("    {from} {} {:?} -> {}", script.name(), super::args(script), show(&reply))
        });
        let requests = match script.name() {
            "acquire" | "release" | "acquire_share" | "release_share" => self.requests(script),
            _ => Vec::new(),
        };
        if requests.len() > 1 {
            self.shared += u64::try_from(requests.len()).expect("few");
        }
        for (key, before) in before.iter().enumerate() {
            let caller = match script.name() {
                "yield" | "redeem" => super::args(script).into_iter().nth(5),
                _ => requests.iter().find(|request| request.key == key).map(|request| request.id.clone()),
            };
            self.check_key_data(key, before, script.name(), caller.as_ref());
            self.check_replaced(key, script.name(), caller.as_ref());
        }
        if self.options.records {
            self.check_records(script, &before);
        }
        self.check_tickets(script, &before, &reply);
        self.check_reply(script, &reply, &before);
        self.check_replies(script.name(), &requests, &reply);
        self.deliver();
        reply
    }

    pub(super) fn check_reply(&mut self, script: &ScriptCall, reply: &Value, before: &[KeyData]) {
        match (script.name(), reply) {
            // Only one request: among others it fails alone.
            ("acquire" | "acquire_share", Value::SimpleString(error))
                if error.starts_with("-WRONGTYPE")
                    && matches!(self.requests(script)[..], [ref one] if self.has_other_type(one.key)) => {}
            // An operator learns that the key has another type.
            ("force", Value::SimpleString(error)) if error.starts_with("-WRONGTYPE") && self.options.batches => {}
            (_, Value::SimpleString(error)) if error.starts_with('-') => {
                self.report_violation(format!("{} is an error: {error}", script.name()));
            }
            ("acquire" | "yield", reply) if is_recorded(script.name(), reply) => self.check_recorded_reply(script),
            ("renew", Value::Array(replies)) => {
                for (id, reply) in super::args(script).chunks(2).map(|pair| &pair[0]).zip(replies) {
                    let of_crashed = self.crashed.iter().any(|crashed| id.starts_with(&format!("{crashed}:")));
                    let is_renewed = matches!(reply, Value::Int(1 | 2));
                    if is_renewed && of_crashed {
                        // It was in flight, and the lease counts from now. Accepted: no section can
                        // overlap.
                        let now = self.now;
                        self.idle_since.iter_mut().flatten().for_each(|since| *since = now);
                    }
                    let has = |data: &KeyData| data.holders.iter().any(|(holder, _)| holder == id);
                    if is_renewed && !before.iter().any(has) {
                        return self.report_violation(format!("{id} is renewed and has nothing"));
                    }
                    // An acquire that has expired is executed once more if the clock is set back.
                    let may_return = self.checker.lenient || self.options.back || self.options.copies;
                    if is_renewed && self.released.contains(id) && !may_return {
                        return self.report_violation(format!("{id} is renewed after its release"));
                    }
                }
            }
            _ => {}
        }
    }

    /// Each request has what its reply says.
    fn check_replies(&mut self, script: &str, requests: &[ScriptRequest], reply: &Value) {
        let count = requests.len();
        if let ("acquire" | "acquire_share", Ok((_, Timed::Done(replies)))) = (script, parse_acquire(reply, count)) {
            for (ScriptRequest { id, key }, reply) in requests.iter().zip(replies) {
                let data = self.key_data(*key);
                let holder = data.holders.iter().find(|(holder, _)| holder == id);
                let is_so = match &reply {
                    Ok(AcquireReply::Granted { fence, .. }) => {
                        holder.is_some_and(|(id, stored)| limit_of(id) > 1 || *stored == fence.to_string())
                            && !has_newer(&data, id)
                    }
                    Ok(AcquireReply::Superseded) => {
                        (holder.is_some() || data.queue.contains(id)) && has_newer(&data, id)
                    }
                    Ok(AcquireReply::Queued { .. }) => data.queue.contains(id),
                    Ok(_) => true,
                    Err(_) => self.has_other_type(*key),
                };
                if !is_so {
                    return self.report_violation(format!("{id} gets {reply:?}: {data:?}"));
                }
            }
        }
        if let ("release" | "release_share", Ok(replies)) = (script, parse_release(reply, count)) {
            for (ScriptRequest { id, key }, reply) in requests.iter().zip(replies) {
                let data = self.key_data(*key);
                if data.holders.iter().any(|(holder, _)| holder == id) || data.queue.contains(id) {
                    return self.report_violation(format!("{id} is released, and is still there: {data:?}"));
                }
                if !matches!(reply, Ok(ReleaseReply::Freed | ReleaseReply::HandedOff)) {
                    continue;
                }
                self.released.insert(id.clone());
                let has_other_waiters = self.foreign_waiters[*key] > 0;
                if !has_other_waiters && data.holders.is_empty() && data.queue.iter().any(|id| self.is_subscribed(id)) {
                    self.report_violation(format!("a release frees the key though a waiter exists: {data:?}"));
                }
            }
        }
    }

    fn check_key_data(&mut self, key: usize, before: &KeyData, script: &str, caller: Option<&String>) {
        let after = self.key_data(key);
        let lock = &self.locks[key];
        let left = self.fake.data().ms_left(lock);
        if left == -1 && !self.has_other_type(key) {
            return self.report_violation(format!("{script} leaves {lock} without an end: {after:?}"));
        }
        self.check_limits(&after, before, script);
        let mut queue = after.queue.clone();
        queue.sort();
        queue.dedup();
        if queue.len() < after.queue.len() {
            return self.report_violation(format!("{script} leaves an id twice in a queue: {after:?}"));
        }
        for id in after.queue.iter().filter(|id| !before.queue.contains(id)) {
            let first = self.enqueued.get(id).map_or(self.now, |(first, _)| *first);
            self.enqueued.insert(id.clone(), (first, self.now));
            self.check_new_fields(id, script);
        }
        // A caller that gets the record leaves the queue, and the key goes to the next waiter.
        let holds = |id: &String| after.holders.iter().any(|(holder, _)| holder == id);
        let has_left = |id: &String| caller == Some(id) && !after.queue.contains(id) && !holds(id);
        if let Some(caller) = caller.filter(|caller| before.queue.contains(caller) && has_left(caller)) {
            self.enqueued.remove(caller);
        }
        let mut new: Vec<_> = after.holders.iter().filter(|holder| !before.holders.contains(holder)).collect();
        new.sort_by_key(|(id, _)| self.enqueued.get(id).map_or(self.now, |(since, _)| *since));
        for (id, fence) in new {
            if !is_block(id) && !is_ticket(id) && !self.foreign.contains(id) {
                self.check_new_holder(key, (id, fence), (before, &after), (script, caller));
            }
        }
    }

    fn check_new_holder(
        &mut self,
        key: usize,
        (id, fence): (&String, &str),
        (before, after): (&KeyData, &KeyData),
        (script, caller): (&str, Option<&String>),
    ) {
        let holds = |id: &String| after.holders.iter().any(|(holder, _)| holder == id);
        let has_left = |id: &String| caller == Some(id) && !after.queue.contains(id) && !holds(id);
        let is_new = before.holders.iter().all(|(holder, _)| holder != id);
        if is_new {
            let passed = before
                .queue
                .iter()
                .take_while(|queued| *queued != id)
                .filter(|queued| !has_left(queued) && !holds(queued))
                .find(|queued| self.is_subscribed(queued))
                .cloned();
            if caller != Some(id) && !self.is_subscribed(id) {
                return self.report_violation(format!("{script} offers the key to {id}, which does not listen"));
            }
            // A ticket holds the key, and its waiters wait.
            if let Some(passed) = passed.filter(|_| script != "redeem") {
                return self.report_violation(format!("{script} lets {id} past {passed}: {before:?}"));
            }
            self.check_new_fields(id, script);
            if script != "redeem" {
                self.check_overtaking(key, id);
            }
            self.enqueued.remove(id);
        }
        if limit_of(id) > 1 {
            return;
        }
        let fence: u64 = fence.parse().unwrap_or(0);
        if fence <= self.top_fence[key] {
            return self
                .report_violation(format!("{script} gives {id} the fence {fence} after {}", self.top_fence[key]));
        }
        self.top_fence[key] = fence;
    }

    pub(super) fn is_subscribed(&self, id: &str) -> bool {
        let process = id.rsplit_once(':').map_or(id, |(process, _)| process);
        self.fake.data().listeners.get(&format!("tower-lock:lock:in:{process}")).is_some_and(|count| *count > 0)
    }

    pub(super) fn check_new_fields(&mut self, id: &str, script: &str) {
        if let Some(then) = self.forgotten.get(id) {
            let ago = Duration::from_nanos(self.now - then);
            self.report_violation(format!("{script} makes something for {id}, {ago:?} after it was forgotten"));
        }
    }

    /// Losses are noticed at the deadline, even without a poll.
    pub(super) fn check_deadline(&mut self, index: usize) {
        const SOON: u64 = 20 * MS;
        let client = &self.clients[index];
        let State::Holding(section) = &client.state else { return };
        let process = &self.processes[client.process];
        let limit = client.valid_until.max(process.thawed) + SOON;
        if self.now > limit && !process.frozen && section.end_reason().is_none() {
            let ago = Duration::from_nanos(self.now - client.valid_until);
            self.report_violation(format!(
                "the deadline of {} was over {ago:?} ago, and was not noticed",
                section.grant.id
            ));
        }
    }
}

/// Whether a call has got the record of its key.
fn is_recorded(script: &str, reply: &Value) -> bool {
    let reply = match script {
        "acquire" => parse_acquire(reply, 1).ok().map(|(_, reply)| reply).and_then(|reply| match reply {
            Timed::Done(mut replies) => replies.remove(0).ok().map(Timed::Done),
            Timed::Expired => None,
        }),
        _ => parse_yield(reply).ok().and_then(|(_, reply)| match reply {
            Timed::Done(YieldReply::NotHolder(reply)) => Some(Timed::Done(reply)),
            _ => None,
        }),
    };
    matches!(reply, Some(Timed::Done(AcquireReply::Recorded(_))))
}
