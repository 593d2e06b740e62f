//! One architecture: how its hyper-parameters are read, and which tensors its models have.

use std::collections::BTreeMap;

use super::data::{FamilyData, HyperData, HyperKind, OnlyData, PerLayerData, TensorData};
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
    /// Another name under which a file may have it.
    pub alias: Option<&'a str>,
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
        let known_per_layer = |n: &str| data.per_layer.iter().any(|p| p.name == n && p.kind == HyperKind::Int);
        let known = |n: &str| n == "tokens" || data.hyper.iter().any(|h| h.name == n);
        let pairs = data.multiples.iter().chain(&data.at_most).chain(&data.equal).flatten();
        let layers = data.tensors.iter().filter_map(|t| t.layers.as_ref()).flatten();
        for row in &data.tensors {
            let unknown = row.shape.iter().flat_map(super::expr::Expr::names);
            let unknown = unknown.chain(row.when.as_ref().map(|w| w.name.as_str()));
            let mut unknown = unknown.filter(|n| !known(n) && (!known_per_layer(n) || !row.name.contains("{layer}")));
            if let Some(unknown) = unknown.next() {
                return Err(format!("family {name}: the row of {:?} uses unknown {unknown:?}", row.name));
            }
        }
        let row = |n: &String| data.tensors.iter().any(|t| t.name == *n);
        if let Some(unknown) = data.same_type.iter().flatten().find(|n| !row(n)) {
            return Err(format!("family {name}: same_type names unknown row {unknown:?}"));
        }
        for expr in
            pairs.chain(&data.powers_of_two).chain(layers).chain(data.hyper.iter().filter_map(|h| h.default.as_ref()))
        {
            if let Some(unknown) = expr.names().find(|n| !known(n)) {
                return Err(format!("family {name}: expression {:?} uses unknown {unknown:?}", expr.text()));
            }
        }
        if data.tensors.iter().any(|t| (t.layers.is_some() || t.when.is_some()) && !t.name.contains("{layer}")) {
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

    /// The metadata key of per-layer value `name`.
    pub(super) fn per_layer_key(&self, name: &str) -> Option<&str> {
        self.data.per_layer.iter().find(|p| p.name == name).map(|p| p.key.as_str())
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

    /// Reads all per-layer values of a model with `layers` layers.
    pub(super) fn read_per_layer(
        &self,
        metadata: &Metadata,
        layers: u64,
    ) -> Result<BTreeMap<String, Vec<Number>>, String> {
        let read = |p: &PerLayerData| Ok((p.name.clone(), read_per_layer(p, metadata, layers)?));
        self.data.per_layer.iter().map(read).collect()
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
            let types = entry.types.get(&row.role).map_or(&[][..], Vec::as_slice);
            let one = |name: &str, shape, layer| ExpectedTensor {
                name: name.to_owned(),
                shape,
                alias: row.alias.as_deref(),
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
                let here = |i: u64| row.when.as_ref().is_none_or(|w| hyper.at(&w.name, i).is_some_and(|v| w.holds(v)));
                for i in (from..to).filter(|i| here(*i)) {
                    if let Some(shape) = shape(row, hyper, Some(i)) {
                        out.push(one(&row.name.replace("{layer}", &i.to_string()), shape, Some(i)));
                    }
                }
            } else if let Some(shape) = shape(row, hyper, None) {
                out.push(one(&row.name, shape, None));
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
                let uneven = self.data.powers_of_two.iter().find(|e| !value(e).is_some_and(u64::is_power_of_two))?;
                let shown = value(uneven).map_or_else(|| "no whole number".to_owned(), |v| v.to_string());
                Some(format!("{} is {shown}, expected a power of two", uneven.text()))
            })
            .or_else(|| {
                self.data
                    .tensors
                    .iter()
                    // Per-layer values are bounded and only multiplied with: the first layer's stands for all.
                    .find(|row| shape(row, hyper, Some(0)).is_none())
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

fn shape(row: &TensorData, hyper: &HyperParams, layer: Option<u64>) -> Option<Vec<u64>> {
    let own = layer.filter(|_| row.when.is_some()).map(|layer| {
        let mut names = hyper.values.clone();
        let values = hyper.per_layer.keys().filter_map(|n| Some((n.clone(), Number::Int(hyper.at(n, layer)?))));
        names.extend(values);
        names
    });
    row.shape.iter().map(|e| e.value(own.as_ref().unwrap_or(&hyper.values))).collect()
}

/// The values of all layers, or a sentence about what is wrong with them.
fn read_per_layer(p: &PerLayerData, metadata: &Metadata, layers: u64) -> Result<Vec<Number>, String> {
    let refuse = |found: String| Err(format!("{} {found}", p.key));
    let values: Vec<Number> = match (p.kind, metadata.get(&p.key)) {
        (_, None) => return refuse("is missing".into()),
        (HyperKind::Int, Some(Value::Ints(v))) => {
            let low = p.at_least_unless_zero.unwrap_or(0);
            let number = |v: &i64| u64::try_from(*v).ok().filter(|v| *v == 0 || (low..=MAX_INT).contains(v));
            match v.iter().find(|v| number(v).is_none()) {
                Some(bad) => return refuse(format!("has {bad}, expected 0 or {low} to 2^31")),
                None => v.iter().filter_map(number).map(Number::Int).collect(),
            }
        }
        (HyperKind::Float, Some(value)) => match metadata.floats(&p.key) {
            Some(v) if v.iter().all(|v| v.is_finite()) => v.iter().map(|v| Number::Float(f64::from(*v))).collect(),
            _ => return refuse(format!("is {}, expected an array of finite numbers that f32 has", show(value))),
        },
        (_, Some(value)) => return refuse(format!("is {}, expected an array of finite numbers", show(value))),
    };
    match usize::try_from(layers).ok().and_then(|n| values.get(..n)) {
        Some(used) => Ok(used.to_vec()),
        None => refuse(format!("has {} entries, expected one for each of {layers} layers", values.len())),
    }
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
        (HyperKind::Int, _) => {
            metadata.u64(&h.key).filter(|v| (u64::from(!h.zero)..=MAX_INT).contains(v)).map(Number::Int)
        }
        (HyperKind::Float, _) => metadata.f64(&h.key).filter(|v| v.is_finite()).map(Number::Float),
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
