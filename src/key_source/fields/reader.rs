//! Reads a request once for all its fields.

use std::borrow::Cow;

#[cfg(feature = "axum")]
use http::Method;
use http::{HeaderMap, request::Parts};
use smallvec::SmallVec;

use super::{
    canonical,
    field::{Field, Source},
};
use crate::{
    lock_key::{LockKey, writer::KeyWriter},
    rejection::field_error::{FieldError, FieldLocation, FieldProblem},
};

/// The texts of the fields of one request.
pub(super) struct FieldReader<'a> {
    fields: &'a [Field],
    /// In the order of the fields. Other names that a client sends use no memory.
    found: SmallVec<[FieldText<'a>; 4]>,
    /// The body was read.
    with_body: bool,
}

/// `None` until the field is found. Then its text, or its problem.
type FieldText<'a> = Option<Result<Cow<'a, str>, FieldProblem>>;

impl<'a> FieldReader<'a> {
    pub(super) fn new(fields: &'a [Field], with_body: bool) -> Self {
        Self { fields, found: fields.iter().map(|_| None).collect(), with_body }
    }

    /// Whether any field has this location.
    pub(super) fn has_field_at(&self, location: FieldLocation) -> bool {
        self.fields.iter().any(|field| field.is_at(location))
    }

    /// Whether any field has this location and name.
    #[cfg(feature = "axum")]
    pub(super) fn wants(&self, location: FieldLocation, name: &str) -> bool {
        self.fields.iter().any(|field| field.is_named(location, name))
    }

    pub(super) fn record(&mut self, location: FieldLocation, name: &str, text: &Result<Cow<'a, str>, FieldProblem>) {
        for (field, found) in self.fields.iter().zip(&mut self.found) {
            if field.is_named(location, name) {
                *found = Some(if found.is_some() { Err(FieldProblem::Duplicate) } else { text.clone() });
            }
        }
    }

    pub(super) fn read_head(&mut self, parts: &'a Parts) {
        if self.has_field_at(FieldLocation::Query) {
            self.read_pairs(FieldLocation::Query, parts.uri.query().unwrap_or_default().as_bytes());
        }
        self.read_headers(&parts.headers);
    }

    fn read_headers(&mut self, headers: &'a HeaderMap) {
        for (field, found) in self.fields.iter().zip(&mut self.found) {
            let Source::Text(FieldLocation::Header, name) = &field.0 else { continue };
            for value in headers.get_all(*name) {
                let text = value.to_str().map(Cow::Borrowed).map_err(|_| FieldProblem::NotText);
                *found = Some(if found.is_some() { Err(FieldProblem::Duplicate) } else { text });
            }
        }
    }

    fn read_pairs(&mut self, location: FieldLocation, pairs: &'a [u8]) {
        for (name, value) in form_urlencoded::parse(pairs) {
            self.record(location, &name, &Ok(value));
        }
    }

    #[cfg(feature = "axum")]
    pub(super) fn read_form(&mut self, parts: &'a Parts, body: &'a [u8]) {
        if self.has_field_at(FieldLocation::Form) {
            let form =
                if parts.method == Method::GET { parts.uri.query().unwrap_or_default().as_bytes() } else { body };
            self.read_pairs(FieldLocation::Form, form);
        }
    }

    #[cfg(feature = "axum")]
    /// Records a problem for all fields of a location.
    pub(super) fn record_all(&mut self, location: FieldLocation, problem: FieldProblem) {
        for (field, found) in self.fields.iter().zip(&mut self.found) {
            if field.is_at(location) {
                *found = Some(Err(problem));
            }
        }
    }

    /// The text of the first field as the client sent it, not in canonical form.
    pub(super) fn into_text(self) -> Result<Cow<'a, str>, FieldProblem> {
        self.found.into_iter().next().flatten().unwrap_or(Err(FieldProblem::Missing))
    }

    /// The key of all texts, or the first problem. Fields of the body are left out before the body
    /// is read.
    pub(super) fn into_key(self, namespace: &'static str, parts: &Parts) -> Result<LockKey, FieldError> {
        let mut key = KeyWriter::new(namespace);
        for (field, found) in self.fields.iter().zip(self.found) {
            match field.0 {
                _ if field.reads_body() && !self.with_body => {}
                Source::Text(location, name) => {
                    let text = found.unwrap_or(Err(FieldProblem::Missing)).and_then(canonical::canonicalize);
                    key.part(&text.map_err(|problem| FieldError { location, name, problem })?);
                }
                Source::Extension(name, write) => {
                    if !write(&parts.extensions, &mut key) {
                        return Err(FieldError {
                            location: FieldLocation::Extension,
                            name,
                            problem: FieldProblem::Missing,
                        });
                    }
                }
            }
        }
        Ok(LockKey::composed(&mut key))
    }
}
