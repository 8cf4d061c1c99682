//! Clients that replace older ones of their kind.

use super::*;

/// The clients that replace others. The random numbers are separate, as of the other options.
pub(super) struct Newest {
    rng: fastrand::Rng,
    /// Those that were replaced while they held their key, and have ended in order.
    ended: HashSet<String>,
    pub(super) replaced: u64,
}

impl Newest {
    pub(super) fn new(seed: u64) -> Self {
        Self { rng: fastrand::Rng::with_seed(seed ^ 0x006e_6577), ended: HashSet::new(), replaced: 0 }
    }

    /// Whether the next client replaces others.
    pub(super) fn next(&mut self) -> bool {
        self.rng.u8(0..3) > 0
    }
}

impl Simulation {
    /// The client of this section ends it in order, at once or some time later.
    pub(super) fn on_superseded(&mut self, process: usize, section: &Arc<Section>) {
        if self.newest.is_none() || !section.grant.id.is_replaceable() {
            return self.report_violation(format!("{} is replaced, and is not of that kind", section.grant.id));
        }
        let is_it = |client: &Client| match &client.state {
            State::Granted(own) | State::Holding(own) => Arc::ptr_eq(own, section),
            _ => false,
        };
        let Some(index) = self.clients.iter().position(is_it) else { return };
        self.log(|w| format!("{} is to end {}", w.processes[process].label, section.grant.id));
        let grace = self.newest.as_mut().map_or(0, |newest| newest.rng.u64(0..300 * MS));
        let number = self.clients[index].number;
        self.after(grace, move |w| {
            w.deliver_to(process, number, Source::Request(id(index)), move |w| w.end_replaced(index));
        });
    }

    fn end_replaced(&mut self, index: usize) {
        let State::Holding(section) = self.clients[index].state.clone() else { return };
        let is_held = !section.remaining(self.local(self.clients[index].process)).is_zero();
        let Some(newest) = self.newest.as_mut().filter(|_| is_held) else { return };
        newest.replaced += 1;
        newest.ended.insert(section.grant.id.to_string());
        self.check_deadline(index);
        self.end_section(index, GuardEnd::ReleasedAfterFailure);
    }

    pub(super) fn check_replaced_waiter(&mut self, index: usize) {
        let Client { sharing, .. } = self.clients[index];
        match &mut self.newest {
            Some(newest) if sharing == Sharing::Newest => newest.replaced += 1,
            _ => self.report_violation(format!("{index} is replaced, and is not of that kind")),
        }
    }

    /// The end of a section that was replaced blocks nothing.
    pub(super) fn check_replaced(&mut self, key: usize, script: &str, caller: Option<&String>) {
        let (Some(newest), Some(caller)) = (&self.newest, caller) else { return };
        let block = format!("{caller}:end");
        if script == "release"
            && newest.ended.contains(caller)
            && !self.revoked.contains_key(caller)
            && self.key_data(key).holders.iter().any(|(holder, _)| *holder == block)
        {
            self.report_violation(format!("{caller} was replaced, and blocks its key"));
        }
    }
}

/// Whether an acquisition that replaces this one waits.
pub(super) fn has_newer(data: &KeyData, id: &str) -> bool {
    let behind = data.queue.iter().position(|waiting| waiting == id).map_or(0, |at| at + 1);
    let is_replaceable = |id: &String| AcquisitionId::from_text(id).is_replaceable();
    AcquisitionId::from_text(id).is_replaceable() && data.queue.iter().skip(behind).any(is_replaceable)
}
