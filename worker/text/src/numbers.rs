//! Bounds of numbers, in a form that the grammar's library keeps.
//!
//! It computes them as doubles and their whole parts as 64 bits. A bound that is whole and exclusive is let through by it where the
//! other one is less than 1 away: of numbers between 9 and 9.5 it takes 9 for one.

use serde_json::{Map, Value, json};

use crate::constraint::ConstraintError;
use crate::schema::{inside, inside_mut, refused};

/// Up to here all integers are doubles.
pub(crate) const MOST: i64 = 1 << 53;
const MOST_DOUBLE: f64 = 9_007_199_254_740_992.0;
/// What stands for the neighbour of 0, whose own 324 decimals no answer has; at least, see [`beside_zero`].
const BESIDE_ZERO: f64 = 1e-15;
/// Bounds so close to 0 leave no room for that.
const TOO_CLOSE: f64 = 1e-290;

/// The keywords of bounds, from below (-1) and above (1), with those that make them exclusive.
const BOUNDS: [(&str, &str, i64); 2] = [("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1)];

/// Replaces bounds that would not be kept by others that no double lies between; those beyond 2^53 by 2^53.
///
/// # Errors
/// A bound that leaves only numbers beyond 2^53; two bounds too close to 0.
pub(crate) fn narrow(schema: &mut Value) -> Result<(), ConstraintError> {
    within(schema)?;
    let (mut lower, mut upper) = (Vec::new(), Vec::new());
    collect(schema, &mut lower, &mut upper);
    lower.sort_by(f64::total_cmp);
    upper.sort_by(f64::total_cmp);
    open(schema, &lower, &upper)
}

/// Brings all bounds to 2^53.
fn within(schema: &mut Value) -> Result<(), ConstraintError> {
    let Value::Object(object) = schema else { return Ok(()) };
    for (inclusive, exclusive, side) in BOUNDS {
        for key in [inclusive, exclusive] {
            if let Some(value) = object.get_mut(key) {
                bound(key, value, side)?;
            }
        }
    }
    inside_mut(object).try_for_each(within)
}

/// A bound from above (1) or below (-1).
fn bound(key: &str, value: &mut Value, side: i64) -> Result<(), ConstraintError> {
    let Value::Number(n) = &*value else { return Ok(()) };
    // Below 0 integers fit; what does not is beyond the limit in any case.
    let beyond = match (n.as_i64(), n.as_u64(), n.as_f64()) {
        (Some(n), ..) => (!(-MOST..=MOST).contains(&n)).then(|| n.signum()),
        (_, Some(_), _) => Some(1),
        (.., Some(n)) => (n.abs() > MOST_DOUBLE).then_some(if n < 0.0 { -1 } else { 1 }),
        _ => None,
    };
    match beyond {
        None => {}
        Some(sign) if sign == side => *value = json!(side * MOST),
        Some(_) => {
            return refused(format!(
                "`{key}` beyond 2^53 ({n}) leaves only numbers beyond it, which is not enforced on this server; use strings"
            ));
        }
    }
    Ok(())
}

/// All bounds from below and above, wherever they are: parts that are joined join theirs.
fn collect(schema: &Value, lower: &mut Vec<f64>, upper: &mut Vec<f64>) {
    let of = |key: &str| schema.get(key).and_then(Value::as_f64);
    lower.extend(["minimum", "exclusiveMinimum"].into_iter().filter_map(of));
    upper.extend(["maximum", "exclusiveMaximum"].into_iter().filter_map(of));
    inside(schema).for_each(|(_, part)| collect(part, lower, upper));
}

fn open(schema: &mut Value, lower: &[f64], upper: &[f64]) -> Result<(), ConstraintError> {
    let Value::Object(object) = schema else { return Ok(()) };
    for (inclusive, exclusive, side) in BOUNDS {
        let Some(at) = excluded(object, inclusive, exclusive).filter(|at| at.fract() == 0.0) else { continue };
        // The nearest bound of the other kind that is inside of the next whole number.
        let nearest = if side < 0 {
            upper.get(upper.partition_point(|u| *u <= at)).filter(|u| **u < at + 1.0)
        } else {
            lower.partition_point(|l| *l < at).checked_sub(1).map(|i| &lower[i]).filter(|l| **l > at - 1.0)
        };
        let Some(nearest) = nearest else { continue };
        let beside = match (at == 0.0, side < 0) {
            (true, _) => beside_zero(exclusive, *nearest)?,
            (_, true) => at.next_up(),
            (_, false) => at.next_down(),
        };
        let own = object.get(inclusive).and_then(Value::as_f64).filter(|_| object[exclusive] != true);
        let tighter = own.filter(|own| if side < 0 { *own > beside } else { *own < beside });
        object.remove(exclusive);
        object.insert(inclusive.to_owned(), json!(tighter.unwrap_or(beside)));
    }
    inside_mut(object).try_for_each(|part| open(part, lower, upper))
}

/// What a schema excludes as a bound. Draft 4 has `true` beside the bound itself.
fn excluded(schema: &Map<String, Value>, inclusive: &str, exclusive: &str) -> Option<f64> {
    match schema.get(exclusive)? {
        Value::Bool(true) => schema.get(inclusive)?.as_f64(),
        other => other.as_f64(),
    }
}

/// A small number between 0 and this one, which is the nearest to 0 of all bounds on its side.
fn beside_zero(key: &str, nearest: f64) -> Result<f64, ConstraintError> {
    if nearest.abs() < TOO_CLOSE {
        return refused(format!(
            "`{key}` of 0 with another bound so close to it ({nearest:e}) is not enforced on this server"
        ));
    }
    let mut beside = BESIDE_ZERO;
    while beside > nearest.abs() / 1000.0 {
        beside /= 1000.0;
    }
    Ok(beside.copysign(nearest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Specials;
    use crate::constraint::Constraint;
    use crate::test_support::{Rng, starter_tokenizer};

    fn held(schema: &Value) -> Result<Constraint, ConstraintError> {
        starter_tokenizer().grammars().and_then(|g| g.schema(schema))
    }

    /// Whether this is a whole answer.
    fn accepts(held: &Constraint, text: &str) -> bool {
        let (tokenizer, mut held) = (starter_tokenizer(), held.clone());
        let tokens = tokenizer.encode(text, Specials::Plain).into_iter().chain(tokenizer.eos());
        tokens.into_iter().all(|token| {
            let permitted = held.permits(token).expect("a verdict");
            held.take(token);
            permitted
        })
    }

    fn range(low: f64, open_low: bool, high: f64, open_high: bool) -> Value {
        json!({"type": "number", (if open_low { "exclusiveMinimum" } else { "minimum" }): low,
            (if open_high { "exclusiveMaximum" } else { "maximum" }): high})
    }

    /// Checks spellings of numbers in and around the range against the range.
    fn check(schema: &Value, low: f64, open_low: bool, high: f64, open_high: bool) {
        let held = held(schema).unwrap_or_else(|e| panic!("{schema}: {e}"));
        let width = high - low;
        let mut points = vec![low, high, low.trunc(), high.trunc(), low - 1.0, high + 1.0];
        points.extend((-4..=20).map(|i| low + width * f64::from(i) / 16.0));
        points.extend([low + width * 1e-3, high - width * 1e-3]);
        for x in points {
            let inside = (if open_low { x > low } else { x >= low }) && (if open_high { x < high } else { x <= high });
            let text = format!("{x}");
            assert_eq!(accepts(&held, &text), inside, "{text}: {schema}");
            let point = if text.contains('.') { "" } else { "." };
            for spelled in [format!("{text}{point}0"), format!("{text}{point}00"), format!("{x:e}"), format!("-{text}")]
            {
                let value: f64 = serde_json::from_str(&spelled).unwrap_or(f64::NAN);
                let inside = (if open_low { value > low } else { value >= low })
                    && (if open_high { value < high } else { value <= high });
                assert!(inside || !accepts(&held, &spelled), "{spelled}: {schema}");
            }
        }
    }

    #[test]
    fn exclusive_bounds_are_no_values_of_a_number() {
        for (low, open_low, high, open_high) in [
            (9.0, true, 9.5, true),
            (0.0, true, 0.9, true),
            (0.0, true, 0.5, false),
            (0.0, true, 0.001, true),
            (0.0, true, 1e-20, true),
            (1.0, true, 1.5, true),
            (2.0, true, 2.5, false),
            (10.0, true, 10.5, true),
            (-1.5, false, -1.0, true),
            (-1.5, true, -1.0, true),
            (-0.5, true, 0.0, true),
            (-0.5, false, 0.0, true),
            (0.0, true, 1.0, true),
            (0.0, true, 1.0, false),
            (0.0, false, 0.5, true),
            (-0.5, true, 0.5, true),
            (-2.0, true, -1.5, true),
            (0.5, true, 0.55, true),
            (-1.0, true, 0.0, false),
            (4_503_599_627_370_490.0, true, 4_503_599_627_370_490.5, false),
        ] {
            check(&range(low, open_low, high, open_high), low, open_low, high, open_high);
        }
        let mut rng = Rng::new(9);
        for _ in 0..150 {
            let step = [0.125, 0.25, 1.0][rng.below(3)];
            let at = |rng: &mut Rng| f64::from(i32::try_from(rng.below(200)).unwrap() - 100) * step;
            let (a, b) = (at(&mut rng), at(&mut rng));
            let (low, high) = if rng.below(2) == 0 { (a.min(b), a.max(b)) } else { (a, a + step * 3.0) };
            if low < high {
                let (open_low, open_high) = (rng.below(2) == 0, rng.below(2) == 0);
                check(&range(low, open_low, high, open_high), low, open_low, high, open_high);
            }
        }
    }

    #[test]
    fn exclusive_bounds_hold_in_every_way_to_write_them() {
        for schema in [
            json!({"type": "number", "minimum": 9, "exclusiveMinimum": true, "maximum": 9.5}),
            json!({"type": "number", "minimum": 8, "exclusiveMinimum": 9, "maximum": 9.5}),
            json!({"allOf": [{"type": "number", "exclusiveMinimum": 9}, {"maximum": 9.5}]}),
            json!({"$ref": "#/$defs/a", "maximum": 9.5, "$defs": {"a": {"type": "number", "exclusiveMinimum": 9}}}),
            json!({"anyOf": [{"exclusiveMinimum": 9}], "type": "number", "maximum": 9.5}),
        ] {
            let held = held(&schema).unwrap();
            assert!(!["9", "9.0", "9.00", "9e0", "10"].iter().any(|t| accepts(&held, t)), "{schema}");
            assert!(["9.1", "9.5", "9.000001"].iter().all(|t| accepts(&held, t)), "{schema}");
        }
        let eighths = json!({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5, "multipleOf": 0.125});
        let eighths = held(&eighths).unwrap();
        // With all decimals, as the library writes them.
        assert!(["0.125", "0.250", "0.375"].iter().all(|t| accepts(&eighths, t)));
        assert!(!["0", "0.0", "0.5", "0.1", "0e0"].iter().any(|t| accepts(&eighths, t)));
        let tighter = json!({"type": "number", "minimum": 9.25, "exclusiveMinimum": 9, "maximum": 9.5});
        assert!(!accepts(&held(&tighter).unwrap(), "9.1"));
        // Of integers they are what they were.
        let integers =
            json!({"allOf": [{"type": "integer"}, {"exclusiveMinimum": 9, "exclusiveMaximum": 11}, {"maximum": 9.5}]});
        assert!(held(&integers).is_err(), "there is none");
        let integers = json!({"allOf": [{"type": "integer"}, {"exclusiveMinimum": 9}, {"maximum": 11}, {"anyOf": [{"maximum": 9.5}, {}]}]});
        let integers = held(&integers).unwrap();
        assert!(
            !accepts(&integers, "9")
                && accepts(&integers, "10")
                && accepts(&integers, "11")
                && !accepts(&integers, "12")
        );
        let close = json!({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-300});
        assert!(held(&close).unwrap_err().0.contains("1e-300"));
    }

    #[test]
    fn bounds_beyond_all_integers_that_are_doubles_count_as_the_last_one() {
        let of = |kind: &str, key: &str, n: Value| json!({"type": kind, key: n});
        for kind in ["integer", "number"] {
            for (key, n) in [("minimum", json!(1e300)), ("exclusiveMinimum", json!(1e17)), ("maximum", json!(-1e300))] {
                let why = held(&of(kind, key, n.clone())).unwrap_err().0;
                assert!(why.contains(key) && why.contains("beyond 2^53") && why.contains("strings"), "{why}");
            }
            for (key, n) in [("maximum", json!(1e300)), ("minimum", json!(-1e300)), ("exclusiveMaximum", json!(1e300))]
            {
                let held = held(&of(kind, key, n)).unwrap();
                assert!(accepts(&held, "0") && accepts(&held, "9007199254740991") && accepts(&held, "-17"));
            }
            let most = held(&of(kind, "maximum", json!(1e300))).unwrap();
            assert!(!accepts(&most, "9007199254740993"));
            let both = held(&json!({"type": kind, "minimum": 0, "maximum": 1e300})).unwrap();
            assert!(accepts(&both, "12") && !accepts(&both, "-1"));
        }
    }
}
