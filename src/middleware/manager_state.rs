use std::sync::Arc;

use super::disconnect::DetachedHandlers;
use crate::{body::budget::BodyBudget, lock::Driver};

/// The state of the HTTP side that all layers of one manager share.
#[derive(Debug)]
pub(super) struct ManagerState {
    pub(super) body_budget: Arc<BodyBudget>,
    pub(super) detached: Arc<DetachedHandlers>,
}

impl ManagerState {
    pub(super) fn of(driver: &Driver) -> &Self {
        driver.extension(|| Self {
            body_budget: Arc::default(),
            detached: Arc::new(DetachedHandlers::new(driver.max_detached)),
        })
    }
}
