//! What of a JSON schema the grammar's library gets wrong or cannot bound, looked for before a grammar is made.
//!
//! It computes with doubles, takes a member that is written twice for two, needs time exponential in the number of patterns that
//! one string must all match, quadratic in the number of an object's optional properties, a state for each remainder of a
//! `multipleOf`, and stack for each member of a list: 10,000 required properties end the process.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Number, Value};

use crate::constraint::{ConstraintError, fits, length};
use crate::{finite, numbers, refs};

/// Most patterns and formats of one string: 8 take 1 ms, 12 take 16, 16 take 2 s, 20 more than a minute.
const MOST_PATTERNS: usize = 8;
/// Most schemas inside of one request's, each `$ref`'s counted once: 2,000 optional strings take 0.3 s, 5,000 of them 1.5 s.
const MOST_PARTS: usize = 2000;
/// Greatest least common multiple of a schema's `multipleOf`s, in units of their last decimal.
const MOST_MULTIPLE: u64 = 100_000;
/// Most remainders of it, of which each takes a state and all are reached by a few digits: those of 20,011 take the engine 0.1 s, of
/// 99,991 0.7 s. What 2 and 5 divide is seen in the last digits alone.
const MOST_REMAINDERS: u64 = 20_000;
/// Keywords whose values are schemas by names of the client's own.
const BY_NAME: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Those of them that hold nothing to follow unless it is referred to.
pub(crate) const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// Keywords whose values are no schemas.
const VALUES: [&str; 5] = ["const", "enum", "default", "examples", "x-guidance"];

/// The schema as it is given to the library: bounds that no double is are replaced by narrower ones.
///
/// # Errors
/// A keyword that would not be enforced, or not in bounded time; too many bytes.
pub(crate) fn fit(schema: &Value) -> Result<Value, ConstraintError> {
    // Before anything is made of it: a body may have 64 times as much.
    fits(length(schema))?;
    let mut fitted = schema.clone();
    refs::resolve(&mut fitted)?;
    few_parts(parts(&fitted))?;
    check(&fitted)?;
    finite::only(&mut fitted)?;
    numbers::narrow(&mut fitted)?;
    let mut patterns = Patterns { root: &fitted, of_refs: HashMap::new() };
    if patterns.of(&fitted) > MOST_PATTERNS {
        return refused(format!(
            "more than {MOST_PATTERNS} patterns and formats for one value are not enforced on this server"
        ));
    }
    let mut multiples = Vec::new();
    collect_multiples(&fitted, &mut multiples);
    let bounded = |common| common <= MOST_MULTIPLE && without(5, without(2, common)) <= MOST_REMAINDERS;
    if !common_multiple(&multiples).is_some_and(bounded) {
        return refused(format!(
            "`multipleOf`s whose least common multiple is beyond {MOST_MULTIPLE} (counted in their last decimal), or \
             {MOST_REMAINDERS} without its factors 2 and 5, are not enforced on this server"
        ));
    }
    Ok(fitted)
}

/// Counts the schemas that a value could have to follow, with `schema` itself, and what else takes as long: names that are `required`
/// only (100,000 of them took 90 s), and pairs of `patternProperties`, each of which is shown to have no name in common.
pub(crate) fn parts(schema: &Value) -> usize {
    let (mut seen, mut open, mut count) = (HashSet::new(), vec![schema], 0);
    // Not by recursion: one definition may refer to the next a thousand times.
    while let Some(part) = open.pop() {
        let len = |key| {
            part.get(key)
                .map_or(0, |list: &Value| list.as_array().map_or(0, Vec::len).max(list.as_object().map_or(0, Map::len)))
        };
        count += 1 + len("required").saturating_sub(len("properties")) + len("patternProperties").saturating_pow(2);
        open.extend(followed(part).map(|(_, s)| s));
        if let Some(at) = part.get("$ref").and_then(Value::as_str)
            && seen.insert(at)
        {
            open.extend(at.strip_prefix('#').and_then(|at| schema.pointer(at)));
        }
    }
    count
}

/// # Errors
/// A request has too many schemas.
pub(crate) fn few_parts(parts: usize) -> Result<(), ConstraintError> {
    if parts <= MOST_PARTS {
        return Ok(());
    }
    refused(format!(
        "more than {MOST_PARTS} properties and other parts of one request's schemas are not enforced on this server"
    ))
}

