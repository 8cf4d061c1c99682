//! Reads a request once for all the fields that are taken from it.

use std::borrow::Cow;

#[cfg(feature = "axum")]
use http::Method;
use http::{HeaderMap, request::Parts};
use smallvec::SmallVec;

use super::{canonical, field::Source};
use crate::{
    lock_key::{LockKey, writer::KeyWriter},
    rejection::field_error::{FieldError, FieldProblem, Place},
};

/// The fields of one request, as they are found.
pub(super) struct Finder<'a> {
    sources: &'a [Source],
    /// In the order of the sources. A client that names many others costs no memory.
    found: SmallVec<[Found<'a>; 4]>,
}

/// What was found of a field. Nothing yet; its text, or why it has none.
type Found<'a> = Option<Result<Cow<'a, str>, FieldProblem>>;

impl<'a> Finder<'a> {
    pub(super) fn new(sources: &'a [Source]) -> Self {
        Self { sources, found: sources.iter().map(|_| None).collect() }
    }

    /// Whether a field of the request is there at all.
    pub(super) fn looks_in(&self, place: Place) -> bool {
        self.sources.iter().any(|source| source.is_in(place))
    }

    /// The name under which it is looked for, if it is.
    pub(super) fn wants(&self, place: Place, name: &str) -> Option<&'static str> {
        self.sources.iter().find_map(|source| source.is(place, name))
    }

    pub(super) fn put(&mut self, place: Place, name: &str, text: &Result<Cow<'a, str>, FieldProblem>) {
        for (source, found) in self.sources.iter().zip(&mut self.found) {
            if source.is(place, name).is_some() {
                *found = Some(if found.is_some() { Err(FieldProblem::Duplicate) } else { text.clone() });
            }
        }
    }

    pub(super) fn look_in_head(&mut self, parts: &'a Parts) {
        if self.looks_in(Place::Query) {
            self.pairs(Place::Query, parts.uri.query().unwrap_or_default().as_bytes());
        }
        self.headers(&parts.headers);
    }

    fn headers(&mut self, headers: &'a HeaderMap) {
        for (source, found) in self.sources.iter().zip(&mut self.found) {
            let Source::Text(Place::Header, name) = source else { continue };
            let mut values = headers.get_all(*name).iter();
            *found = match (values.next(), values.next()) {
                (None, _) => None,
                (Some(value), None) => Some(value.to_str().map(Cow::Borrowed).map_err(|_| FieldProblem::NotText)),
                (Some(_), Some(_)) => Some(Err(FieldProblem::Duplicate)),
            };
        }
    }

    fn pairs(&mut self, place: Place, pairs: &'a [u8]) {
        for (name, value) in form_urlencoded::parse(pairs) {
            if self.wants(place, &name).is_some() {
                self.put(place, &name, &Ok(value));
            }
        }
    }

    #[cfg(feature = "axum")]
    pub(super) fn look_in_form(&mut self, parts: &'a Parts, body: &'a [u8]) {
        if self.looks_in(Place::Form) {
            let form =
                if parts.method == Method::GET { parts.uri.query().unwrap_or_default().as_bytes() } else { body };
            self.pairs(Place::Form, form);
        }
    }

    #[cfg(feature = "axum")]
    /// None of these can be read.
    pub(super) fn put_all(&mut self, place: Place, problem: FieldProblem) {
        for (source, found) in self.sources.iter().zip(&mut self.found) {
            if source.is_in(place) {
                *found = Some(Err(problem));
            }
        }
    }

    /// The key of what was found; else the first field of which there is none. Before the body is read, its fields are left out.
    pub(super) fn key(self, namespace: &'static str, parts: &Parts, with_body: bool) -> Result<LockKey, FieldError> {
        let mut key = KeyWriter::new(namespace);
        for (source, found) in self.sources.iter().zip(self.found) {
            match *source {
                _ if source.is_of_body() && !with_body => {}
                Source::Text(place, name) => {
                    let text = found.unwrap_or(Err(FieldProblem::Missing)).and_then(canonical::normal);
                    key.part(&text.map_err(|problem| FieldError { place, name, problem })?);
                }
                Source::Extension(name, write) => {
                    if !write(&parts.extensions, &mut key) {
                        return Err(FieldError { place: Place::Extension, name, problem: FieldProblem::Missing });
                    }
                }
            }
        }
        Ok(key.finish())
    }
}
