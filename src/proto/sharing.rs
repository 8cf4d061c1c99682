//! With how many others a request holds its key.

use crate::{
    acquisition::{AcquisitionId, AcquisitionIds},
    limits::MAX_HOLDERS,
};

/// How a request holds its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// Alone.
    #[default]
    Alone,
    /// Alone, until a newer request of this kind replaces it.
    Newest,
    /// As one of this number of holders, which is above one. Each has a grant of its own.
    Permit(u16),
    /// Together with other readers. Those of one process share a grant.
    Reader,
}

impl Sharing {
    /// The sharing of one of `limit` permits.
    pub const fn permit(limit: u16) -> Self {
        if limit > 1 { Self::Permit(limit) } else { Self::Alone }
    }

    /// How many may hold the key, this request included.
    pub const fn max_holders(self) -> u16 {
        match self {
            Self::Alone | Self::Newest => 1,
            Self::Permit(limit) => limit,
            Self::Reader => MAX_HOLDERS,
        }
    }

    pub(super) fn is_alone(self) -> bool {
        self == Self::Alone
    }

    /// The id of an acquisition for this request.
    pub(super) fn next_id(self, ids: &AcquisitionIds) -> AcquisitionId {
        if self == Self::Newest { ids.next_replaceable() } else { ids.next_share(self.max_holders()) }
    }

    /// Whether that id is for a request of this kind. Its kind is a part of the id.
    pub(super) fn is_of(self, id: &AcquisitionId) -> bool {
        self.max_holders() == id.max_holders() && (self == Self::Newest) == id.is_replaceable()
    }
}
