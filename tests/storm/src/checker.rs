//! Checks the reports of a storm for violations.
//!
//! Sections are compared by their own times, on the shared clock of the machine, so that slow
//! reports make no difference. A section lasts from its start to its end or its deadline, whichever
//! is first. After an aborted section no other one may start for a lock-delay.
//!
//! The rule of `tower_lock_testkit::exclusion` needs the sections in the order in which they begin.
//! Here the reports of several processes arrive in any order, so sections are compared as intervals
//! when they have ended.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::report::{Reply, Report};

/// Records and checks all reports, and stands in for the resource that is written to.
#[derive(Debug, Default)]
pub struct Checker {
    /// Accepts every write, to prove that the checks detect a stale one.
    ignores_fences: bool,
    requests: HashMap<String, Request>,
    keys: HashMap<String, KeyHistory>,
    /// Sections that have not ended.
    open: HashMap<String, OpenSection>,
    summary: Summary,
}

/// The totals of a storm.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Requests sent.
    pub asked: u64,
    /// Requests with a response, by status.
    pub answered: BTreeMap<u16, u64>,
    /// Requests whose client left.
    pub left: u64,
    /// Those whose handler never started.
    pub left_before: u64,
    /// Those whose handler was aborted, by name. The handlers of the others ran to their end.
    pub left_inside: BTreeSet<String>,
    /// Requests whose connection broke.
    pub broken: u64,
    /// Those whose handler never started.
    pub broken_before: u64,
    /// Handlers that ran under a lock.
    pub sections: u64,
    /// Aborted sections.
    pub aborted: u64,
    /// Sections that had lost their lock before their report.
    pub late: u64,
    /// Sections without an end: their process was killed.
    pub left_open: u64,
    /// Accepted writes.
    pub accepted: u64,
    /// Refused stale writes.
    pub refused: u64,
    /// How long sections of a key overlapped, in microseconds.
    pub overlaps_us: Vec<u64>,
    /// Violations, by name, and their number.
    pub violations: BTreeMap<String, u64>,
    /// The first violations.
    pub first: Vec<String>,
}

#[derive(Debug, Default)]
struct Request {
    was_asked: bool,
    entered: u64,
    was_aborted: bool,
    end: Option<End>,
}

/// The position of a section, and its request.
#[derive(Debug)]
struct OpenSection {
    key: String,
    index: usize,
    request: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Answered { status: u16, outcome: String },
    Left,
    Broken,
}

#[derive(Debug, Default)]
struct KeyHistory {
    sections: Vec<Section>,
    /// Fencing tokens in the order of their sections.
    order: BTreeMap<(u64, usize), u64>,
    written: u64,
}

#[derive(Clone, Debug)]
struct Section {
    name: String,
    token: u64,
    at: u64,
    deadline: u64,
    end: Option<u64>,
    /// No other section may start before this time.
    until: u64,
}

/// The number of violations that are described.
const MAX_EXAMPLES: usize = 20;

/// Stores count a lock-delay in whole milliseconds of their own clock.
const CLOCK_ROUNDING: u64 = 5_000_000;

impl Checker {
    /// A checker without reports.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A checker that accepts every write.
    #[must_use]
    pub fn ignoring_fences() -> Self {
        Self { ignores_fences: true, ..Self::default() }
    }

