//! Fields of a JSON object in the body of a request.

use std::{borrow::Cow, fmt};

use serde::{
    Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor},
};
use serde_json::{error::Category, value::RawValue};

use super::reader::Finder;
use crate::rejection::field_error::{FieldProblem, Place};

/// Takes what is wanted from a JSON object.
struct Object<'f, 'a>(&'f mut Finder<'a>);

/// A name in a JSON object, if it is wanted.
struct Name<'f, 'a>(&'f Finder<'a>);

impl<'a> Finder<'a> {
    pub(super) fn look_in_json(&mut self, body: &'a [u8]) {
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
