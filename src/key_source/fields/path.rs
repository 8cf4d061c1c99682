//! Parameters of the path that an Axum router has matched.

use axum::extract::{FromRequestParts, RawPathParams, rejection::RawPathParamsRejection};
use http::request::Parts;

use super::{field::Source, reader::Finder};
use crate::rejection::field_error::{FieldProblem, Place};

/// The parameters that a router has matched, if one of them is looked for.
pub(crate) struct PathParams(Option<Result<RawPathParams, RawPathParamsRejection>>);

impl PathParams {
    pub(crate) async fn of(sources: &[Source], parts: &mut Parts) -> Self {
        if sources.iter().any(|source| source.is_in(Place::Path)) {
            Self(Some(RawPathParams::from_request_parts(parts, &()).await))
        } else {
            Self(None)
        }
    }
}

impl<'a> Finder<'a> {
    pub(crate) fn look_in_path(&mut self, params: &'a PathParams) {
        match &params.0 {
            Some(Ok(params)) => {
                for (name, value) in params {
                    self.put(Place::Path, name, &Ok(value.into()));
                }
            }
            Some(Err(RawPathParamsRejection::InvalidUtf8InPathParam(_))) => {
                self.put_all(Place::Path, FieldProblem::NotText);
            }
            // Without a router nothing is there.
            Some(Err(_)) | None => {}
        }
    }
}
