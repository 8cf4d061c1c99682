//! All conversations of one process, and their bounds. Pure, too.

use std::sync::Arc;

use super::{
    conversation::{Actions, Ahead, Context, Conversation, Ending, Event, Request},
    owner::Owner,
    section::Section,
};
use crate::{
    clock::{Moment, Now},
    defaults::{GIVE_BACKS, LINE_PER_PROCESS},
    key::{KeyMap, LockKey},
    lease::OwnerIds,
    store::Released,
};

/// An entry is here while somebody wants a key, has it, or has not given it back yet.
///
/// I11: bounded by the sections that run, the waiters it admits, and the give-backs it admits.
#[derive(Debug)]
pub struct Table<W> {
    by_key: KeyMap<Conversation<W>>,
    waiting: usize,
    giving_back: usize,
    next_place: u64,
    draining: bool,
}

impl<W> Default for Table<W> {
    fn default() -> Self {
        Self { by_key: KeyMap::default(), waiting: 0, giving_back: 0, next_place: 0, draining: false }
    }
}

impl<W> Table<W> {
    /// Somebody wants the key. Its place, should it have to wait.
    pub fn request(
        &mut self,
        key: &LockKey,
        now: &Now<'_>,
        ids: &OwnerIds,
        request: Request<W>,
        actions: &mut Actions<W>,
    ) -> u64 {
        let place = self.next_place;
        self.next_place += 1;
        self.on(key, now, ids, Event::Request(place, request), actions);
        place
    }

    /// Whoever has this place has left. `None`: it was told already, or is about to be.
    pub fn leave(
        &mut self,
        key: &LockKey,
        now: &Now<'_>,
        ids: &OwnerIds,
        place: u64,
        actions: &mut Actions<W>,
    ) -> Option<Ahead> {
        self.with(key, now, ids, actions, |conversation, cx| conversation.leave(place, cx))
    }

    /// A guard of this section is given back. What became of it; `None`: that follows.
    pub fn guard_ended(
        &mut self,
        now: &Now<'_>,
        ids: &OwnerIds,
        section: &Arc<Section>,
        ending: Ending,
        actions: &mut Actions<W>,
    ) -> Option<Released> {
        let key = &section.grant.key;
        self.with(key, now, ids, actions, |conversation, cx| conversation.guard_ended(section, ending, cx))
    }

    /// Something has happened.
    pub fn on(&mut self, key: &LockKey, now: &Now<'_>, ids: &OwnerIds, event: Event<W>, actions: &mut Actions<W>) {
        self.with(key, now, ids, actions, |conversation, cx| conversation.on(event, cx));
    }

    /// Every conversation hears of it.
    pub fn on_all(
        &mut self,
        now: &Now<'_>,
        ids: &OwnerIds,
        event: impl Fn() -> Event<W>,
        mut act: impl FnMut(&LockKey, Actions<W>),
    ) {
        let keys: Vec<_> = self.by_key.keys().cloned().collect();
        for key in keys {
            let mut actions = Actions::new();
            self.on(&key, now, ids, event(), &mut actions);
            act(&key, actions);
        }
    }

    /// From now on nothing new is started.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Whoever was to wake this conversation at that moment will not.
    pub fn disarm(&mut self, key: &LockKey, at: Moment) {
        if let Some(conversation) = self.by_key.get_mut(key) {
            conversation.disarm(at);
        }
    }

    /// How often this owner has this key.
    pub fn holds(&self, key: &LockKey, owner: &Owner) -> u32 {
        self.by_key.get(key).map_or(0, |conversation| conversation.holds(owner))
    }

    /// How often this section is held.
    pub fn holds_of(&self, section: &Arc<Section>) -> u32 {
        self.by_key.get(&section.grant.key).map_or(0, |conversation| conversation.holds_of(section))
    }

    /// How many sections run.
    pub fn held(&self) -> usize {
        self.by_key.values().filter(|conversation| conversation.is_held()).count()
    }

    /// How many wait.
    #[cfg(any(test, feature = "test-util"))]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Of how many keys something is known.
    #[cfg(any(test, feature = "test-util"))]
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Nobody wants, has or gives back anything.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    fn with<T>(
        &mut self,
        key: &LockKey,
        now: &Now<'_>,
        ids: &OwnerIds,
        actions: &mut Actions<W>,
        event: impl FnOnce(&mut Conversation<W>, &mut Context<'_, W>) -> T,
    ) -> T {
        let mut cx = Context {
            key,
            now,
            ids,
            room: self.waiting < LINE_PER_PROCESS,
            way_back: self.giving_back < GIVE_BACKS,
            actions,
        };
        if let Some(conversation) = self.by_key.get_mut(key) {
            let (waited, gave_back) = (conversation.waiting(), conversation.giving_back());
            let answer = event(conversation, &mut cx);
            self.waiting = self.waiting - waited + conversation.waiting();
            self.giving_back = self.giving_back - gave_back + conversation.giving_back();
            if conversation.is_over() {
                self.by_key.remove(key);
            }
            return answer;
        }
        let mut conversation = Conversation::new(self.draining);
        let answer = event(&mut conversation, &mut cx);
        self.waiting += conversation.waiting();
        self.giving_back += conversation.giving_back();
        if !conversation.is_over() {
            self.by_key.insert(key.clone(), conversation);
        }
        answer
    }
}