fn collect_multiples<'a>(schema: &'a Value, found: &mut Vec<&'a Number>) {
    found.extend(schema.get("multipleOf").and_then(Value::as_number));
    inside(schema).for_each(|(_, part)| collect_multiples(part, found));
}

/// `n` as often divided by `factor` as it can be.
fn without(factor: u64, mut n: u64) -> u64 {
    while n > 0 && n.is_multiple_of(factor) {
        n /= factor;
    }
    n
}

/// The least common multiple of decimal numbers, in units of their last decimal; `None` where one has too many digits. Those that are no
/// multiples of anything are left to the grammar's library.
fn common_multiple(numbers: &[&Number]) -> Option<u64> {
    let mut decimals = Vec::with_capacity(numbers.len());
    for n in numbers.iter().filter(|n| n.as_f64().is_some_and(|n| n != 0.0)) {
        // The library takes no notice of a sign.
        let text = n.to_string().replace('-', "");
        let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
        let fraction = fraction.trim_end_matches('0');
        // An exponent is no digit.
        decimals.push((format!("{whole}{fraction}").parse::<u64>().ok()?, u32::try_from(fraction.len()).ok()?));
    }
    let last = decimals.iter().map(|(_, places)| *places).max().unwrap_or(0);
    decimals.iter().try_fold(1_u64, |common, (digits, places)| {
        let next = 10_u64.checked_pow(last - places)?.checked_mul(*digits)?;
        let (mut a, mut b) = (common, next);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        (common / a).checked_mul(next)
    })
}

pub(crate) fn refused<T>(why: impl Into<String>) -> Result<T, ConstraintError> {
    Err(ConstraintError(why.into()))
}

/// The schemas directly inside of this one, with the keyword that they are of.
pub(crate) fn inside(schema: &Value) -> impl Iterator<Item = (&str, &Value)> {
    schema.as_object().into_iter().flatten().filter(|(key, _)| !VALUES.contains(&key.as_str())).flat_map(
        |(key, value)| {
            let (by_name, listed) = match value {
                Value::Object(named) if BY_NAME.contains(&key.as_str()) => (Some(named.values()), None),
                Value::Array(list) => (None, Some(list.iter())),
                _ => (None, None),
            };
            let alone = (by_name.is_none() && listed.is_none()).then_some(value);
            by_name
                .into_iter()
                .flatten()
                .chain(listed.into_iter().flatten())
                .chain(alone)
                .map(move |s| (key.as_str(), s))
        },
    )
}

/// Those of them that a value could have to follow: definitions only where something refers to them.
fn followed(schema: &Value) -> impl Iterator<Item = (&str, &Value)> {
    inside(schema).filter(|(key, s)| !DEFINITIONS.contains(key) && (s.is_object() || s.is_boolean()))
}

/// [`inside`], to be changed.
pub(crate) fn inside_mut(schema: &mut Map<String, Value>) -> impl Iterator<Item = &mut Value> {
    let mut parts = Vec::new();
    for (key, value) in schema.iter_mut().filter(|(key, _)| !VALUES.contains(&key.as_str())) {
        if value.is_object() && BY_NAME.contains(&key.as_str()) {
            parts.extend(value.as_object_mut().into_iter().flat_map(Map::values_mut));
        } else if value.is_array() {
            parts.extend(value.as_array_mut().into_iter().flatten());
        } else {
            parts.push(value);
        }
    }
    parts.into_iter()
}

fn check(schema: &Value) -> Result<(), ConstraintError> {
    let Value::Object(object) = schema else { return Ok(()) };
    repeated_members(object)?;
    for key in ["const", "enum"] {
        object.get(key).map_or(Ok(()), |value| exact(key, value))?;
    }
    inside(schema).try_for_each(|(_, part)| check(part))
}

/// Members with names that are not listed may be written twice: then they are one, and too few.
fn repeated_members(schema: &Map<String, Value>) -> Result<(), ConstraintError> {
    let least = schema.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let required = schema.get("required").and_then(Value::as_array).map_or(0, Vec::len);
    if usize::try_from(least).is_ok_and(|least| least <= required + 1) {
        return Ok(());
    }
    let most = required + 1;
    refused(format!(
        "`minProperties` is only enforced up to the number of `required` ones and one more ({most}) on this server"
    ))
}

