//! The records that holders have left. Pure: time is an argument.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    limits::{MAX_MEMORY_RECORD_BYTES, MAX_MEMORY_RECORDS},
    lock_key::{KeyMap, LockKey},
    store::{DeleteRecordReply, NewRecord, Record},
};

/// The records by key. They use a bounded amount of memory.
#[derive(Debug, Default)]
pub(super) struct Records {
    by_key: KeyMap<Stored>,
    by_end: BTreeMap<End, LockKey>,
    with_body: BTreeSet<End>,
    head_bytes: usize,
    body_bytes: usize,
    inserted: u64,
}

#[derive(Debug)]
struct Stored {
    end: End,
    id: AcquisitionId,
    record: Record,
}

/// The end of a record, and the number of its insertion: the order in which memory is freed.
type End = (BootInstant, u64);

impl Records {
    /// The record of a key.
    pub(super) fn get(&self, key: &LockKey, now: BootInstant) -> Option<Record> {
        self.stored(key, now).map(|stored| stored.record.clone())
    }

    /// Whether this acquisition has left the record of the key.
    pub(super) fn is_of(&self, key: &LockKey, id: &AcquisitionId, now: BootInstant) -> bool {
        self.stored(key, now).is_some_and(|stored| stored.id == *id)
    }

    /// The remaining time of the record of a key.
    pub(super) fn left(&self, key: &LockKey, now: BootInstant) -> Option<Duration> {
        self.stored(key, now).map(|stored| stored.end.0.saturating_duration_since(now))
    }

    pub(super) fn delete(&mut self, key: &LockKey, now: BootInstant) -> DeleteRecordReply {
        let is_found = self.stored(key, now).is_some();
        self.remove(key);
        if is_found { DeleteRecordReply::Deleted } else { DeleteRecordReply::NotFound }
    }

    fn stored(&self, key: &LockKey, now: BootInstant) -> Option<&Stored> {
        self.by_key.get(key).filter(|stored| stored.end.0 > now)
    }

    pub(super) fn insert(&mut self, key: LockKey, id: AcquisitionId, new: &NewRecord, now: BootInstant) {
        self.remove(&key);
        self.inserted += 1;
        let end = (now.saturating_add(new.keep_for), self.inserted);
        if let Some(body) = &new.record.body {
            self.body_bytes += body.len();
            self.with_body.insert(end);
        }
        self.head_bytes += new.record.head.len();
        self.by_end.insert(end, key.clone());
        self.by_key.insert(key, Stored { end, id, record: new.record.clone() });
        self.free(now);
    }

    /// Whether a key without a record must not get one: an older record would be dropped for it,
    /// and its work would run again. The rest is for the work that is under way by then.
    pub(super) fn are_full_for(&mut self, key: &LockKey, now: BootInstant) -> bool {
        let is_near = |used: usize, max: usize| used >= max - max / 10;
        let is_full =
            is_near(self.by_key.len(), MAX_MEMORY_RECORDS) || is_near(self.head_bytes, MAX_MEMORY_RECORD_BYTES);
        if !is_full || self.stored(key, now).is_some() {
            return false;
        }
        self.free(now);
        is_near(self.by_key.len(), MAX_MEMORY_RECORDS) || is_near(self.head_bytes, MAX_MEMORY_RECORD_BYTES)
    }

    /// Removes expired records, then those beyond the bounds, the earliest end first.
    fn free(&mut self, now: BootInstant) {
        while let Some((&(end, _), key)) = self.by_end.first_key_value()
            && (end <= now || self.by_key.len() > MAX_MEMORY_RECORDS || self.head_bytes > MAX_MEMORY_RECORD_BYTES)
        {
            let key = key.clone();
            self.remove(&key);
        }
        while self.body_bytes > MAX_MEMORY_RECORD_BYTES
            && let Some(first) = self.with_body.pop_first()
        {
            let stored = self.by_end.get(&first).and_then(|key| self.by_key.get_mut(key));
            let body = stored.and_then(|stored| stored.record.body.take());
            self.body_bytes -= body.map_or(0, |body| body.len());
        }
    }

