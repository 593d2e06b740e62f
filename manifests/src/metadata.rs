//! GGUF metadata: an ordered map of typed values.

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

    /// A float (or integer) value as f64.
    pub fn f64(&self, key: &str) -> Option<f64> {
        match self.get(key)? {
            Value::F64(v) => Some(*v),
            _ => None,
        }
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
