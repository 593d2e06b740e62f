//! One artifact: what it must look like, and how a model differs from it.

use std::collections::{BTreeMap, HashMap};

use super::data::{ClassData, EntryData, HyperData, HyperKind, TokenizerData};
use super::family::{Family, Reading, show};
use super::{HyperParams, Number, TensorLike};
use crate::dtype::GgmlType;
use crate::metadata::{Metadata, Value};

/// How much an entry promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Tested against an independent implementation.
    Validated,
    /// Any consistent dimensions, for tests and experiments; needs a flag.
    Dev,
}

/// A file whose content was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// File name, for people.
    pub file: String,
    /// [`crate::content_hash`].
    pub content: [u8; 32],
}

/// A catalog entry.
#[derive(Debug)]
pub struct Entry {
    /// Stable id, e.g. `smollm2-135m`.
    pub id: String,
    /// Promise.
    pub class: Class,
    /// Architecture.
    pub family: String,
    /// Name that the API serves it under.
    pub name: String,
    /// Name for people.
    pub title: String,
    /// Files with a known content hash.
    pub known: Vec<Known>,
    pub(super) absent: Vec<String>,
    pub(super) types: BTreeMap<String, Vec<GgmlType>>,
    hyper: BTreeMap<String, Number>,
    /// One value a layer.
    per_layer: BTreeMap<String, Vec<Number>>,
    tokenizer: Option<TokenizerData>,
}

impl Entry {
    pub(super) fn from_toml(text: &str, families: &[Family]) -> Result<Self, String> {
        let data: EntryData = toml::from_str(text).map_err(|e| format!("entry file: {e}"))?;
        let fail = |what: String| Err(format!("entry {}: {what}", data.id));
        let Some(family) = families.iter().find(|f| f.name == data.family) else {
            return fail(format!("family {:?} is unknown", data.family));
        };
        for row in &family.data.tensors {
            if !data.types.contains_key(&row.role) {
                return fail(format!("no types for role {:?}", row.role));
            }
        }
        if let Some(name) =
            data.absent.iter().find(|n| !family.data.tensors.iter().any(|t| t.name == **n && t.optional))
        {
            return fail(format!("absent tensor {name:?} is not an optional one of its family"));
        }
        let mut hyper = BTreeMap::new();
        let mut per_layer = BTreeMap::new();
        if data.class == ClassData::Validated {
            if data.tokenizer.is_none() {
                return fail("a validated entry needs [tokenizer]".into());
            }
            for h in &family.data.hyper {
                match data.hyper.get(&h.name).and_then(|v| number(h.kind, v)) {
                    Some(number) => hyper.insert(h.name.clone(), number),
                    None => return fail(format!("hyper.{} is missing or of another kind", h.name)),
                };
            }
            let layers = hyper.get("layers").and_then(|n| usize::try_from(n.int()?).ok()).unwrap_or(0);
            for p in &family.data.per_layer {
                let values: Option<Vec<Number>> = match data.per_layer.get(&p.name) {
                    Some(toml::Value::Array(list)) => list.iter().map(|v| number(p.kind, v)).collect(),
                    Some(one) => number(p.kind, one).map(|n| vec![n; layers]),
                    None => None,
                };
                match values.filter(|v| v.len() == layers) {
                    Some(values) => per_layer.insert(p.name.clone(), values),
                    None => return fail(format!("per_layer.{} is not {layers} values of its kind", p.name)),
                };
            }
        }
        if let Some(name) = data.hyper.keys().find(|n| !hyper.contains_key(*n)) {
            return fail(format!("hyper.{name} is not used by its family or class"));
        }
        if let Some(name) = data.per_layer.keys().find(|n| !per_layer.contains_key(*n)) {
            return fail(format!("per_layer.{name} is not used by its family or class"));
        }
        let mut known = Vec::new();
        for k in &data.known {
            match blake3::Hash::from_hex(&k.content) {
                Ok(hash) => known.push(Known { file: k.file.clone(), content: *hash.as_bytes() }),
                Err(_) => return fail(format!("content hash of {:?} is not 64 hexadecimal digits", k.file)),
            }
        }
        Ok(Self {
            id: data.id,
            class: match data.class {
                ClassData::Validated => Class::Validated,
                ClassData::Dev => Class::Dev,
            },
            family: data.family,
            name: data.name,
            title: data.title,
            known,
            absent: data.absent,
            types: data.types.into_iter().map(|(role, list)| (role, list.into_iter().map(|t| t.0).collect())).collect(),
            hyper,
            per_layer,
            tokenizer: data.tokenizer,
        })
    }