    /// Records a report.
    ///
    /// # Panics
    ///
    /// Never: a summary is plain data.
    pub fn record(&mut self, report: Report) -> Reply {
        match report {
            Report::Request { request } => {
                let asked = std::mem::replace(&mut self.requests.entry(request.clone()).or_default().was_asked, true);
                self.violation_if("requested-twice", asked, || request);
                self.summary.asked += 1;
            }
            Report::Enter { section, key, token, process, request, at, deadline } => {
                self.enter_for(&request, &section, &process);
                self.enter(section, key, token, request, at, deadline);
            }
            Report::Exit { section, at } => match self.open.remove(&section) {
                Some(OpenSection { key, index, .. }) => self.end(&key, index, at, Duration::ZERO),
                None => self.violation_if("exit-without-enter", true, || section),
            },
            Report::Abort { section, at, until } => match self.open.remove(&section) {
                Some(OpenSection { key, index, request }) => {
                    self.summary.aborted += 1;
                    self.requests.entry(request).or_default().was_aborted = true;
                    self.end(&key, index, at, Duration::from_nanos(until.saturating_sub(at)));
                }
                None => self.violation_if("exit-without-enter", true, || section),
            },
            Report::Write { key, token } => return self.write(&key, token),
            Report::Response { request, status, outcome } => {
                *self.summary.answered.entry(status).or_default() += 1;
                self.end_request(&request, End::Answered { status, outcome });
            }
            Report::Left { request } => {
                self.summary.left += 1;
                self.end_request(&request, End::Left);
            }
            Report::Broken { request } => {
                self.summary.broken += 1;
                self.end_request(&request, End::Broken);
            }
            Report::Flush => {}
            Report::Finish => {
                let summary = self.finish();
                return Reply::Summary(serde_json::to_string(&summary).expect("plain data"));
            }
        }
        Reply::Ok
    }

    /// Records a line that is no report.
    pub fn invalid_report(&mut self, line: &str) -> Reply {
        self.violation_if("not-understood", true, || line.to_owned());
        Reply::Invalid
    }

    /// Completes the checks.
    pub fn finish(&mut self) -> Summary {
        let mut open: Vec<_> = self.open.drain().map(|(_, OpenSection { key, index, .. })| (key, index)).collect();
        open.sort_unstable();
        self.summary.left_open = u64::try_from(open.len()).unwrap_or(u64::MAX);
        for (key, index) in open {
            self.end(&key, index, u64::MAX, Duration::ZERO);
        }
        let mut requests: Vec<_> = std::mem::take(&mut self.requests).into_iter().collect();
        requests.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        for (name, Request { was_asked, entered, was_aborted: has_fallen, end }) in requests {
            match end {
                Some(End::Left) if entered == 0 => self.summary.left_before += 1,
                Some(End::Left) if has_fallen => drop(self.summary.left_inside.insert(name.clone())),
                Some(End::Broken) if entered == 0 => self.summary.broken_before += 1,
                _ => {}
            }
            self.violation_if("never-answered", was_asked && end.is_none(), || name.clone());
            self.violation_if("entered-without-request", !was_asked && entered > 0, || name.clone());
            let is_a_success = matches!(end, Some(End::Answered { status: 200..=299, .. }));
            let is_an_accident = matches!(end, Some(End::Answered { status: 500, .. }));
            let has_run = is_a_success || is_an_accident;
            self.violation_if("answered-without-a-section", has_run && entered == 0, || name.clone());
            self.violation_if("answered-but-aborted", is_a_success && has_fallen, || name.clone());
        }
        self.summary.clone()
    }

    fn enter_for(&mut self, request: &str, section: &str, process: &str) {
        let state = self.requests.entry(request.to_owned()).or_default();
        state.entered += 1;
        let entered = state.entered;
        let was_not_started = state.end.as_ref().is_some_and(End::says_not_started);
        let said = || format!("{request} in {process} as {section}");
        self.violation_if("entered-twice", entered > 1, said);
        self.violation_if("not-started-but-entered", was_not_started, said);
    }

    fn enter(&mut self, name: String, key_name: String, token: u64, request: String, at: u64, deadline: u64) {
        self.summary.sections += 1;
        let key = self.keys.entry(key_name.clone()).or_default();
        let index = key.sections.len();
        // It has lost its lock: the next section may have started.
        let is_late = deadline <= at;
        let mut out_of_order = None;
        if is_late {
            self.summary.late += 1;
        } else {
            let before = key.order.range(..(at, index)).next_back().map(|(position, token)| (position.1, *token));
            let after = key.order.range((at, index)..).next().map(|(position, token)| (position.1, *token));
            let other = before.filter(|(_, before)| *before >= token).or(after.filter(|(_, after)| *after <= token));
            out_of_order = other.map(|(index, other)| format!("{other} of {}", key.sections[index].name));
            key.order.insert((at, index), token);
        }
        key.sections.push(Section { name: name.clone(), token, at, deadline: deadline.max(at), end: None, until: 0 });
        let other = out_of_order.unwrap_or_default();
        self.violation_if("fence-not-increasing", !other.is_empty(), || {
            format!("{key_name}: {token} of {name} and {other}")
        });
        let again = self.open.insert(name.clone(), OpenSection { key: key_name, index, request }).is_some();
        self.violation_if("section-named-twice", again, || name);
    }