/// Whether numbers that an answer must spell out are spelled out as they are.
fn exact(key: &str, value: &Value) -> Result<(), ConstraintError> {
    match value {
        Value::Number(n) if n.as_f64().is_none_or(|n| n.abs() >= 9_007_199_254_740_992.0) => {
            refused(format!("numbers of 2^53 and more in `{key}` ({n}) are not enforced on this server; use strings"))
        }
        Value::Array(list) => list.iter().try_for_each(|v| exact(key, v)),
        Value::Object(object) => object.values().try_for_each(|v| exact(key, v)),
        _ => Ok(()),
    }
}

/// Counts the patterns that a string may have to match all of, wherever in the schema: those of all schemas that are joined by
/// `allOf`, also of one property of theirs. It errs to the side of too many. It recurses, and goes only where [`parts`] counted: along
/// a chain of references it gets [`MOST_PARTS`] deep and no deeper.
struct Patterns<'a> {
    root: &'a Value,
    of_refs: HashMap<&'a str, usize>,
}

impl<'a> Patterns<'a> {
    fn of(&mut self, schema: &'a Value) -> usize {
        let own = ["pattern", "format"].iter().filter(|k| schema.get(k).is_some_and(Value::is_string)).count();
        let (mut joined, mut either) = (own, 0);
        for (key, part) in followed(schema) {
            let of_part = self.of(part);
            if key == "allOf" { joined = joined.saturating_add(of_part) } else { either = either.max(of_part) }
        }
        if let Some(at) = schema.get("$ref").and_then(Value::as_str) {
            joined = joined.saturating_add(self.of_ref(at));
        }
        joined.saturating_add(either)
    }