    /// True when `content` is the hash of a file that was checked.
    pub fn is_known(&self, content: &[u8; 32]) -> bool {
        self.known.iter().any(|k| k.content == *content)
    }

    /// The hyper-parameters that a validated entry states.
    pub(super) fn own_hyper(&self) -> HyperParams {
        HyperParams { values: self.hyper.clone(), per_layer: self.per_layer.clone() }
    }

    /// Metadata that says what a validated entry is: its architecture, every hyper-parameter and per-layer value. Floats are
    /// rounded to f32, as files keep them. For a `dev` entry it says the architecture only.
    pub(super) fn metadata(&self, family: &Family) -> Metadata {
        let mut m = Metadata::default();
        m.set("general.architecture", Value::String(self.family.clone()));
        #[allow(clippy::cast_possible_truncation, reason = "files keep f32")]
        let narrow = |v: f64| v as f32;
        for h in &family.data.hyper {
            match self.hyper.get(&h.name) {
                Some(Number::Int(v)) => m.set(&h.key, Value::U64(*v)),
                Some(Number::Float(v)) => m.set(&h.key, Value::F64(f64::from(narrow(*v)))),
                None => {}
            }
        }
        for p in &family.data.per_layer {
            let Some(values) = self.per_layer.get(&p.name) else { continue };
            let ints = values.iter().filter_map(|n| i64::try_from(n.int()?).ok());
            let floats = values.iter().filter_map(|n| match n {
                Number::Float(v) => Some(narrow(*v)),
                Number::Int(_) => None,
            });
            m.set(
                &p.key,
                match p.kind {
                    HyperKind::Int => Value::Ints(ints.collect()),
                    HyperKind::Float => Value::Floats(floats.collect()),
                },
            );
        }
        m
    }

    /// Every hyper-parameter that differs from this entry, in the family's order.
    pub(super) fn hyper_differences(&self, family: &Family, readings: &[(&HyperData, Reading)]) -> Vec<String> {
        debug_assert_eq!(family.name, self.family);
        readings
            .iter()
            .filter_map(|(h, reading)| {
                let expected = self.hyper.get(&h.name)?;
                let found = match reading {
                    Reading::Known(found) if same(*found, *expected) => return None,
                    Reading::Known(found) => found.to_string(),
                    Reading::Unusable(found) => found.clone(),
                };
                Some(format!("{} is {found}, expected {expected}", h.key))
            })
            .collect()
    }

    /// The hyper-parameters of a model that this entry describes, or the first thing in which it differs from it (the
    /// entry's own hyper-parameters aside, which [`Entry::hyper_differences`] compares).
    pub(super) fn first_difference<T: TensorLike>(
        &self,
        family: &Family,
        readings: &[(&HyperData, Reading)],
        metadata: &Metadata,
        tensors: &[T],
    ) -> Result<HyperParams, String> {
        let hyper = self.hyper_params(family, readings, metadata)?;
        self.tokenizer_difference(&hyper, metadata).map_or(Ok(()), Err)?;
        self.tensor_difference(family, &hyper, tensors).map_or(Ok(()), Err)?;
        Ok(hyper)
    }

    /// The hyper-parameters alone, checked against the family's rules.
    pub(super) fn hyper_params(
        &self,
        family: &Family,
        readings: &[(&HyperData, Reading)],
        metadata: &Metadata,
    ) -> Result<HyperParams, String> {
        let mut hyper = HyperParams::default();
        for (h, reading) in readings {
            match reading {
                Reading::Known(number) => hyper.values.insert(h.name.clone(), *number),
                Reading::Unusable(found) => {
                    let kind = match h.kind {
                        HyperKind::Int => "a whole number from 1 to 2^31",
                        HyperKind::Float => "a finite number",
                    };
                    return Err(format!("{} is {found}, expected {kind}", h.key));
                }
            };
        }
        hyper.per_layer = family.read_per_layer(metadata, hyper.int("layers").unwrap_or(0))?;
        for (name, expected) in &self.per_layer {
            let found = hyper.per_layer.get(name).map_or(&[][..], Vec::as_slice);
            if let Some(i) = (0..expected.len()).find(|i| !found.get(*i).is_some_and(|f| same(*f, expected[*i]))) {
                let key = family.per_layer_key(name).unwrap_or(name);
                let found = found.get(i).map_or_else(|| "missing".to_owned(), Number::to_string);
                return Err(format!("{key}[{i}] is {found}, expected {}", expected[i]));
            }
        }
        if let Some(broken) = family.broken_rule(&hyper) {
            return Err(broken);
        }
        if let Some(variant) = family.unimplemented_variant(metadata) {
            return Err(variant);
        }
        Ok(hyper)
    }