    /// Each pair is compared when the later section ends.
    fn end(&mut self, key_name: &str, index: usize, at: u64, delay: Duration) {
        let key = self.keys.get_mut(key_name).expect("entered");
        let section = &mut key.sections[index];
        let end = section.deadline.min(at);
        section.end = Some(end);
        section.until = end.saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX));
        let section = section.clone();
        let others = key.sections.iter().enumerate().filter(|(other, _)| *other != index);
        let too_close = others.filter_map(|(_, other)| Some((section.too_close(other)?, other.clone())));
        for (what, other) in too_close.collect::<Vec<_>>() {
            if what == "overlap" {
                let until = other.end.map_or(end, |other_end| end.min(other_end));
                self.summary.overlaps_us.push((until - section.at.max(other.at)) / 1_000);
            }
            self.violation_if(what, true, || {
                let (first, second) = if other.at < section.at { (&other, &section) } else { (&section, &other) };
                let (Section { name, token, .. }, inside) = (second, (second.at - first.at) / 1_000);
                format!("{key_name}: {name} ({token}) {inside} µs after {} ({})", first.name, first.token)
            });
        }
    }

    fn end_request(&mut self, request: &str, end: End) {
        let state = self.requests.entry(request.to_owned()).or_default();
        let (entered, was_asked, says_not_started) = (state.entered, state.was_asked, end.says_not_started());
        let twice = state.end.as_ref().map(|before| format!("{request}: {before:?}, then {end:?}"));
        state.end = Some(end);
        self.violation_if("answered-without-request", !was_asked, || request.to_owned());
        self.violation_if("answered-twice", twice.is_some(), || twice.unwrap_or_default());
        self.violation_if("not-started-but-entered", says_not_started && entered > 0, || request.to_owned());
    }

    fn write(&mut self, key_name: &str, token: u64) -> Reply {
        let key = self.keys.entry(key_name.to_owned()).or_default();
        let (before, is_stale) = (key.written, token < key.written);
        if is_stale && !self.ignores_fences {
            self.summary.refused += 1;
            return Reply::Refused;
        }
        key.written = before.max(token);
        self.summary.accepted += 1;
        self.violation_if("stale-write-accepted", is_stale, || format!("{key_name}: {token} after {before}"));
        Reply::Accepted
    }

    fn violation_if(&mut self, name: &str, it_was: bool, what: impl FnOnce() -> String) {
        if it_was {
            *self.summary.violations.entry(name.to_owned()).or_default() += 1;
            if self.summary.first.len() < MAX_EXAMPLES {
                self.summary.first.push(format!("{name}: {}", what()));
            }
        }
    }
}

impl Summary {
    /// The number of responses with this status.
    #[must_use]
    pub fn answers(&self, status: u16) -> u64 {
        self.answered.get(&status).copied().unwrap_or(0)
    }
}

impl End {
    fn says_not_started(&self) -> bool {
        matches!(self, Self::Answered { outcome, .. } if outcome == "not-started")
    }
}

impl Section {
    /// The violation between two ended sections.
    fn too_close(&self, other: &Self) -> Option<&'static str> {
        let (end, other_end) = (self.end?, other.end?);
        if self.at.max(other.at) < end.min(other_end) {
            return Some("overlap");
        }
        let is_soon = |first: &Self, end: u64, next: &Self| {
            let has_the_lock = |section: &Self| section.deadline > section.at;
            has_the_lock(first)
                && has_the_lock(next)
                && next.at >= end
                && next.at.saturating_add(CLOCK_ROUNDING) < first.until
        };
        (is_soon(self, end, other) || is_soon(other, other_end, self)).then_some("too-soon")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records reports as they arrive over the wire.
    fn summary_of(reports: &[&str]) -> Summary {
        let mut checker = Checker::new();
        for line in reports {
            checker.record(line.parse().expect("a report"));
        }
        checker.finish()
    }

