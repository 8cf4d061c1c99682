//! Asks a store for everything that the contract of [`LockStore`] promises.