    fn tokenizer_difference(&self, hyper: &HyperParams, metadata: &Metadata) -> Option<String> {
        let tokens = metadata.strings("tokenizer.ggml.tokens");
        if let (Some(tokens), Some(vocab)) = (tokens, hyper.int("vocab"))
            && u64::try_from(tokens.len()) != Ok(vocab)
        {
            return Some(format!("tokenizer.ggml.tokens has {} tokens, expected {vocab}", tokens.len()));
        }
        let expected = self.tokenizer.as_ref()?;
        for (key, expected) in [("tokenizer.ggml.model", &expected.model), ("tokenizer.ggml.pre", &expected.pre)] {
            if metadata.str(key) != Some(expected) {
                let found = metadata.get(key).map_or_else(|| "missing".to_owned(), show);
                return Some(format!("{key} is {found}, expected {expected:?}"));
            }
        }
        if tokens.is_none() {
            return Some("tokenizer.ggml.tokens is missing".into());
        }
        if expected.chat_template && metadata.str("tokenizer.chat_template").is_none() {
            return Some(
                "tokenizer.chat_template is missing, expected the template of an instruction-tuned model".into(),
            );
        }
        None
    }

    fn tensor_difference<T: TensorLike>(&self, family: &Family, hyper: &HyperParams, tensors: &[T]) -> Option<String> {
        let layers = hyper.int("layers").unwrap_or(0);
        // Before the table is expanded: the count comes from an untrusted file when the entry leaves it open.
        if u64::try_from(tensors.len()).is_ok_and(|n| n < layers) {
            let key = family.key("layers").unwrap_or("layers");
            return Some(format!("{key} is {layers}, but there are only {} tensors", tensors.len()));
        }
        let mut rest: HashMap<&str, &T> = tensors.iter().map(|t| (t.name(), t)).collect();
        for expected in family.expected(self, hyper) {
            let found = rest.remove(expected.name.as_str());
            let Some(found) = found.or_else(|| rest.remove(expected.alias?)) else {
                if expected.optional {
                    continue;
                }
                return Some(format!("tensor {} is missing", expected.name));
            };
            if found.shape() != expected.shape {
                return Some(format!(
                    "tensor {} has shape {:?}, expected {:?}",
                    expected.name,
                    found.shape(),
                    expected.shape
                ));
            }
            if !expected.types.contains(&found.ty()) {
                let allowed: Vec<&str> = expected.types.iter().map(|t| t.name()).collect();
                return Some(format!(
                    "tensor {} has type {}, expected one of {}",
                    expected.name,
                    found.ty(),
                    allowed.join(", ")
                ));
            }
        }
        let types: HashMap<&str, GgmlType> = tensors.iter().map(|t| (t.name(), t.ty())).collect();
        for (pair, i) in family.data.same_type.iter().flat_map(|pair| (0..layers).map(move |i| (pair, i))) {
            let [a, b] = pair.each_ref().map(|row| row.replace("{layer}", &i.to_string()));
            if let (Some(x), Some(y)) = (types.get(a.as_str()), types.get(b.as_str()))
                && x != y
            {
                return Some(format!("tensor {b} has type {y}, expected that of {a}, {x}"));
            }
        }
        // In file order, so that the message does not depend on hashing.
        tensors
            .iter()
            .find(|t| rest.contains_key(t.name()))
            .map(|t| format!("tensor {:?} is not in the table of {}", t.name(), self.id))
    }
}

/// A value of an entry file.
fn number(kind: HyperKind, value: &toml::Value) -> Option<Number> {
    match (kind, value) {
        (HyperKind::Int, toml::Value::Integer(v)) => u64::try_from(*v).ok().map(Number::Int),
        (HyperKind::Float, toml::Value::Float(v)) => Some(Number::Float(*v)),
        _ => None,
    }
}

/// Equal, floats to f32 accuracy: files keep them as f32, entries as decimal text.
fn same(found: Number, expected: Number) -> bool {
    match (found, expected) {
        (Number::Int(a), Number::Int(b)) => a == b,
        (Number::Float(a), Number::Float(b)) => (a - b).abs() <= 1e-6 * b.abs(),
        _ => false,
    }
}