    fn violations(reports: &[&str]) -> Vec<String> {
        summary_of(reports).violations.into_keys().collect()
    }

    #[test]
    fn sequential_requests_are_accepted() {
        let summary = summary_of(&[
            "REQUEST r1",
            "REQUEST r2",
            "REQUEST r3",
            "REQUEST r4",
            "ENTER a-1 k 10 a r1 100 900",
            "WRITE k 10",
            "EXIT a-1 200",
            "ENTER b-1 k 11 b r2 200 900",
            "WRITE k 11",
            "WRITE k 11",
            "ENTER b-2 other 1 b r5 150 900",
            "REQUEST r5",
            "EXIT b-1 300",
            "EXIT b-2 300",
            "RESPONSE r1 200 -",
            "RESPONSE r2 200 -",
            "RESPONSE r5 200 -",
            "RESPONSE r3 409 not-started",
            "LEFT r4",
        ]);
        assert_eq!(summary.violations, BTreeMap::new(), "{:?}", summary.first);
        assert_eq!((summary.asked, summary.left, summary.sections, summary.accepted), (5, 1, 3, 3));
        assert_eq!((summary.answers(200), summary.answers(409), summary.answers(503)), (3, 1, 0));
    }

    #[test]
    fn overlap_is_found_in_any_order_of_reports() {
        let (first, second) = ("ENTER a-1 k 10 a r1 100 900", "ENTER b-1 k 11 b r2 150 900");
        let asks = ["REQUEST r1", "REQUEST r2", "LEFT r1", "LEFT r2"];
        for reports in [
            [first, second, "EXIT a-1 200", "EXIT b-1 300"],
            [second, "EXIT b-1 300", first, "EXIT a-1 200"],
            [first, second, "EXIT b-1 160", "EXIT a-1 200"],
        ] {
            let summary = summary_of(&[&asks[..], &reports].concat());
            assert_eq!(summary.violations, BTreeMap::from([("overlap".to_owned(), 1)]), "{reports:?}");
            assert!(summary.first[0].contains("b-1 (11) 0 µs after a-1 (10)"), "{:?}", summary.first);
            assert_eq!(summary.overlaps_us, [0], "it is shorter");
        }
        // A killed process holds the lock until its deadline.
        let killed = summary_of(&[&asks[..], &[first, second, "EXIT b-1 300"]].concat());
        assert_eq!((killed.left_open, killed.violations["overlap"]), (1, 1));
    }

    #[test]
    fn late_reports_and_deadlines_are_no_violation() {
        let asks = ["REQUEST r1", "REQUEST r2", "LEFT r1", "LEFT r2"];
        for reports in [
            // The end of the first is reported after the start of the second.
            ["ENTER a-1 k 10 a r1 100 900", "ENTER b-1 k 11 b r2 200 900", "EXIT a-1 200", "EXIT b-1 300"],
            // The start is reported late, too.
            ["ENTER b-1 k 11 b r2 200 900", "EXIT b-1 300", "ENTER a-1 k 10 a r1 100 900", "EXIT a-1 200"],
            // It slept past its deadline.
            ["ENTER a-1 k 10 a r1 100 200", "ENTER b-1 k 11 b r2 200 900", "EXIT a-1 700", "EXIT b-1 300"],
            // It slept past its deadline before its report.
            ["ENTER b-1 k 11 b r2 200 900", "ENTER a-1 k 10 a r1 250 250", "EXIT a-1 700", "EXIT b-1 300"],
            // It was killed, and the next section waited for the end of its lease.
            ["ENTER a-1 k 10 a r1 100 200", "ENTER b-1 k 11 b r2 200 900", "EXIT b-1 300", "FLUSH"],
        ] {
            assert_eq!(violations(&[&asks[..], &reports].concat()), [""; 0], "{reports:?}");
        }
    }

