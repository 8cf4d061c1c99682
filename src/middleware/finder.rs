//! Reads a request once for all the fields that are taken from it.

use std::borrow::Cow;

use http::{HeaderMap, request::Parts};
use smallvec::SmallVec;

use super::{field::Source, spelling};
use crate::{
    lock_key::{LockKey, writer::KeyWriter},
    rejection::field_error::{FieldError, FieldProblem, Place},
};

#[cfg(feature = "axum")]
pub(super) use self::with_axum::PathParams;

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
    fn looks_in(&self, place: Place) -> bool {
        self.sources.iter().any(|source| source.is_in(place))
    }

    /// The name under which it is looked for, if it is.
    fn wants(&self, place: Place, name: &str) -> Option<&'static str> {
        self.sources.iter().find_map(|source| source.is(place, name))
    }

    fn put(&mut self, place: Place, name: &str, text: &Result<Cow<'a, str>, FieldProblem>) {
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

    /// The key of what was found; else the first field of which there is none. Before the body is read, its fields are left out.
    pub(super) fn key(self, namespace: &'static str, parts: &Parts, with_body: bool) -> Result<LockKey, FieldError> {
        let mut key = KeyWriter::new(namespace);
        for (source, found) in self.sources.iter().zip(self.found) {
            match *source {
                _ if source.is_of_body() && !with_body => {}
                Source::Text(place, name) => {
                    let text = found.unwrap_or(Err(FieldProblem::Missing)).and_then(spelling::normal);
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

/// What only a router has matched, and what stands in a body.
#[cfg(feature = "axum")]
mod with_axum {
    use std::{borrow::Cow, fmt};

    use axum::extract::{FromRequestParts, RawPathParams, rejection::RawPathParamsRejection};
    use http::Method;
    use serde::{
        Deserializer,
        de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor},
    };
    use serde_json::{error::Category, value::RawValue};

    use super::{FieldProblem, Finder, Parts, Place, Source};

    /// Takes what is wanted from a JSON object.
    struct Object<'f, 'a>(&'f mut Finder<'a>);

    /// A name in a JSON object, if it is wanted.
    struct Name<'f, 'a>(&'f Finder<'a>);

    /// The parameters that a router has matched, if one of them is looked for.
    pub(in crate::middleware) struct PathParams(Option<Result<RawPathParams, RawPathParamsRejection>>);

    impl PathParams {
        pub(in crate::middleware) async fn of(sources: &[Source], parts: &mut Parts) -> Self {
            if sources.iter().any(|source| source.is_in(Place::Path)) {
                Self(Some(RawPathParams::from_request_parts(parts, &()).await))
            } else {
                Self(None)
            }
        }
    }

    impl<'a> Finder<'a> {
        pub(in crate::middleware) fn look_in_path(&mut self, params: &'a PathParams) {
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

        pub(in crate::middleware) fn look_in_body(&mut self, parts: &'a Parts, body: &'a [u8]) {
            if self.looks_in(Place::Form) {
                let form =
                    if parts.method == Method::GET { parts.uri.query().unwrap_or_default().as_bytes() } else { body };
                self.pairs(Place::Form, form);
            }
            if self.looks_in(Place::Json)
                && let Err(problem) = self.json(body)
            {
                self.put_all(Place::Json, problem);
            }
        }

        fn json(&mut self, body: &'a [u8]) -> Result<(), FieldProblem> {
            let mut json = serde_json::Deserializer::from_slice(body);
            json.deserialize_map(Object(self)).and_then(|()| json.end()).map_err(|error| match error.classify() {
                Category::Data => FieldProblem::NotAnObject,
                _ => FieldProblem::InvalidJson,
            })
        }

        /// None of these can be read.
        fn put_all(&mut self, place: Place, problem: FieldProblem) {
            for (source, found) in self.sources.iter().zip(&mut self.found) {
                if source.is_in(place) {
                    *found = Some(Err(problem));
                }
            }
        }
    }

    impl<'de> Visitor<'de> for Object<'_, 'de> {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
            while let Some(wanted) = map.next_key_seed(Name(self.0))? {
                match wanted {
                    None => drop(map.next_value::<IgnoredAny>()?),
                    Some(name) => {
                        let value = map.next_value::<&RawValue>()?;
                        self.0.put(Place::Json, name, &text_of(value.get()));
                    }
                }
            }
            Ok(())
        }
    }

    impl<'de> DeserializeSeed<'de> for Name<'_, '_> {
        type Value = Option<&'static str>;

        fn deserialize<D: Deserializer<'de>>(self, name: D) -> Result<Self::Value, D::Error> {
            name.deserialize_str(self)
        }
    }

    impl Visitor<'_> for Name<'_, '_> {
        type Value = Option<&'static str>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a name")
        }

        fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Self::Value, E> {
            Ok(self.0.wants(Place::Json, name))
        }
    }

    /// The text of a JSON value, from its spelling: what a parsed number has been, nobody can tell.
    fn text_of(json: &str) -> Result<Cow<'_, str>, FieldProblem> {
        match json.as_bytes() {
            [b'"', ..] if json.contains('\\') => {
                serde_json::from_str(json).map(Cow::Owned).map_err(|_| FieldProblem::InvalidJson)
            }
            [b'"', .., b'"'] => Ok(Cow::Borrowed(&json[1..json.len() - 1])),
            b"true" | b"false" => Ok(json.into()),
            b"-0" => Err(FieldProblem::WrongType),
            // JSON knows no plus and no zero in front.
            // From 2^53 on a float is several integers.
            _ if json.parse::<i64>().is_ok_and(|n| n.unsigned_abs() < 1 << 53) => Ok(json.into()),
            _ => Err(FieldProblem::WrongType),
        }
    }
}
