//! Calls that several requests share: many keys, and clients that arrive together.

use super::*;

/// The load of a simulation with shared calls. Its random numbers are separate, so that a
/// simulation without them is the same as before.
pub(super) struct Batches {
    keys: u64,
    /// Clients arrive at multiples of this time.
    together: u64,
    has_other_type: bool,
}

/// One request of a script.
pub(super) struct ScriptRequest {
    pub(super) id: String,
    pub(super) key: usize,
}

impl Batches {
    pub(super) fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x0062_6174_6368_6573);
        let keys = [2, 4, 8, 16][rng.usize(0..4)];
        let together = [1, 500, 2_000][rng.usize(0..3)] * MS;
        Self { keys, together, has_other_type: rng.bool() }
    }

    pub(super) fn keys(&self) -> u64 {
        self.keys
    }

    pub(super) fn arrival(&self, at: u64) -> u64 {
        at.next_multiple_of(self.together)
    }
}

impl Simulation {
    /// Another program has written a text to the name of the last lock.
    pub(super) fn put_other_type(&mut self) {
        if self.batches.as_ref().is_some_and(|batches| batches.has_other_type) {
            let lock = self.locks.last().expect("a key").clone();
            self.fake.command(&["SET", &lock, "text"]);
        }
    }

    /// Whether this key may be the one of another type. Flushed, it is like the others.
    pub(super) fn had_other_type(&self, key: usize) -> bool {
        key + 1 == self.keys.len() && self.batches.as_ref().is_some_and(|batches| batches.has_other_type)
    }

    /// Whether this key has another type now.
    pub(super) fn has_other_type(&self, key: usize) -> bool {
        self.had_other_type(key) && self.fake.data().kind(&self.locks[key]) == "string"
    }

    /// The requests of an acquire, a yield or a release.
    pub(super) fn requests(&self, script: &ScriptCall) -> Vec<ScriptRequest> {
        let (keys, args) = (script.keys(), super::args(script));
        let request = |(key, args): (usize, &[String])| ScriptRequest { id: args[0].clone(), key };
        // Other names follow those of the locks.
        let locks = keys.iter().map_while(|name| self.locks.iter().position(|lock| lock == name));
        let (first, width) = if script.name().starts_with("release") { (2, 3) } else { (5, 4) };
        locks.zip(args[first..].chunks(width)).map(request).collect()
    }
}
