//! The family catalog: which artifacts are validated, and what exactly they look like.
//!
//! Two kinds of data files are compiled in. `catalog/families/<family>.toml` declares what an architecture's models have
//! in common: hyper-parameters and their metadata keys, the tensor table, the variants that are not implemented.
//! `catalog/entries/<artifact>.toml` is one artifact: exact hyper-parameters, allowed types, tokenizer, known content hashes.
//! A model that matches no entry is refused with the nearest entry and the first difference. `catalog/drafters/*.toml` are
//! companions of a family's models that are not models themselves: see [`Drafter`].
//!
//! The tensor table has one owner: the loader validates with it, a binder may bind with it, tests may synthesise with it.

mod data;
mod drafter;
mod entry;
mod expr;
mod family;

use std::collections::BTreeMap;
use std::sync::OnceLock;

pub use drafter::{Drafter, DrafterMatch};
pub use entry::{Class, Entry, Known};
pub use family::{ExpectedTensor, Family};

use crate::dtype::GgmlType;
use crate::gguf::TensorInfo;
use crate::metadata::Metadata;
use crate::weights::TensorEntry;

/// Errors of [`Catalog::identify`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    /// The metadata names no architecture.
    #[error("general.architecture is missing: this is not a model for inference (perhaps an adapter or a vocabulary)")]
    NoArchitecture,
    /// An architecture without a family.
    #[error("architecture {found:?} is not supported; supported: {}", supported.join(", "))]
    UnsupportedFamily {
        /// `general.architecture`.
        found: String,
        /// Families of this release.
        supported: Vec<String>,
    },
    /// A model of a supported family that is in no entry.
    #[error("no catalog entry matches; nearest is {nearest}: {difference}{lever}")]
    NoMatch {
        /// Entry with the fewest differing hyper-parameters.
        nearest: String,
        /// What differs first.
        difference: String,
        /// How to go on, when there is a way; begins with `; `.
        lever: &'static str,
    },
}

impl CatalogError {
    /// Stable code for gRPC, logs and scripts.
    pub fn code(&self) -> &'static str {
        match self {
            CatalogError::NoArchitecture => "no_architecture",
            CatalogError::UnsupportedFamily { .. } => "unsupported_family",
            CatalogError::NoMatch { .. } => "no_catalog_entry",
        }
    }
}

/// A hyper-parameter's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A whole number, 1 to 2^31.
    Int(u64),
    /// A finite number.
    Float(f64),
}

impl Number {
    /// The whole number, if it is one.
    pub fn int(self) -> Option<u64> {
        match self {
            Number::Int(v) => Some(v),
            Number::Float(_) => None,
        }
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Number::Int(v) => v.fmt(f),
            Number::Float(v) => v.fmt(f),
        }
    }
}

/// A model's hyper-parameters by their names in the family file (`layers`, `hidden`, `heads`, …). Every name that the
/// family declares is present.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HyperParams {
    values: BTreeMap<String, Number>,
    per_layer: BTreeMap<String, Vec<Number>>,
}

impl HyperParams {
    /// A whole-number parameter.
    pub fn int(&self, name: &str) -> Option<u64> {
        self.values.get(name)?.int()
    }

    /// A per-layer whole number (`ratio`) of one layer.
    pub fn at(&self, name: &str, layer: u64) -> Option<u64> {
        self.per_layer.get(name)?.get(usize::try_from(layer).ok()?)?.int()
    }

    /// A float parameter.
    pub fn float(&self, name: &str) -> Option<f64> {
        match self.values.get(name)? {
            Number::Float(v) => Some(*v),
            Number::Int(_) => None,
        }
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Number)> {
        self.values.iter().map(|(n, v)| (n.as_str(), *v))
    }
}

/// What the catalog looks at in a tensor.
pub trait TensorLike {
    /// Name.
    fn name(&self) -> &str;
    /// Element type.
    fn ty(&self) -> GgmlType;
    /// Dimensions, contiguous first.
    fn shape(&self) -> &[u64];
}

