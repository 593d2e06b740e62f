//! Files that belong to a base model and cannot be served alone: prediction blocks that guess tokens for it.
//!
//! `catalog/drafters/*.toml` declares the tensor table of one kind, in the hyper-parameters of the base family. Such files carry
//! no metadata worth checking, so their kind is told by their tensors' names. Which base they fit is decided by every shape:
//! against a validated entry here, and for any base (development models included) by [`Drafter::difference`].

use std::collections::BTreeMap;

use serde::Deserialize;

use super::data::TypeName;
use super::expr::Expr;
use super::{Catalog, CatalogError, Class, ExpectedTensor, HyperParams, Match, Number, TensorLike};
use crate::dtype::GgmlType;
use crate::metadata::Metadata;

/// `drafters/*.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DrafterData {
    family: String,
    /// Family of the models that it guesses for.
    base: String,
    /// What all its tensors' names begin with.
    prefix: String,
    /// Added to the base's name for its own.
    suffix: String,
    #[serde(default)]
    same_type: Vec<[String; 2]>,
    /// Types by role, for validated bases and for development models.
    validated: BTreeMap<String, Vec<TypeName>>,
    dev: BTreeMap<String, Vec<TypeName>>,
    #[serde(rename = "tensor")]
    tensors: Vec<Row>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    shape: Vec<Expr>,
    role: String,
}

type Types = BTreeMap<String, Vec<GgmlType>>;

/// One kind of drafter.
#[derive(Debug)]
pub struct Drafter {
    /// Its own family, e.g. `deepseek4-mtp`.
    pub family: String,
    /// Family of its bases.
    pub base: String,
    prefix: String,
    suffix: String,
    same_type: Vec<[String; 2]>,
    validated: Types,
    dev: Types,
    rows: Vec<Row>,
}

/// A drafter that was recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrafterMatch<'a> {
    /// Its family.
    pub family: &'a str,
    /// Id in the place of a catalog entry's, e.g. `deepseek-v4-flash-mtp`.
    pub artifact: String,
    /// Promise: that of the base.
    pub class: Class,
    /// Name that the owner holds it under.
    pub name: String,
}

impl Drafter {
    pub(super) fn from_toml(text: &str, catalog: &Catalog) -> Result<Self, String> {
        let data: DrafterData = toml::from_str(text).map_err(|e| format!("drafter file: {e}"))?;
        let fail = |what: String| Err(format!("drafter {}: {what}", data.family));
        let Some(base) = catalog.family(&data.base) else { return fail(format!("base {:?} is unknown", data.base)) };
        for row in &data.tensors {
            let unknown = row.shape.iter().flat_map(Expr::names).find(|n| base.key(n).is_none());
            if let Some(unknown) = unknown {
                return fail(format!("the row of {:?} uses unknown {unknown:?}", row.name));
            }
            if !row.name.starts_with(&data.prefix) {
                return fail(format!("{:?} does not begin with {:?}", row.name, data.prefix));
            }
            if !data.validated.contains_key(&row.role) || !data.dev.contains_key(&row.role) {
                return fail(format!("no types for role {:?}", row.role));
            }
        }
        let row = |n: &String| data.tensors.iter().any(|t| t.name == *n);
        if let Some(unknown) = data.same_type.iter().flatten().find(|n| !row(n)) {
            return fail(format!("same_type names unknown row {unknown:?}"));
        }
        let types = |t: BTreeMap<String, Vec<TypeName>>| -> Types {
            t.into_iter().map(|(role, list)| (role, list.into_iter().map(|t| t.0).collect())).collect()
        };
        Ok(Self {
            family: data.family,
            base: data.base,
            prefix: data.prefix,
            suffix: data.suffix,
            same_type: data.same_type,
            validated: types(data.validated),
            dev: types(data.dev),
            rows: data.tensors,
        })
    }

    /// Whether these are the tensors of such a file, by their names.
    pub fn recognises<T: TensorLike>(&self, tensors: &[T]) -> bool {
        !tensors.is_empty() && tensors.iter().all(|t| t.name().starts_with(&self.prefix))
    }

    fn types(&self, class: Class, role: &str) -> &[GgmlType] {
        let types = match class {
            Class::Validated => &self.validated,
            Class::Dev => &self.dev,
        };
        types.get(role).map_or(&[], Vec::as_slice)
    }

    /// Its tensors for `base`, in table order.
    pub fn tensors(&self, base: &Match<'_>) -> Vec<ExpectedTensor<'_>> {
        self.expected(&base.hyper, base.entry.class)
    }

    fn expected(&self, hyper: &HyperParams, class: Class) -> Vec<ExpectedTensor<'_>> {
        let shape = |row: &Row| row.shape.iter().map(|e| e.value(&hyper.values)).collect::<Option<Vec<u64>>>();
        let rows = self.rows.iter().filter_map(|row| Some((row, shape(row)?)));
        rows.map(|(row, shape)| ExpectedTensor {
            name: row.name.clone(),
            shape,
            alias: None,
            types: self.types(class, &row.role),
            optional: false,
            layer: None,
            role: &row.role,
        })
        .collect()
    }

    /// The first thing in which `tensors` differ from the drafter of `base`.
    pub fn difference<T: TensorLike>(&self, base: &Match<'_>, tensors: &[T]) -> Option<String> {
        if base.family.name != self.base {
            return Some(format!("it is for models of family {}, not {}", self.base, base.family.name));
        }
        self.compare(base.entry.class, tensors, &|row| row.shape.iter().map(|e| e.value(&base.hyper.values)).collect())
    }

