use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::defaults::BODIES_BYTES;

/// What is kept in memory for those who wait has a bound (I11): one for all clones of a handle.
#[derive(Debug)]
pub(crate) struct Room {
    left: AtomicU64,
}

/// What one of them takes up; dropped, there is room again.
#[derive(Debug)]
pub(crate) struct Share {
    room: Arc<Room>,
    bytes: u64,
}

/// It does not fit.
#[derive(Debug)]
pub(crate) struct NoRoom;

impl Room {
    /// So much could be taken now.
    pub(crate) fn left(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    /// A share of nothing yet.
    pub(crate) fn share(self: &Arc<Self>) -> Share {
        Share { room: Arc::clone(self), bytes: 0 }
    }
}

impl Default for Room {
    fn default() -> Self {
        Self { left: AtomicU64::new(BODIES_BYTES) }
    }
}

impl Share {
    /// Takes up so much more, or nothing.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), NoRoom> {
        let bytes = bytes as u64;
        let less = |left: u64| left.checked_sub(bytes);
        // A count and nothing else: no memory hangs on its order.
        self.room.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).map_err(|_| NoRoom)?;
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.room.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_takes_nothing_and_what_is_dropped_makes_room() {
        let room = Arc::new(Room { left: AtomicU64::new(10) });
        let (mut one, mut other) = (room.share(), room.share());
        one.grow(6).expect("fits");
        other.grow(5).expect_err("one too many");
        assert_eq!(room.left(), 4, "a part of it is not taken");
        other.grow(4).expect("just fits");
        other.grow(0).expect("nothing always fits");
        other.grow(1).expect_err("full");
        drop(one);
        assert_eq!(room.left(), 6);
        other.grow(6).expect("fits again");
        drop(other);
        assert_eq!(room.left(), 10);
    }
}