macro_rules! tensor_like {
    ($ty:ty) => {
        impl TensorLike for $ty {
            fn name(&self) -> &str {
                &self.name
            }
            fn ty(&self) -> GgmlType {
                self.ty
            }
            fn shape(&self) -> &[u64] {
                &self.shape
            }
        }
    };
}
tensor_like!(TensorInfo);
tensor_like!(TensorEntry);

/// A model that was recognised.
#[derive(Clone, Debug)]
pub struct Match<'a> {
    /// The entry.
    pub entry: &'a Entry,
    /// Its family.
    pub family: &'a Family,
    /// The model's hyper-parameters.
    pub hyper: HyperParams,
    /// Name to serve the model under: the entry's, or for `dev` entries one made from `general.name`.
    pub served_name: String,
}

impl Match<'_> {
    /// The tensors that the model may have, in table order, layers innermost to their row. Optional ones need not exist.
    pub fn tensors(&self) -> Vec<ExpectedTensor<'_>> {
        self.family.expected(self.entry, &self.hyper)
    }
}

/// All families and entries.
#[derive(Debug)]
pub struct Catalog {
    families: Vec<Family>,
    entries: Vec<Entry>,
    drafters: Vec<Drafter>,
}

const FAMILIES: &[&str] =
    &[include_str!("../../catalog/families/llama.toml"), include_str!("../../catalog/families/deepseek4.toml")];
const ENTRIES: &[&str] = &[
    include_str!("../../catalog/entries/smollm2-135m.toml"),
    include_str!("../../catalog/entries/smollm2-360m.toml"),
    include_str!("../../catalog/entries/dev-llama.toml"),
    include_str!("../../catalog/entries/deepseek-v4-flash.toml"),
    include_str!("../../catalog/entries/deepseek-v4-pro.toml"),
    include_str!("../../catalog/entries/dev-deepseek4.toml"),
];
const DRAFTERS: &[&str] = &[include_str!("../../catalog/drafters/deepseek4-mtp.toml")];

