//! The bytes of a body while it is read.

use bytes::{Bytes, BytesMut};

/// The bytes of a body while it is read.
#[derive(Debug)]
pub(super) enum BodyBuffer {
    /// The usual case, without a copy.
    SingleFrame(Bytes),
    /// Copied at once: a frame of one byte may keep a whole buffer of its connection alive.
    Copied(BytesMut),
}

impl Default for BodyBuffer {
    fn default() -> Self {
        Self::SingleFrame(Bytes::new())
    }
}

impl BodyBuffer {
    pub(super) fn push(&mut self, frame: Bytes) {
        match self {
            Self::SingleFrame(first) if first.is_empty() => *first = frame,
            Self::SingleFrame(first) => {
                let mut all = BytesMut::with_capacity(first.len() + frame.len());
                all.extend_from_slice(first);
                all.extend_from_slice(&frame);
                *self = Self::Copied(all);
            }
            Self::Copied(all) => all.extend_from_slice(&frame),
        }
    }

    pub(super) fn into_bytes(self) -> Bytes {
        match self {
            Self::SingleFrame(bytes) => bytes,
            Self::Copied(all) => all.freeze(),
        }
    }
}
