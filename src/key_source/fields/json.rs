//! Fields of a JSON object in the body of a request.

use std::{borrow::Cow, fmt};

use serde::{
    Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor},
};
use serde_json::{error::Category, value::RawValue};

use super::reader::FieldReader;
use crate::rejection::field_error::{FieldLocation, FieldProblem};

/// Reads the fields of a JSON object.
struct ObjectVisitor<'f, 'a>(&'f mut FieldReader<'a>);

/// Recognizes the name of a field.
struct NameSeed<'f, 'a>(&'f FieldReader<'a>);

impl<'a> FieldReader<'a> {
    pub(super) fn read_json(&mut self, body: &'a [u8]) {
        if self.has_field_at(FieldLocation::Json)
            && let Err(problem) = self.parse_json(body)
        {
            self.record_all(FieldLocation::Json, problem);
        }
    }

    fn parse_json(&mut self, body: &'a [u8]) -> Result<(), FieldProblem> {
        let mut json = serde_json::Deserializer::from_slice(body);
        json.deserialize_map(ObjectVisitor(self)).and_then(|()| json.end()).map_err(|error| match error.classify() {
            Category::Data => FieldProblem::NotAnObject,
            _ => FieldProblem::InvalidJson,
        })
    }
}

impl<'de> Visitor<'de> for ObjectVisitor<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(wanted) = map.next_key_seed(NameSeed(self.0))? {
            match wanted {
                None => drop(map.next_value::<IgnoredAny>()?),
                Some(name) => {
                    let value = map.next_value::<&RawValue>()?;
                    self.0.record(FieldLocation::Json, name, &value_text(value.get()));
                }
            }
        }
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for NameSeed<'_, '_> {
    type Value = Option<&'static str>;

    fn deserialize<D: Deserializer<'de>>(self, name: D) -> Result<Self::Value, D::Error> {
        name.deserialize_str(self)
    }
}

impl Visitor<'_> for NameSeed<'_, '_> {
    type Value = Option<&'static str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Self::Value, E> {
        Ok(self.0.wanted_name(FieldLocation::Json, name))
    }
}

/// The text of a JSON value. It is taken from the source, because a parsed number has lost its
/// form.
fn value_text(json: &str) -> Result<Cow<'_, str>, FieldProblem> {
    match json.as_bytes() {
        [b'"', ..] if json.contains('\\') => {
            serde_json::from_str(json).map(Cow::Owned).map_err(|_| FieldProblem::InvalidJson)
        }
        [b'"', .., b'"'] => Ok(Cow::Borrowed(&json[1..json.len() - 1])),
        b"true" | b"false" => Ok(json.into()),
        b"-0" => Err(FieldProblem::WrongType),
        // JSON allows no leading plus or zero. From 2^53 on, one float stands for several integers.
        _ if json.parse::<i64>().is_ok_and(|n| n.unsigned_abs() < 1 << 53) => Ok(json.into()),
        _ => Err(FieldProblem::WrongType),
    }
}
