//! The catalog's data files, as they are written (TOML).

use std::collections::BTreeMap;

use serde::Deserialize;

use super::expr::Expr;
use crate::dtype::GgmlType;

/// `families/*.toml`: what all artifacts of an architecture have in common.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FamilyData {
    pub family: String,
    pub hyper: Vec<HyperData>,
    /// Metadata arrays with a value for each layer.
    #[serde(default)]
    pub per_layer: Vec<PerLayerData>,
    #[serde(default)]
    pub multiples: Vec<[Expr; 2]>,
    #[serde(default)]
    pub at_most: Vec<[Expr; 2]>,
    #[serde(default)]
    pub equal: Vec<[Expr; 2]>,
    /// Expressions whose value must be a power of two.
    #[serde(default)]
    pub powers_of_two: Vec<Expr>,
    /// Pairs of tensor rows whose types must agree in every layer.
    #[serde(default)]
    pub same_type: Vec<[String; 2]>,
    #[serde(default)]
    pub only: Vec<OnlyData>,
    #[serde(rename = "tensor")]
    pub tensors: Vec<TensorData>,
}

/// One hyper-parameter: its name in expressions and its metadata key.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HyperData {
    pub name: String,
    pub key: String,
    #[serde(default)]
    pub kind: HyperKind,
    /// Value when the key is absent. `tokens` is the length of `tokenizer.ggml.tokens`.
    pub default: Option<Expr>,
    /// The same for floats.
    pub default_float: Option<f64>,
    /// Zero is a value like any other.
    #[serde(default)]
    pub zero: bool,
}

/// A metadata array of at least `layers` entries; further ones (multi-token prediction blocks) are not looked at.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PerLayerData {
    /// Its name: in shapes it stands for the layer's value.
    pub name: String,
    pub key: String,
    #[serde(default)]
    pub kind: HyperKind,
    /// Smallest value that is not zero, for whole numbers.
    pub at_least_unless_zero: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(super) enum HyperKind {
    #[default]
    Int,
    Float,
}

/// A key that, when present, must have one of these values.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OnlyData {
    pub key: String,
    pub values: Vec<toml::Value>,
    pub why: String,
}

/// One row of the tensor table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorData {
    /// Name, with `{layer}` when there is one a layer.
    pub name: String,
    /// Dimensions in GGUF order (contiguous first).
    pub shape: Vec<Expr>,
    /// Key into the entry's `types`.
    pub role: String,
    #[serde(default)]
    pub optional: bool,
    /// Half-open range of layers that have it; all when absent.
    pub layers: Option<[Expr; 2]>,
    /// Which of those layers, by a per-layer value; all when absent.
    pub when: Option<WhenData>,
    /// Another name that some files give it.
    pub alias: Option<String>,
}

/// A condition on a layer: its value of `name` is in `is` (if given) and not in `not`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WhenData {
    pub name: String,
    pub is: Option<Vec<u64>>,
    #[serde(default)]
    pub not: Vec<u64>,
}

impl WhenData {
    pub fn holds(&self, value: u64) -> bool {
        self.is.as_ref().is_none_or(|is| is.contains(&value)) && !self.not.contains(&value)
    }
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(super) enum ClassData {
    Validated,
    Dev,
}

/// `entries/*.toml`: one artifact.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EntryData {
    pub id: String,
    pub class: ClassData,
    pub family: String,
    pub name: String,
    pub title: String,
    #[serde(default)]
    pub absent: Vec<String>,
    #[serde(default)]
    pub hyper: BTreeMap<String, toml::Value>,
    /// Per-layer values: one list entry a layer, or a single value for all.
    #[serde(default)]
    pub per_layer: BTreeMap<String, toml::Value>,
    pub tokenizer: Option<TokenizerData>,
    pub types: BTreeMap<String, Vec<TypeName>>,
    #[serde(default)]
    pub known: Vec<KnownData>,
}

/// What the metadata must say about the tokenizer.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TokenizerData {
    pub model: String,
    pub pre: String,
    pub chat_template: bool,
}

/// A file that was checked: its name for people, and the content hash.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KnownData {
    pub file: String,
    pub content: String,
}

/// A type by its upper-case name.
#[derive(Debug)]
pub(super) struct TypeName(pub GgmlType);

impl<'de> Deserialize<'de> for TypeName {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map(TypeName).map_err(serde::de::Error::custom)
    }
}