    fn remove(&mut self, key: &LockKey) {
        let Some(Stored { end, record, .. }) = self.by_key.remove(key) else { return };
        self.by_end.remove(&end);
        self.with_body.remove(&end);
        self.head_bytes -= record.head.len();
        self.body_bytes -= record.body.map_or(0, |body| body.len());
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::acquisition::AcquisitionIds;

    fn now() -> BootInstant {
        BootInstant::default()
    }

    fn key(n: usize) -> LockKey {
        LockKey::from(("once", n))
    }

    fn insert(records: &mut Records, n: usize, body: Option<Bytes>, keep_for: u64) -> AcquisitionId {
        let id = AcquisitionIds::new("p", records.inserted).next();
        let new = NewRecord { record: Record::new("head", body), keep_for: Duration::from_secs(keep_for) };
        records.insert(key(n), id.clone(), &new, now());
        id
    }

    #[test]
    fn record_lasts_until_its_end_and_is_of_its_writer() {
        let mut records = Records::default();
        let first = insert(&mut records, 1, None, 5);
        let second = insert(&mut records, 1, Some(Bytes::from("body")), 10);
        assert!(records.is_of(&key(1), &second, now()) && !records.is_of(&key(1), &first, now()), "it was replaced");
        let at = |seconds| now().saturating_add(Duration::from_secs(seconds));
        assert!(records.get(&key(1), at(9)).is_some_and(|record| record.body.is_some()));
        assert_eq!(records.get(&key(1), at(10)), None);
        assert!(!records.is_of(&key(1), &second, at(10)));
    }

    #[test]
    fn bodies_are_dropped_before_heads() {
        let mut records = Records::default();
        let quarter = Bytes::from(vec![0; MAX_MEMORY_RECORD_BYTES / 4]);
        for n in 0..6 {
            // The second one ends first.
            insert(&mut records, n, Some(quarter.clone()), if n == 1 { 50 } else { 100 });
        }
        let has_body = |n| records.get(&key(n), now()).map(|record| record.body.is_some());
        assert_eq!([0, 1, 2, 3, 4, 5].map(has_body), [false, false, true, true, true, true].map(Some));
        assert_eq!(records.body_bytes, MAX_MEMORY_RECORD_BYTES);
    }

    #[test]
    fn number_of_records_is_bounded_and_expired_ones_are_freed() {
        let mut records = Records::default();
        for n in 0..MAX_MEMORY_RECORDS + 2 {
            insert(&mut records, n, Some(Bytes::from_static(b"x")), 100);
        }
        assert_eq!((records.get(&key(1), now()), records.by_key.len()), (None, MAX_MEMORY_RECORDS));
        assert!(records.get(&key(2), now()).is_some());
        let later = now().saturating_add(Duration::from_secs(100));
        records.free(later);
        let Records { by_key, by_end, with_body, body_bytes, .. } = &records;
        assert_eq!((by_key.len(), by_end.len(), with_body.len(), *body_bytes), (0, 0, 0, 0));
    }

    #[test]
    fn heads_are_bounded() {
        let mut records = Records::default();
        let head = vec![0; MAX_MEMORY_RECORD_BYTES / 4];
        for n in 0..5 {
            let id = AcquisitionIds::new("p", 1).next();
            let record = Record::new(head.clone(), None);
            let new = NewRecord { record, keep_for: Duration::from_secs(60 - n as u64) };
            records.insert(key(n), id, &new, now());
        }
        assert_eq!((records.by_key.len(), records.head_bytes), (4, MAX_MEMORY_RECORD_BYTES));
        assert!(records.get(&key(4), now()).is_none(), "it ends first");
        for n in 0..4 {
            records.remove(&key(n));
        }
        assert_eq!(records.head_bytes, 0);
    }
}
