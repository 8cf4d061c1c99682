//! Parameters of the path that an Axum router has matched.

use axum::extract::{FromRequestParts, RawPathParams, rejection::RawPathParamsRejection};
use http::request::Parts;

use super::{field::Field, reader::FieldReader};
use crate::rejection::field_error::{FieldLocation, FieldProblem};

/// The parameters of the matched route, if a field needs one.
pub(super) type PathParams = Option<Result<RawPathParams, RawPathParamsRejection>>;

pub(super) async fn path_params(fields: &[Field], parts: &mut Parts) -> PathParams {
    let needs_one = fields.iter().any(|field| field.is_at(FieldLocation::Path));
    if needs_one { Some(RawPathParams::from_request_parts(parts, &()).await) } else { None }
}

impl<'a> FieldReader<'a> {
    pub(super) fn read_path(&mut self, params: &'a PathParams) {
        match params {
            Some(Ok(params)) => {
                for (name, value) in params {
                    self.record(FieldLocation::Path, name, &Ok(value.into()));
                }
            }
            Some(Err(RawPathParamsRejection::InvalidUtf8InPathParam(_))) => {
                self.record_all(FieldLocation::Path, FieldProblem::NotText);
            }
            // Without a router there are no parameters.
            Some(Err(_)) | None => {}
        }
    }
}
