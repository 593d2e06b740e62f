//! One architecture: how its hyper-parameters are read, and which tensors its models have.

use std::collections::BTreeMap;

use super::data::{FamilyData, HyperData, HyperKind, OnlyData, TensorData};
use super::{Entry, HyperParams, Number};
use crate::dtype::GgmlType;
use crate::metadata::{Metadata, Value};

/// Largest whole-number hyper-parameter: beyond it a file is damaged (contexts reach 2^24, vocabularies 2^18).
const MAX_INT: u64 = 1 << 31;

/// An architecture.
#[derive(Debug)]
pub struct Family {
    /// `general.architecture`.
    pub name: String,
    pub(super) data: FamilyData,
}

/// A tensor that a model may or must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedTensor<'a> {
    /// Name, the layer filled in.
    pub name: String,
    /// Dimensions, contiguous first.
    pub shape: Vec<u64>,
    /// Types that the entry allows.
    pub types: &'a [GgmlType],
    /// May be absent.
    pub optional: bool,
    /// Layer, for tensors that each layer has.
    pub layer: Option<u64>,
    /// Role in the family's table (`embedding`, `matrix`, `vector`).
    pub role: &'a str,
}

/// What the metadata says about one hyper-parameter.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Reading {
    Known(Number),
    /// A phrase for messages: `missing`, `-3`, `an array`.
    Unusable(String),
}

impl Family {
    pub(super) fn from_toml(text: &str) -> Result<Self, String> {
        let data: FamilyData = toml::from_str(text).map_err(|e| format!("family file: {e}"))?;
        let name = data.family.clone();
        let known = |n: &str| n == "tokens" || data.hyper.iter().any(|h| h.name == n);
        let pairs = data.multiples.iter().chain(&data.at_most).chain(&data.equal).flatten();
        let layers = data.tensors.iter().filter_map(|t| t.layers.as_ref()).flatten();
        let shapes = data.tensors.iter().flat_map(|t| &t.shape);
        for expr in pairs.chain(layers).chain(shapes).chain(data.hyper.iter().filter_map(|h| h.default.as_ref())) {
            if let Some(unknown) = expr.names().find(|n| !known(n)) {
                return Err(format!("family {name}: expression {:?} uses unknown {unknown:?}", expr.text()));
            }
        }
        if data.tensors.iter().any(|t| t.layers.is_some() && !t.name.contains("{layer}")) {
            return Err(format!("family {name}: a tensor with layers has no {{layer}} in its name"));
        }
        if !data.hyper.iter().any(|h| h.name == "layers") {
            return Err(format!("family {name} declares no hyper-parameter `layers`"));
        }
        Ok(Self { name, data })
    }

    /// The metadata key of hyper-parameter `name`.
    pub fn key(&self, name: &str) -> Option<&str> {
        self.data.hyper.iter().find(|h| h.name == name).map(|h| h.key.as_str())
    }

    /// Reads all hyper-parameters, in the family's order.
    pub(super) fn read_hyper(&self, metadata: &Metadata) -> Vec<(&HyperData, Reading)> {
        let mut names: BTreeMap<String, Number> = BTreeMap::new();
        if let Some(tokens) = metadata.strings("tokenizer.ggml.tokens") {
            names.insert("tokens".into(), Number::Int(u64::try_from(tokens.len()).unwrap_or(u64::MAX)));
        }
        self.data
            .hyper
            .iter()
            .map(|h| {
                let reading = read_one(h, metadata, &names);
                if let Reading::Known(number) = reading {
                    names.insert(h.name.clone(), number);
                }
                (h, reading)
            })
            .collect()
    }

    /// The tensor table for `hyper`, with the types and absences of `entry`. Rows whose shape has no value are left out;
    /// [`Entry::first_difference`] has refused such models.
    pub(super) fn expected<'a>(&'a self, entry: &'a Entry, hyper: &HyperParams) -> Vec<ExpectedTensor<'a>> {
        let layers = hyper.int("layers").unwrap_or(0);
        let mut out = Vec::new();
        for row in &self.data.tensors {
            if entry.absent.contains(&row.name) {
                continue;
            }
            let Some(shape) = shape(row, hyper) else { continue };
            let types = entry.types.get(&row.role).map_or(&[][..], Vec::as_slice);
            let one = |name: String, layer| ExpectedTensor {
                name,
                shape: shape.clone(),
                types,
                optional: row.optional,
                layer,
                role: &row.role,
            };
            if row.name.contains("{layer}") {
                let (from, to) = match &row.layers {
                    None => (0, layers),
                    Some([from, to]) => {
                        (from.value(&hyper.values).unwrap_or(0), to.value(&hyper.values).unwrap_or(0).min(layers))
                    }
                };
                out.extend((from..to).map(|i| one(row.name.replace("{layer}", &i.to_string()), Some(i))));
            } else {
                out.push(one(row.name.clone(), None));
            }
        }
        out
    }