impl Catalog {
    /// The compiled-in catalog.
    ///
    /// # Panics
    /// When a compiled-in file is malformed, which the tests of this crate exclude.
    pub fn builtin() -> &'static Catalog {
        static BUILTIN: OnceLock<Catalog> = OnceLock::new();
        BUILTIN.get_or_init(|| {
            Catalog::from_toml(FAMILIES, ENTRIES)
                .and_then(|catalog| catalog.with_drafters(DRAFTERS))
                .expect("the compiled-in catalog is well-formed")
        })
    }

    /// A catalog from the text of family and entry files; the error is a sentence naming file content.
    pub fn from_toml(families: &[&str], entries: &[&str]) -> Result<Catalog, String> {
        let families = families.iter().map(|s| Family::from_toml(s)).collect::<Result<Vec<_>, _>>()?;
        let mut catalog = Catalog { families, entries: Vec::new(), drafters: Vec::new() };
        for text in entries {
            let entry = Entry::from_toml(text, &catalog.families)?;
            if catalog.entry(&entry.id).is_some() {
                return Err(format!("entry {} occurs twice", entry.id));
            }
            catalog.entries.push(entry);
        }
        Ok(catalog)
    }

    /// The same catalog with the kinds of drafters that these files declare.
    fn with_drafters(mut self, drafters: &[&str]) -> Result<Catalog, String> {
        self.drafters = drafters.iter().map(|s| Drafter::from_toml(s, &self)).collect::<Result<_, _>>()?;
        Ok(self)
    }

    /// Entry by id.
    pub fn entry(&self, id: &str) -> Option<&Entry> {
        self.entries.iter().find(|e| e.id == id)
    }

    /// All entries.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Family by `general.architecture`.
    pub fn family(&self, name: &str) -> Option<&Family> {
        self.families.iter().find(|f| f.name == name)
    }

    /// Metadata with the hyper-parameters of a validated entry, for tools that make such files.
    pub fn metadata_of(&self, entry: &Entry) -> Metadata {
        self.family(&entry.family).map_or_else(Metadata::default, |family| entry.metadata(family))
    }

    /// What a model with this metadata must look like to be `entry`, whose hyper-parameters are taken from the metadata and
    /// checked against the family's rules; the tokenizer and the tensors are not looked at.
    ///
    /// # Errors
    /// [`CatalogError::NoMatch`] with the first thing that is wrong.
    pub fn expand<'a>(&'a self, entry: &'a Entry, metadata: &Metadata) -> Result<Match<'a>, CatalogError> {
        let wrong = |difference: String| CatalogError::NoMatch { nearest: entry.id.clone(), difference, lever: "" };
        let family = self.family(&entry.family).ok_or(CatalogError::NoArchitecture)?;
        let readings = family.read_hyper(metadata);
        if let Some(first) = entry.hyper_differences(family, &readings).into_iter().next() {
            return Err(wrong(first));
        }
        let hyper = entry.hyper_params(family, &readings, metadata).map_err(wrong)?;
        Ok(self.found(entry, family, hyper, metadata))
    }

    /// Finds the entry that a model matches in hyper-parameters, tokenizer and every tensor's name, shape and type.
    /// `dev` entries, which take any consistent dimensions, are considered last and only with `allow_dev`.
    pub fn identify<T: TensorLike>(
        &self,
        metadata: &Metadata,
        tensors: &[T],
        allow_dev: bool,
    ) -> Result<Match<'_>, CatalogError> {
        let architecture = metadata.str("general.architecture").ok_or(CatalogError::NoArchitecture)?;
        let family = self.family(architecture).ok_or_else(|| CatalogError::UnsupportedFamily {
            found: architecture.chars().take(64).collect(),
            supported: self.families.iter().map(|f| f.name.clone()).collect(),
        })?;
        let readings = family.read_hyper(metadata);
        let mut nearest: Option<(usize, &Entry, String)> = None;
        let candidates = self.entries.iter().filter(|e| e.family == family.name);
        for entry in candidates.clone().filter(|e| e.class == Class::Validated) {
            let wrong = entry.hyper_differences(family, &readings);
            let first = match wrong.first() {
                Some(first) => first.clone(),
                None => match entry.first_difference(family, &readings, metadata, tensors) {
                    Ok(hyper) => return Ok(self.found(entry, family, hyper, metadata)),
                    Err(difference) => difference,
                },
            };
            if nearest.as_ref().is_none_or(|(fewest, _, _)| wrong.len() < *fewest) {
                nearest = Some((wrong.len(), entry, first));
            }
        }
        let mut lever = "";
        for entry in candidates.filter(|e| e.class == Class::Dev) {
            match entry.first_difference(family, &readings, metadata, tensors) {
                Ok(hyper) if allow_dev => return Ok(self.found(entry, family, hyper, metadata)),
                Ok(_) => lever = "; as a development model it is accepted with --allow-dev-models",
                Err(difference) if allow_dev => nearest = Some((0, entry, difference)),
                Err(_) => {}
            }
        }
        let (nearest, difference) = nearest.map_or_else(
            || (family.name.clone(), "the family has no validated artifact yet".to_owned()),
            |(_, entry, difference)| (entry.id.clone(), difference),
        );
        Err(CatalogError::NoMatch { nearest, difference, lever })
    }

    fn found<'a>(&'a self, entry: &'a Entry, family: &'a Family, hyper: HyperParams, metadata: &Metadata) -> Match<'a> {
        let served_name = match entry.class {
            Class::Validated => entry.name.clone(),
            Class::Dev => metadata.str("general.name").and_then(slug).unwrap_or_else(|| entry.name.clone()),
        };
        Match { entry, family, hyper, served_name }
    }
}

/// Lower-case letters, digits, dots and single dashes, at most 64; `None` when nothing is left.
fn slug(name: &str) -> Option<String> {
    let mut out = String::new();
    for c in name.chars() {
        match c.to_ascii_lowercase() {
            c @ ('a'..='z' | '0'..='9' | '.') => out.push(c),
            _ if out.ends_with('-') || out.is_empty() => {}
            _ => out.push('-'),
        }
        if out.len() == 64 {
            break;
        }
    }
    let out = out.trim_end_matches('-');
    (!out.is_empty()).then(|| out.to_owned())
}

#[cfg(test)]
mod deepseek_v4_mtp_tests;
#[cfg(test)]
mod deepseek_v4_tests;
#[cfg(test)]
mod tests;
