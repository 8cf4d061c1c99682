//! Fields of a JSON object in the body of a request.

use std::{borrow::Cow, fmt};

use serde::{
    Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::{error::Category, value::RawValue};

use super::reader::FieldReader;
use crate::rejection::field_error::{FieldLocation, FieldProblem};

/// Reads the fields of a JSON object.
struct ObjectVisitor<'f, 'a>(&'f mut FieldReader<'a>);

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
        let object = json.deserialize_map(ObjectVisitor(self)).and_then(|object| json.end().map(|()| object));
        object.map_err(|error| match error.classify() {
            Category::Data => FieldProblem::NotAnObject,
            _ => FieldProblem::InvalidJson,
        })?
    }
}

impl<'de> Visitor<'de> for ObjectVisitor<'_, 'de> {
    type Value = Result<(), FieldProblem>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while let Some(name) = map.next_key::<&RawValue>()? {
            let Ok(name) = value_text(name.get()) else { return Ok(Err(FieldProblem::InvalidJson)) };
            if self.0.wants(FieldLocation::Json, &name) {
                let value = map.next_value::<&RawValue>()?;
                self.0.record(FieldLocation::Json, &name, &value_text(value.get()));
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(Ok(()))
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
