//! Which type each tensor is written in.

use ds4_kernels::quant::can_quantize;
use ds4_manifests::GgmlType;
use ds4_settings::EXIT_USAGE;

use crate::failure::Failure;

/// Types of all tensors, before overrides.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq)]
pub enum Recipe {
    /// Everything F32: for comparisons
    F32,
    /// Matrices F16
    F16,
    /// Matrices Q8_0; embedding, routers, compressors, indexers and mixers F16
    Q8,
    /// As q8, experts Q4_K (a published recipe)
    Q4,
    /// As q8, experts IQ2_XXS (gate, up) and Q2_K (down) (a published recipe)
    Q2,
}

/// What tensors are told apart by.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Class {
    Embedding,
    Output,
    Attention,
    Shared,
    /// Gate and up, which one kernel computes.
    Experts,
    ExpertsDown,
    Small,
    Mixer,
    /// Norms, biases, sinks: F32, and tables: I32.
    Fixed,
}

const CLASSES: &[(&str, Class)] = &[
    ("embedding", Class::Embedding),
    ("output", Class::Output),
    ("attention", Class::Attention),
    ("shared", Class::Shared),
    ("experts", Class::Experts),
    ("experts-down", Class::ExpertsDown),
    ("small", Class::Small),
    ("mixer", Class::Mixer),
];

impl Class {
    fn of(name: &str, role: &str) -> Self {
        match role {
            "embedding" => Self::Embedding,
            "matrix" if name == "output.weight" => Self::Output,
            "matrix" => Self::Attention,
            "shared" => Self::Shared,
            "experts" if name.contains("ffn_down") => Self::ExpertsDown,
            "experts" => Self::Experts,
            "small" => Self::Small,
            "mixer" => Self::Mixer,
            _ => Self::Fixed,
        }
    }
}

/// `CLASS[@FIRST[-LAST]]=TYPE`: another type for a class, perhaps in some layers only.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// As it was given.
    text: String,
    class: Class,
    layers: Option<(u64, u64)>,
    ty: GgmlType,
}

impl std::str::FromStr for Override {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let (what, ty) = s.split_once('=').ok_or("expected CLASS=TYPE or CLASS@FIRST-LAST=TYPE")?;
        let (class, layers) = match what.split_once('@') {
            None => (what, None),
            Some((class, layers)) => {
                let (first, last) = layers.split_once('-').unwrap_or((layers, layers));
                let number = |s: &str| s.parse::<u64>().map_err(|_| format!("{layers:?} is not a range of layers"));
                let range = (number(first)?, number(last)?);
                if range.0 > range.1 {
                    return Err(format!("the layers {layers} begin after their end"));
                }
                (class, Some(range))
            }
        };
        let names: Vec<&str> = CLASSES.iter().map(|(n, _)| *n).collect();
        let found = CLASSES.iter().find(|(n, _)| *n == class);
        let class = found.ok_or_else(|| format!("no class {class:?}; there are {}", names.join(", ")))?.1;
        if layers.is_some() && matches!(class, Class::Embedding | Class::Output) {
            return Err(format!("{what:?} is not in the layers"));
        }
        let ty = ty.to_uppercase().parse().ok().filter(|t| can_quantize(*t)).ok_or_else(|| {
            let able: Vec<&str> = GgmlType::ALL.iter().filter(|t| can_quantize(**t)).map(|t| t.name()).collect();
            format!("{ty:?} is not a type that is written; there are {}", able.join(", "))
        })?;
        Ok(Self { text: s.to_owned(), class, layers, ty })
    }
}

impl Override {
    fn fits(&self, class: Class, layer: Option<u64>) -> bool {
        let inside = |(first, last): (u64, u64)| layer.is_some_and(|l| (first..=last).contains(&l));
        self.class == class && self.layers.is_none_or(inside)
    }
}

/// Refuses overrides that change nothing: of layers or classes that the model does not have, and those of which a later one
/// takes every tensor.
///
/// # Errors
/// Exit code 2 with what the model has.
pub fn refuse_idle(overrides: &[Override], tensors: &[(&str, &str, Option<u64>)]) -> anyhow::Result<()> {
    let refused = |o: &Override, why: String| Err(Failure::error(EXIT_USAGE, format!("--type {}: {why}", o.text)));
    let end = tensors.iter().filter_map(|(_, _, layer)| *layer).max().map_or(0, |last| last + 1);
    for (at, o) in overrides.iter().enumerate() {
        if let Some((_, last)) = o.layers.filter(|(_, last)| *last >= end) {
            return refused(o, format!("there is no layer {last}; the model has {end}, counted from 0"));
        }
        let mut own = tensors
            .iter()
            .map(|(name, role, layer)| (Class::of(name, role), *layer))
            .filter(|(c, l)| o.fits(*c, *l))
            .peekable();
        if own.peek().is_none() {
            return refused(o, "the model has no such tensor".into());
        }
        if let Some(later) = overrides[at + 1..].iter().find(|later| own.clone().all(|(c, l)| later.fits(c, l))) {
            return refused(o, format!("has no effect, since --type {} comes later", later.text));
        }
    }
    Ok(())
}