    fn of_ref(&mut self, at: &'a str) -> usize {
        if let Some(known) = self.of_refs.get(at) {
            return *known;
        }
        // What refers to itself adds nothing to itself.
        self.of_refs.insert(at, 0);
        let found = at.strip_prefix('#').and_then(|at| self.root.pointer(at)).map_or(0, |s| self.of(s));
        self.of_refs.insert(at, found);
        found
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::numbers::MOST;

    #[test]
    fn numbers_that_no_double_is_are_refused_or_bounded_more_narrowly() {
        for refused in [
            json!({"const": 9_007_199_254_740_993_i64}),
            json!({"properties": {"id": {"enum": [1, {"a": [u64::MAX]}]}}}),
            json!({"anyOf": [{"minimum": 9_007_199_254_740_993_i64}]}),
            json!({"items": {"exclusiveMaximum": i64::MIN}}),
        ] {
            assert!(fit(&refused).unwrap_err().0.contains("2^53"), "{refused}");
        }
        let whole = json!({"minimum": i64::MIN, "maximum": u64::MAX, "default": u64::MAX});
        assert_eq!(fit(&whole).unwrap(), json!({"minimum": -MOST, "maximum": MOST, "default": u64::MAX}));
        // Names of properties are no keywords.
        let names = json!({"properties": {"const": {"type": "integer"}, "maximum": {"maximum": 3.5}}});
        assert_eq!(fit(&names).unwrap(), names);
    }

    #[test]
    fn remainders_are_bounded() {
        for (multiples, fits) in [
            (vec![json!(0.01), json!(5), json!(0.25)], true),
            (vec![json!(100_000)], true),
            (vec![json!(1_000_003)], false),
            (vec![json!(99_991)], false),
            (vec![json!(19_997)], true),
            (vec![json!(-421_224)], false),
            (vec![json!(-0.25)], true),
            // 62,710,561 together.
            (vec![json!(7919), json!(7907)], false),
            (vec![json!(0.001), json!(7919)], false),
            (vec![json!(1e-30)], false),
            (vec![json!(u64::MAX), json!(3)], false),
        ] {
            let schema = json!({"allOf": multiples.iter().map(|m| json!({"multipleOf": m})).collect::<Vec<_>>()});
            assert_eq!(fit(&schema).is_ok(), fits, "{schema}");
        }
        assert!(fit(&json!({"properties": {"multipleOf": {"type": "integer"}}})).is_ok());
    }

    #[test]
    fn members_that_may_repeat_are_not_counted_on() {
        for (schema, fits) in [
            (json!({"minProperties": 1}), true),
            (json!({"minProperties": 2}), false),
            (json!({"minProperties": 2, "required": ["a"]}), true),
            (json!({"items": {"minProperties": 4, "required": ["a", "b"]}}), false),
            (json!({"properties": {"minProperties": {"const": 1}}}), true),
        ] {
            assert_eq!(fit(&schema).is_ok(), fits, "{schema}");
        }
    }

    #[test]
    fn patterns_of_one_string_are_bounded_however_they_meet() {
        let pattern = |i: usize| json!({"type": "string", "pattern": format!(".*{i}.*")});
        let of =
            |n: usize, wrap: fn(Value) -> Value| json!({"allOf": (0..n).map(|i| wrap(pattern(i))).collect::<Vec<_>>()});
        let wraps: [fn(Value) -> Value; 3] =
            [|s| s, |s| json!({"properties": {"a": s}}), |s| json!({"anyOf": [s, {"format": "date"}]})];
        for wrap in wraps {
            assert!(fit(&of(MOST_PATTERNS, wrap)).is_ok());
            assert!(fit(&of(MOST_PATTERNS + 1, wrap)).is_err());
        }
        // Each refers to the one before it twice.
        let mut defs = Map::from_iter([("d0".to_owned(), pattern(0))]);
        for i in 1..60 {
            let below = json!({"$ref": format!("#/$defs/d{}", i - 1)});
            defs.insert(format!("d{i}"), json!({"allOf": [below, below]}));
        }
        assert!(fit(&json!({"$ref": "#/$defs/d59", "$defs": defs})).is_err());
        let list = json!({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, pattern(1)]}}});
        assert!(fit(&list).is_ok());
        // What nothing refers to is not met at all.
        let unused =
            (0..99).map(|i| (format!("d{i}"), json!({"allOf": [pattern(i), {"$ref": format!("#/$defs/d{}", i + 1)}]})));
        assert!(fit(&json!({"$defs": unused.collect::<Map<_, _>>()})).is_ok());
        // Side by side they never meet.
        let apart = json!({"properties": (0..99).map(|i| (format!("p{i}"), pattern(i))).collect::<Map<_, _>>()});
        assert!(fit(&apart).is_ok());
    }

    /// `n` definitions, each of which refers to the next one below `nested` other schemas.
    fn chain(n: usize, nested: usize) -> Map<String, Value> {
        let next = |i: usize| {
            let to = json!({"$ref": format!("#/$defs/d{}", i + 1)});
            (format!("d{i}"), (0..nested).fold(to, |s, _| json!({"not": s})))
        };
        (0..n).map(next).chain([(format!("d{n}"), json!(true))]).collect()
    }

    #[test]
    fn chains_of_references_take_no_stack_by_their_length() {
        // As many as there is room for, on a stack that takes no more than a few hundred of them.
        let small = |schema: Value| {
            let thread = std::thread::Builder::new().stack_size(512 << 10);
            thread.spawn(move || fit(&schema).map(|_| ())).unwrap().join().unwrap()
        };
        for (n, nested) in [(25_000, 0), (7000, 10), (1300, 60)] {
            let unused = json!({"type": "object", "$defs": chain(n, nested)});
            assert_eq!(small(unused), Ok(()), "{n} links");
            let used = json!({"$ref": "#/$defs/d0", "$defs": chain(n, nested)});
            assert!(small(used).unwrap_err().0.contains("more than 2000"), "{n} links");
        }
        // What is followed is so few that a thread's own stack is enough.
        assert_eq!(fit(&json!({"$ref": "#/$defs/d0", "$defs": chain(1998, 0)})).map(|_| ()), Ok(()));
        assert_eq!(fit(&json!({"$ref": "#/$defs/d0", "$defs": chain(32, 60)})).map(|_| ()), Ok(()));
    }

    #[test]
    fn a_schema_of_too_many_bytes_is_refused_before_it_is_looked_at() {
        // 19 MB, which would be followed into 500,000 calls.
        let long = json!({"type": "object", "$defs": chain(500_000, 0)});
        let bytes = long.to_string().len();
        let why = fit(&long).unwrap_err().0;
        assert!(why.contains(&format!("{bytes} bytes")) && why.contains("at most 1048576"), "{why}");
    }
}
