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
    #[serde(default)]
    pub multiples: Vec<[Expr; 2]>,
    #[serde(default)]
    pub at_most: Vec<[Expr; 2]>,
    #[serde(default)]
    pub equal: Vec<[Expr; 2]>,
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
