//! A listing: the rows in the order of their keys.

use tokio_postgres::types::Type;

use super::{
    connection::Parameter,
    error::CallError,
    replies::{self, Listed},
    shared::Shared,
};
use crate::{
    limits::POSTGRES_LISTED_ROWS,
    store::{Cursor, ListReply, ListRequest},
};

impl Shared {
    /// One page. A cursor is the last key that was read.
    pub(super) async fn list(&self, request: &ListRequest) -> Result<ListReply, CallError> {
        let after = request.after.as_ref().map_or("", Cursor::as_str);
        if after.contains('\0') {
            return Err(CallError::InvalidKey);
        }
        let limit = i64::try_from(request.limit).unwrap_or(i64::MAX);
        let parameters: [Parameter<'_>; 4] = [
            (&after, Type::TEXT),
            (&limit, Type::INT8),
            (&POSTGRES_LISTED_ROWS, Type::INT8),
            (&request.contended_only, Type::BOOL),
        ];
        let deadline = self.server.timeouts.call_deadline();
        let mut page = ListReply::new(Vec::new(), None);
        for row in self.execute(&self.server.schema.list, &parameters, deadline).await? {
            match replies::listed(&row)? {
                Listed::Entry(entry) => page.entries.push(entry),
                Listed::Next(name) => page.next = Some(Cursor::new(name)),
            }
        }
        Ok(page)
    }
}
