//! Locks without HTTP: the handle, the line in this process, the guard.
//!
//! Nothing here knows a request, a status or a backend.
//!
//! # Invariants
//!
//! Numbered, and cited where the code serves them.
//!
//! - **I1** A key is freed or handed on only for the acquisition that holds it.
//! - **I2** Nothing is asked of the store without a way back.
//! - **I3** A local deadline counts from before the request that was granted was sent, minus drift.
//! - **I4** "Held" is claimed only before that deadline, and only the store's word moves it.
//! - **I5** Lost fires at the deadline at the latest, whether the store answers or not; it never un-fires.
//! - **I6** The deadline is compared before every poll of what runs under the lock.
//! - **I8** An acquisition whose outcome is unknown is given back. A dropped store call is not a cancelled one.
//! - **I9** Each grant is given back exactly once. `Drop` never waits, fails or panics.
//! - **I11** No mutex is held over an await; every queue, table and wait has a bound.
//!
//! (I7 and I10 belong to messages and the lock-delay, which are not built yet.)

// In the order in which a newcomer reads them: from the handle to the guard, then what both say.
mod locks;
mod call;
mod acquire;
mod table;
mod turn;
mod way_back;
mod hold;
mod watchdog;
mod guard;
mod held;
mod policy;
mod error;

pub(crate) use self::{acquire::acquire, policy::policy_setters};
pub use self::{
    call::LockCall,
    error::{LockError, LockLost},
    guard::LockGuard,
    held::HeldLock,
    locks::Locks,
    policy::{KeyInLogs, Policy},
};