    #[test]
    fn start_within_the_lock_delay_is_too_soon() {
        let asks = ["REQUEST r1", "REQUEST r2", "LEFT r1", "LEFT r2"];
        // In milliseconds: aborted at 20, blocked until 120.
        let broken = ["ENTER a-1 k 10 a r1 10000000 900000000", "ABORT a-1 20000000 120000000"];
        let comes = |at: u64| [format!("ENTER b-1 k 11 b r2 {at}000000 900000000"), format!("EXIT b-1 {at}500000")];
        for (at, expected) in
            [(20, vec!["too-soon"]), (90, vec!["too-soon"]), (119, vec![]), (120, vec![]), (15, vec!["overlap"])]
        {
            let comes = comes(at);
            let next = [&*comes[0], &*comes[1]];
            for reports in [[broken, next].concat(), [next, broken].concat()] {
                assert_eq!(violations(&[&asks[..], &reports].concat()), expected, "{reports:?}");
            }
        }
        // It lost its lock long before the abort; the delay counts from the loss.
        let lost = ["ENTER a-1 k 10 a r1 10000000 15000000", "ABORT a-1 400000000 500000000"];
        let next = [&*comes(130)[0], &*comes(130)[1]].map(str::to_owned);
        assert_eq!(violations(&[&asks[..], &lost, &[&*next[0], &*next[1]]].concat()), [""; 0]);
        // A section that had lost its lock before its report neither follows nor blocks another
        // one.
        let late = ["ENTER b-1 k 11 b r2 60000000 60000000", "ABORT b-1 70000000 170000000"];
        let third = ["ENTER c-1 k 12 c r2 130000000 900000000", "EXIT c-1 140000000"];
        let reports =
            [&asks[..], &["REQUEST r3", "LEFT r3"], &broken, &late, &[&third[0].replace("r2", "r3"), third[1]]];
        assert_eq!(violations(&reports.concat()), [""; 0]);
    }

    #[test]
    fn handlers_of_departed_clients_are_counted() {
        let summary = summary_of(&[
            "REQUEST before",
            "LEFT before",
            "REQUEST inside",
            "ENTER a-1 k 1 a inside 100 900",
            "LEFT inside",
            "ABORT a-1 200 200",
            "REQUEST finished",
            "ENTER a-2 k 2 a finished 300 900",
            "LEFT finished",
            "EXIT a-2 400",
            "REQUEST panicked",
            "ENTER a-3 k 3 a panicked 500 900",
            "ABORT a-3 600 600",
            "BROKEN panicked",
            "REQUEST cut",
            "BROKEN cut",
        ]);
        assert_eq!(summary.violations, BTreeMap::new(), "{:?}", summary.first);
        assert_eq!((summary.left, summary.left_before), (3, 1));
        assert_eq!(summary.left_inside, BTreeSet::from(["inside".to_owned()]));
        assert_eq!((summary.broken, summary.broken_before, summary.aborted), (2, 1, 2));
    }

    #[test]
    fn non_increasing_fence_is_found_in_any_order_of_reports() {
        let asks = ["REQUEST r1", "REQUEST r2", "LEFT r1", "LEFT r2"];
        let (first, second) =
            (["ENTER a-1 k 11 a r1 100 900", "EXIT a-1 150"], ["ENTER b-1 k 10 b r2 200 900", "EXIT b-1 300"]);
        for reports in [[first, second].concat(), [second, first].concat()] {
            assert_eq!(violations(&[&asks[..], &reports].concat()), ["fence-not-increasing"], "{reports:?}");
        }
        let same = ["ENTER a-1 k 11 a r1 100 900", "EXIT a-1 150", "ENTER b-1 k 11 b r2 200 900", "EXIT b-1 300"];
        assert_eq!(violations(&[&asks[..], &same].concat()), ["fence-not-increasing"]);
    }