    /// The first rule of the family that `hyper` breaks.
    pub(super) fn broken_rule(&self, hyper: &HyperParams) -> Option<String> {
        let value = |e: &super::expr::Expr| e.value(&hyper.values);
        let broken = |pairs: &[[super::expr::Expr; 2]], holds: fn(u64, u64) -> bool, what: &str| {
            pairs.iter().find_map(|[a, b]| {
                let (x, y) = (value(a), value(b));
                let fine = matches!((x, y), (Some(x), Some(y)) if holds(x, y));
                let shown = |v: Option<u64>| v.map_or_else(|| "no whole number".to_owned(), |v| v.to_string());
                (!fine).then(|| format!("{} is {}, expected {what} {} ({})", a.text(), shown(x), b.text(), shown(y)))
            })
        };
        broken(&self.data.multiples, |a, b| b != 0 && a % b == 0, "a multiple of")
            .or_else(|| broken(&self.data.at_most, |a, b| a <= b, "at most"))
            .or_else(|| broken(&self.data.equal, |a, b| a == b, "to equal"))
            .or_else(|| {
                self.data
                    .tensors
                    .iter()
                    .find(|row| shape(row, hyper).is_none())
                    .map(|row| format!("the shape of {} has no whole value with these hyper-parameters", row.name))
            })
    }

    /// The first key whose value selects a variant that is not implemented.
    pub(super) fn unimplemented_variant(&self, metadata: &Metadata) -> Option<String> {
        self.data.only.iter().find_map(|only| {
            let value = metadata.get(&only.key)?;
            (!only.allows(value)).then(|| format!("{} is {}: {}", only.key, show(value), only.why))
        })
    }
}

impl OnlyData {
    fn allows(&self, value: &Value) -> bool {
        self.values.iter().any(|allowed| match (allowed, value) {
            (toml::Value::String(a), Value::String(v)) => a == v,
            (toml::Value::Boolean(a), Value::Bool(v)) => a == v,
            (toml::Value::Float(a), Value::F64(v)) => a == v,
            (toml::Value::Integer(a), Value::I64(v)) => a == v,
            (toml::Value::Integer(a), Value::U64(v)) => u64::try_from(*a) == Ok(*v),
            _ => false,
        })
    }
}

fn shape(row: &TensorData, hyper: &HyperParams) -> Option<Vec<u64>> {
    row.shape.iter().map(|e| e.value(&hyper.values)).collect()
}

fn read_one(h: &HyperData, metadata: &Metadata, names: &BTreeMap<String, Number>) -> Reading {
    let Some(value) = metadata.get(&h.key) else {
        let default = match h.kind {
            HyperKind::Int => h.default.as_ref().and_then(|e| e.value(names)).map(Number::Int),
            HyperKind::Float => h.default_float.map(Number::Float),
        };
        return default.map_or_else(|| Reading::Unusable("missing".into()), Reading::Known);
    };
    let number = match (h.kind, value) {
        (HyperKind::Int, _) => metadata.u64(&h.key).filter(|v| (1..=MAX_INT).contains(v)).map(Number::Int),
        (HyperKind::Float, Value::F64(v)) => v.is_finite().then_some(Number::Float(*v)),
        (HyperKind::Float, _) => None,
    };
    number.map_or_else(|| Reading::Unusable(show(value)), Reading::Known)
}

/// A value for a message; long ones by kind.
pub(super) fn show(value: &Value) -> String {
    match value {
        Value::U64(v) => v.to_string(),
        Value::I64(v) => v.to_string(),
        Value::F64(v) => v.to_string(),
        Value::Bool(v) => v.to_string(),
        Value::String(v) => format!("{:?}", v.chars().take(40).collect::<String>()),
        Value::Strings(_) | Value::Ints(_) | Value::Floats(_) | Value::Bools(_) => "an array".into(),
    }
}