    /// Compares with the table, each row's shape given by `shape`.
    fn compare<T: TensorLike>(
        &self,
        class: Class,
        tensors: &[T],
        shape: &dyn Fn(&Row) -> Option<Vec<u64>>,
    ) -> Option<String> {
        let mut rest: BTreeMap<&str, &T> = tensors.iter().map(|t| (t.name(), t)).collect();
        for row in &self.rows {
            let Some(found) = rest.remove(row.name.as_str()) else {
                return Some(format!("tensor {} is missing", row.name));
            };
            match shape(row) {
                Some(shape) if shape == found.shape() => {}
                Some(shape) => {
                    let found = found.shape();
                    return Some(format!("tensor {} has shape {found:?}, expected {shape:?}", row.name));
                }
                None => return Some(format!("tensor {} fits no dimensions of its base", row.name)),
            }
            let allowed = self.types(class, &row.role);
            if !allowed.contains(&found.ty()) {
                let allowed: Vec<&str> = allowed.iter().map(|t| t.name()).collect();
                return Some(format!(
                    "tensor {} has type {}, expected one of {}",
                    row.name,
                    found.ty(),
                    allowed.join(", ")
                ));
            }
        }
        let ty = |name: &String| tensors.iter().find(|t| t.name() == *name).map(|t| t.ty());
        for [a, b] in &self.same_type {
            if let (Some(x), Some(y)) = (ty(a), ty(b))
                && x != y
            {
                return Some(format!("tensor {b} has type {y}, expected that of {a}, {x}"));
            }
        }
        let extra = tensors.iter().find(|t| rest.contains_key(t.name()))?;
        Some(format!("tensor {:?} is not in the table of {}", extra.name(), self.family))
    }

    /// The first inconsistency of a drafter whose base is not known: a dimension is what the first row with it says.
    fn inconsistency<T: TensorLike>(&self, tensors: &[T]) -> Option<String> {
        let mut names: BTreeMap<String, Number> = BTreeMap::new();
        let mut exprs: BTreeMap<&str, u64> = BTreeMap::new();
        for row in &self.rows {
            let Some(found) = tensors.iter().find(|t| t.name() == row.name) else { continue };
            for (expr, &size) in row.shape.iter().zip(found.shape()) {
                let text = expr.text();
                if expr.names().any(|n| n == text) {
                    names.entry(text.to_owned()).or_insert(Number::Int(size));
                }
                exprs.entry(text).or_insert(size);
            }
        }
        self.compare(Class::Dev, tensors, &|row| {
            let size = |e: &Expr| {
                let known = e.names().all(|n| names.contains_key(n));
                if known { e.value(&names) } else { exprs.get(e.text()).copied() }
            };
            row.shape.iter().map(size).collect()
        })
    }
}

impl Catalog {
    /// The kind of drafter with this family name.
    pub fn drafter(&self, family: &str) -> Option<&Drafter> {
        self.drafters.iter().find(|d| d.family == family)
    }

    /// The kind of drafter for models of `family`.
    pub fn drafter_of(&self, family: &str) -> Option<&Drafter> {
        self.drafters.iter().find(|d| d.base == family)
    }

    /// Recognises a drafter's file: `None` when it is none. Development ones need `allow_dev`.
    ///
    /// # Errors
    /// [`CatalogError::NoMatch`] when it is one but fits no base, with the first difference from the nearest.
    pub fn identify_drafter<T: TensorLike>(
        &self,
        metadata: &Metadata,
        tensors: &[T],
        allow_dev: bool,
    ) -> Option<Result<DrafterMatch<'_>, CatalogError>> {
        let drafter = self.drafters.iter().find(|d| d.recognises(tensors))?;
        let mut nearest: Option<(usize, String, String)> = None;
        for entry in self.entries.iter().filter(|e| e.family == drafter.base && e.class == Class::Validated) {
            let hyper = entry.own_hyper();
            let shape = |row: &Row| row.shape.iter().map(|e| e.value(&hyper.values)).collect();
            let artifact = format!("{}{}", entry.id, drafter.suffix);
            match drafter.compare(Class::Validated, tensors, &shape) {
                None => {
                    let name = format!("{}{}", entry.name, drafter.suffix);
                    return Some(Ok(DrafterMatch { family: &drafter.family, artifact, class: Class::Validated, name }));
                }
                Some(difference) => {
                    let expected = drafter.expected(&hyper, Class::Validated);
                    let wrong = expected.iter().filter(|e| !tensors.iter().any(|t| fits(e, t))).count();
                    if nearest.as_ref().is_none_or(|(fewest, ..)| wrong < *fewest) {
                        nearest = Some((wrong, artifact, difference));
                    }
                }
            }
        }
        let artifact = format!("dev-{}", drafter.family);
        let mut lever = "";
        match drafter.inconsistency(tensors) {
            None if allow_dev => {
                let name = metadata.str("general.name").and_then(super::slug).unwrap_or_else(|| artifact.clone());
                return Some(Ok(DrafterMatch { family: &drafter.family, artifact, class: Class::Dev, name }));
            }
            None => lever = "; as a development model it is accepted with --allow-dev-models",
            Some(difference) if allow_dev => nearest = Some((0, artifact, difference)),
            Some(_) => {}
        }
        let (_, nearest, difference) = nearest.unwrap_or((0, drafter.family.clone(), "it has no base".into()));
        Some(Err(CatalogError::NoMatch { nearest, difference, lever }))
    }
}

fn fits<T: TensorLike>(expected: &ExpectedTensor<'_>, found: &T) -> bool {
    found.name() == expected.name && found.shape() == expected.shape && expected.types.contains(&found.ty())
}