    #[test]
    fn every_request_ends_exactly_once() {
        assert_eq!(violations(&["REQUEST r1"]), ["never-answered"]);
        assert_eq!(violations(&["REQUEST r1", "RESPONSE r1 409 not-started", "LEFT r1"]), ["answered-twice"]);
        assert_eq!(
            violations(&["REQUEST r1", "RESPONSE r1 503 unknown", "RESPONSE r1 503 unknown"]),
            ["answered-twice"]
        );
        assert_eq!(violations(&["REQUEST r1", "REQUEST r1", "LEFT r1"]), ["requested-twice"]);
        assert_eq!(violations(&["LEFT r1"]), ["answered-without-request"]);
        assert_eq!(violations(&["ENTER a-1 k 1 a r1 100 900", "EXIT a-1 200"]), ["entered-without-request"]);
        assert_eq!(violations(&["REQUEST r1", "BROKEN r1", "LEFT r1"]), ["answered-twice"]);
        assert_eq!(violations(&["REQUEST r1", "RESPONSE r1 200 -"]), ["answered-without-a-section"]);
        assert_eq!(violations(&["REQUEST r1", "RESPONSE r1 500 -"]), ["answered-without-a-section"]);
        let aborted = ["ENTER a-1 k 1 a r1 100 900", "ABORT a-1 200 200"];
        assert_eq!(violations(&["REQUEST r1", aborted[0], aborted[1], "RESPONSE r1 200 -"]), ["answered-but-aborted"]);
        assert_eq!(violations(&["REQUEST r1", aborted[0], aborted[1], "RESPONSE r1 500 -"]), [""; 0]);
        assert_eq!(violations(&["ABORT a-1 200 200"]), ["exit-without-enter"]);
        let twice = ["ENTER a-1 k 1 a r1 100 900", "EXIT a-1 200", "ENTER a-2 k 2 a r1 300 900", "EXIT a-2 400"];
        assert_eq!(violations(&[&["REQUEST r1", "RESPONSE r1 200 -"], &twice[..]].concat()), ["entered-twice"]);
        assert_eq!(violations(&["EXIT a-1 200"]), ["exit-without-enter"]);
    }

    #[test]
    fn not_started_after_a_start_is_a_violation() {
        let section = ["ENTER a-1 k 1 a r1 100 900", "EXIT a-1 200"];
        let answer = ["RESPONSE r1 503 not-started"];
        for reports in [[&section[..], &answer].concat(), [&answer[..], &section].concat()] {
            assert_eq!(
                violations(&[&["REQUEST r1"], &reports[..]].concat()),
                ["not-started-but-entered"],
                "{reports:?}"
            );
        }
        assert_eq!(violations(&["REQUEST r1", section[0], section[1], "RESPONSE r1 503 unknown"]), [""; 0]);
    }

    #[test]
    fn stale_write_is_refused_or_reported() {
        let writes = ["WRITE k 10", "WRITE k 12", "WRITE k 11", "WRITE other 1", "WRITE k 12"];
        let mut checker = Checker::new();
        let answers = writes.map(|line| checker.record(line.parse().expect("a report")));
        let (yes, no) = (Reply::Accepted, Reply::Refused);
        assert_eq!(answers, [yes.clone(), yes.clone(), no, yes.clone(), yes.clone()]);
        assert_eq!((checker.finish().refused, checker.finish().violations), (1, BTreeMap::new()));

        let mut careless = Checker::ignoring_fences();
        assert!(writes.iter().all(|line| careless.record(line.parse().expect("a report")) == yes));
        assert_eq!(careless.finish().violations, BTreeMap::from([("stale-write-accepted".to_owned(), 1)]));
    }

    #[test]
    fn invalid_report_is_a_violation_and_examples_are_bounded() {
        let mut checker = Checker::new();
        for _ in 0..100 {
            assert_eq!(checker.invalid_report("HELLO"), Reply::Invalid);
        }
        let summary = checker.finish();
        assert_eq!((summary.violations["not-understood"], summary.first.len()), (100, MAX_EXAMPLES));
        let json = serde_json::to_string(&summary).expect("plain data");
        assert_eq!(serde_json::from_str::<Summary>(&json).expect("the same"), summary);
    }
}
