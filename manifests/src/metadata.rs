//! GGUF metadata: an ordered map of typed values.

use std::borrow::Cow;

/// A packed list of strings: one blob and its end offsets, so that a 130,000-token vocabulary costs two allocations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StringTable {
    pub(crate) bytes: Vec<u8>,
    pub(crate) ends: Vec<u32>,
}

impl StringTable {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of string `i`. GGUF strings are UTF-8 by specification, not by enforcement.
    pub fn get(&self, i: usize) -> Option<&[u8]> {
        let end = *self.ends.get(i)? as usize;
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        self.bytes.get(start..end)
    }

    /// All strings in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).filter_map(|i| self.get(i))
    }

    /// Appends a string. `None` (and nothing changed) once the blob would pass 4 GiB.
    pub fn push(&mut self, s: &[u8]) -> Option<()> {
        let end = u32::try_from(self.bytes.len().checked_add(s.len())?).ok()?;
        self.bytes.extend_from_slice(s);
        self.ends.push(end);
        Some(())
    }
}

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any unsigned integer type.
    U64(u64),
    /// Any signed integer type.
    I64(i64),
    /// f32 or f64.
    F64(f64),
    /// Boolean.
    Bool(bool),
    /// A string; invalid UTF-8 is refused by the reader.
    String(String),
    /// An array of strings.
    Strings(StringTable),
    /// An array of integers that fit i64 (every integer element type).
    Ints(Vec<i64>),
    /// An array of floats.
    Floats(Vec<f32>),
    /// An array of booleans.
    Bools(Vec<bool>),
}

/// An integer as f64, up to 2^53: beyond it not every integer has a float of its own.
fn exact(v: u64) -> Option<f64> {
    let high = u32::try_from(v >> 32).ok().filter(|_| v <= 1 << 53)?;
    let low = u32::try_from(v & u64::from(u32::MAX)).ok()?;
    Some(f64::from(high) * 4_294_967_296.0 + f64::from(low))
}

/// An integer as f32, up to 2^24 in size.
fn exact_f32(v: i64) -> Option<f32> {
    let magnitude = u32::try_from(v.unsigned_abs()).ok().filter(|m| *m <= 1 << 24)?;
    let (high, low) = (u16::try_from(magnitude >> 16).ok()?, u16::try_from(magnitude & 0xffff).ok()?);
    let magnitude = f32::from(high) * 65536.0 + f32::from(low);
    Some(if v < 0 { -magnitude } else { magnitude })
}

/// Ordered key-value metadata of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    pub(crate) entries: Vec<(String, Value)>,
}

impl Metadata {
    /// All entries in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    /// Sets `key`, replacing an earlier value.
    pub fn set(&mut self, key: &str, value: Value) {
        match self.entries.iter_mut().find(|(k, _)| k == key) {
            Some((_, v)) => *v = value,
            None => self.entries.push((key.to_owned(), value)),
        }
    }

    /// An integer value as u64.
    pub fn u64(&self, key: &str) -> Option<u64> {
        match self.get(key)? {
            Value::U64(v) => Some(*v),
            Value::I64(v) => u64::try_from(*v).ok(),
            _ => None,
        }
    }

    /// A float as f64, or an integer that f64 has exactly: some writers store 10000.0 as 10000.
    pub fn f64(&self, key: &str) -> Option<f64> {
        match self.get(key)? {
            Value::F64(v) => Some(*v),
            Value::U64(v) => exact(*v),
            Value::I64(v) => exact(v.unsigned_abs()).map(|magnitude| if *v < 0 { -magnitude } else { magnitude }),
            _ => None,
        }
    }

    /// An array of floats, or of integers that f32 has exactly.
    pub fn floats(&self, key: &str) -> Option<Cow<'_, [f32]>> {
        match self.get(key)? {
            Value::Floats(v) => Some(Cow::Borrowed(v)),
            Value::Ints(v) => v.iter().map(|v| exact_f32(*v)).collect::<Option<Vec<_>>>().map(Cow::Owned),
            _ => None,
        }
    }

    /// True for weights that `ds4 gguf synth` made up: speeds are real, answers are nonsense. The key is ours.
    pub fn is_synthetic(&self) -> bool {
        self.bool("ds4.synthetic") == Some(true)
    }

    /// A boolean value.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(v) => Some(*v),
            _ => None,
        }
    }

    /// A string value.
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::String(v) => Some(v),
            _ => None,
        }
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Option<&StringTable> {
        match self.get(key)? {
            Value::Strings(v) => Some(v),
            _ => None,
        }
    }

    /// An array of integers.
    pub fn ints(&self, key: &str) -> Option<&[i64]> {
        match self.get(key)? {
            Value::Ints(v) => Some(v),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_stored_as_integers_are_read_when_exact() {
        let mut m = Metadata::default();
        for (value, want) in [
            (Value::U64(10_000), Some(10_000.0)),
            (Value::I64(-7), Some(-7.0)),
            (Value::I64(0), Some(0.0)),
            (Value::U64(1 << 53), Some(9_007_199_254_740_992.0)),
            (Value::U64((1 << 53) - 1), Some(9_007_199_254_740_991.0)),
            (Value::U64((1 << 53) + 1), None),
            (Value::U64(u64::MAX), None),
            (Value::I64(i64::MIN), None),
            (Value::F64(0.1), Some(0.1)),
            (Value::Bool(true), None),
            (Value::String("1".into()), None),
            (Value::Floats(vec![1.0]), None),
        ] {
            m.set("x", value.clone());
            assert_eq!(m.f64("x"), want, "{value:?}");
        }
        assert_eq!(m.f64("y"), None);
    }

    #[test]
    fn arrays_of_floats_stored_as_integers_are_read_when_exact() {
        let mut m = Metadata::default();
        for (value, want) in [
            (Value::Ints(vec![10, -3, 0, 1 << 24]), Some(vec![10.0, -3.0, 0.0, 16_777_216.0])),
            (Value::Ints(vec![10, (1 << 24) + 1]), None),
            (Value::Ints(vec![i64::MIN]), None),
            (Value::Floats(vec![0.5]), Some(vec![0.5])),
            (Value::Bools(vec![true]), None),
            (Value::U64(10), None),
        ] {
            m.set("x", value.clone());
            assert_eq!(m.floats("x").map(Cow::into_owned), want, "{value:?}");
        }
    }
}
