//! The raw keys for which this process waits, and the channels on which Redisson announces that
//! they are free.

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::{AtomicBool, Ordering},
};

use tokio::{sync::Notify, time::Instant};

use super::wire::{RawChannel, RawNames};
use crate::{
    limits::{MAX_RAW_KEYS, RAW_KEY_LISTENS},
    lock_key::LockKey,
    store::StoreEvent,
    sync::Mutex,
};

/// The raw keys that the connection for messages listens to.
#[derive(Default)]
pub(super) struct Wakeups {
    /// By the channel of Redisson.
    keys: Mutex<HashMap<String, Listened>>,
    /// A key was added.
    pub(super) added: Notify,
    /// A raw key was used, so that the permission for its channel was tried.
    was_used: AtomicBool,
    warned_of_refusal: AtomicBool,
}

struct Listened {
    key: LockKey,
    own_channel: String,
    until: Instant,
    /// The next message is for other programs.
    skips_next: bool,
}

/// What a session must change.
pub(super) struct Changes {
    /// The keys to subscribe, with their channels.
    pub(super) added: Vec<Channels>,
    /// The keys whose time has passed.
    pub(super) ended: Vec<Channels>,
}

/// The two channels of a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Channels {
    pub(super) channel: String,
    pub(super) own_channel: String,
}

impl Wakeups {
    /// The most keys that a session subscribes at once: each that is refused needs round trips.
    const MAX_ADDED: usize = 16;

    /// Listens to a key for which an acquisition waits, and to the first one in any case: a missing
    /// permission is then noticed before it costs time. Further keys than the bound are only
    /// polled.
    pub(super) fn used(&self, key: &LockKey, names: RawNames, is_queued: bool) {
        if self.was_used.swap(true, Ordering::Relaxed) && !is_queued {
            return;
        }
        let RawNames { channel, own_channel, .. } = names;
        let until = Instant::now() + RAW_KEY_LISTENS;
        let mut keys = self.keys.lock();
        if let Some(listened) = keys.get_mut(&channel) {
            listened.until = until;
        } else if keys.len() < MAX_RAW_KEYS {
            keys.insert(channel, Listened { key: key.clone(), own_channel, until, skips_next: false });
            drop(keys);
            self.added.notify_one();
        }
    }

    /// The event of a message (I7: a hint).
    pub(super) fn event(&self, channel: RawChannel<'_>) -> Option<StoreEvent> {
        let mut keys = self.keys.lock();
        match channel {
            RawChannel::Freed(channel) => {
                let listened = keys.get_mut(channel)?;
                let is_for_others = std::mem::take(&mut listened.skips_next);
                (!is_for_others).then(|| StoreEvent::Freed { key: listened.key.clone() })
            }
            RawChannel::Reserved(channel) => {
                keys.get_mut(&channel)?.skips_next = true;
                None
            }
        }
    }

    /// What a session with these keys must change. Forgets the keys whose time has passed.
    pub(super) fn changes(&self, subscribed: &HashSet<Channels>) -> Changes {
        let now = Instant::now();
        let mut keys = self.keys.lock();
        keys.retain(|_, listened| listened.until > now);
        let mut added = Vec::new();
        for (channel, Listened { own_channel, .. }) in keys.iter() {
            let channels = Channels { channel: channel.clone(), own_channel: own_channel.clone() };
            if !subscribed.contains(&channels) {
                added.push(channels);
            }
        }
        let ended = subscribed.iter().filter(|channels| !keys.contains_key(&channels.channel)).cloned().collect();
        if added.len() > Self::MAX_ADDED {
            added.truncate(Self::MAX_ADDED);
            self.added.notify_one();
        }
        Changes { added, ended }
    }

    /// The event of a key that is subscribed: earlier messages are lost (I7).
    pub(super) fn subscribed(&self, channels: &Channels) -> Option<StoreEvent> {
        let mut keys = self.keys.lock();
        let listened = keys.get_mut(&channels.channel)?;
        listened.skips_next = false;
        Some(StoreEvent::Freed { key: listened.key.clone() })
    }

    /// Whether the refusal of a permission is the first one.
    pub(super) fn is_first_refusal(&self) -> bool {
        !self.warned_of_refusal.swap(true, Ordering::Relaxed)
    }
}