/// The type of a tensor: the last override that fits, else the recipe's.
///
/// # Errors
/// Rows that are not whole blocks of the type.
pub fn type_of(
    recipe: Recipe,
    overrides: &[Override],
    (name, role, layer, row): (&str, &str, Option<u64>, u64),
) -> anyhow::Result<GgmlType> {
    let class = Class::of(name, role);
    let ty = match (overrides.iter().rfind(|o| o.fits(class, layer)), class, recipe) {
        (_, Class::Fixed, _) if role == "table" => GgmlType::I32,
        (_, Class::Fixed, _) => GgmlType::F32,
        (Some(o), ..) => o.ty,
        (.., Recipe::F32) => GgmlType::F32,
        (.., Recipe::F16) | (_, Class::Embedding | Class::Small | Class::Mixer, _) => GgmlType::F16,
        (_, Class::Experts | Class::ExpertsDown, Recipe::Q4) => GgmlType::Q4_K,
        (_, Class::Experts, Recipe::Q2) => GgmlType::IQ2_XXS,
        (_, Class::ExpertsDown, Recipe::Q2) => GgmlType::Q2_K,
        _ => GgmlType::Q8_0,
    };
    if ty.row_bytes(row).is_none() {
        let lever = CLASSES.iter().find(|(_, c)| *c == class).map_or("", |(n, _)| n);
        return Err(Failure::error(
            EXIT_USAGE,
            format!(
                "{name} has rows of {row}, which are not whole {ty} blocks of {}; give --type {lever}=f16 or another \
                 recipe",
                ty.block_elems()
            ),
        ));
    }
    Ok(ty)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(s: &str) -> Result<Override, String> {
        s.parse()
    }

    #[test]
    fn deepseek_v4_recipes_are_the_published_ones() {
        use ds4_manifests::Catalog;
        let catalog = Catalog::builtin();
        let flash = catalog.entry("deepseek-v4-flash").unwrap();
        let found = catalog.expand(flash, &catalog.metadata_of(flash)).unwrap();
        // Tensor bytes of the published files.
        for (recipe, size) in [(Recipe::Q2, 86_714_775_900_u64), (Recipe::Q4, 164_628_167_004)] {
            let bytes: u64 = found
                .tensors()
                .iter()
                .map(|t| {
                    let ty = type_of(recipe, &[], (&t.name, t.role, t.layer, t.shape[0])).unwrap();
                    assert!(t.types.contains(&ty), "{}: {ty}", t.name);
                    ty.tensor_bytes(&t.shape).unwrap()
                })
                .sum();
            assert_eq!(bytes, size);
        }
    }

    #[test]
    fn deepseek_v4_overrides_choose_classes_and_layers() {
        let overrides = ["experts@2-3=q4_k", "experts-down@3=Q4_K", "output=f16"].map(|s| parse(s).unwrap());
        let ty = |name: &str, role: &str, layer| type_of(Recipe::Q2, &overrides, (name, role, layer, 256)).unwrap();
        assert_eq!(ty("blk.1.ffn_up_exps.weight", "experts", Some(1)), GgmlType::IQ2_XXS);
        assert_eq!(ty("blk.2.ffn_up_exps.weight", "experts", Some(2)), GgmlType::Q4_K);
        assert_eq!(ty("blk.2.ffn_down_exps.weight", "experts", Some(2)), GgmlType::Q2_K);
        assert_eq!(ty("blk.3.ffn_down_exps.weight", "experts", Some(3)), GgmlType::Q4_K);
        assert_eq!(ty("output.weight", "matrix", None), GgmlType::F16);
        assert_eq!(ty("blk.0.attn_kv.weight", "matrix", Some(0)), GgmlType::Q8_0);
        assert_eq!(ty("output_norm.weight", "vector", None), GgmlType::F32);
        assert_eq!(ty("blk.0.ffn_gate_tid2eid.weight", "table", Some(0)), GgmlType::I32);
        let error = type_of(Recipe::Q4, &[], ("blk.0.ffn_up_exps.weight", "experts", Some(0), 64)).unwrap_err();
        assert!(error.to_string().contains("--type experts=f16"), "{error}");
        let tensors = [
            ("output.weight", "matrix", None),
            ("blk.0.ffn_up_exps.weight", "experts", Some(0)),
            ("blk.1.ffn_up_exps.weight", "experts", Some(1)),
        ];
        let idle = |given: &[&str]| {
            let overrides: Vec<Override> = given.iter().map(|s| parse(s).unwrap()).collect();
            refuse_idle(&overrides, &tensors).map_err(|e| e.to_string())
        };
        let works = ["experts=q4_k", "experts@1=q8_0", "output=f16"];
        assert_eq!(idle(&works), Ok(()));
        for (given, says) in [
            (&["experts@5-99=f16"][..], "--type experts@5-99=f16: there is no layer 99; the model has 2"),
            (&["experts@1-2=f16"], "there is no layer 2"),
            (&["shared=f16"], "no such tensor"),
            (&["experts@1=q8_0", "experts=q4_k"], "--type experts@1=q8_0: has no effect, since --type experts=q4_k"),
        ] {
            let error = idle(given).unwrap_err();
            assert!(error.contains(says), "{given:?}: {error}");
        }
        for (bad, says) in [
            ("experts", "CLASS=TYPE"),
            ("expert=q4_k", "experts-down"),
            ("experts=q6_k", "Q4_K"),
            ("experts@3-2=q4_k", "begin after"),
            ("experts@x=q4_k", "not a range"),
            ("output@1=f16", "not in the layers"),
        ] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains(says), "{bad}: {error}");
        }
    }
}
