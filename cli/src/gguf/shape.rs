//! What a synthetic model is: its metadata with a tokenizer, its tensors, and how each is filled.

use anyhow::{Context as _, ensure};
use ds4_manifests::catalog::ExpectedTensor;
use ds4_manifests::{Catalog, GgmlType, Metadata, StringTable, Value};
use ds4_settings::EXIT_USAGE;

use super::blocks::{Fill, Spread};
use crate::failure::Failure;

/// Which model is imitated: an entry of the catalog.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq)]
pub enum Family {
    /// DeepSeek V4 Flash
    DeepseekV4Flash,
    /// DeepSeek V4 PRO
    DeepseekV4Pro,
}

/// How large it is.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// The real dimensions, which the catalog takes for the real model
    Full,
    /// About 100 million weights, six layers, a vocabulary of 32768 (development model)
    Small,
    /// Three layers, one of each kind, and 288 tokens: under 2 MB in q2 (development model)
    Tiny,
}

/// How the weights are stored.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq)]
pub enum Recipe {
    /// Experts IQ2_XXS (gate, up) and Q2_K (down)
    Q2,
    /// Experts Q4_K
    Q4,
    /// Everything F32 (not with --shape full)
    F32,
}

/// Which file of the model.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq)]
pub enum Part {
    /// The model itself
    Model,
    /// Its prediction block, for `--mtp` of a server that serves the model of the same shape
    Mtp,
}

/// One tensor.
pub struct Tensor {
    /// Name.
    pub name: String,
    /// Type.
    pub ty: GgmlType,
    /// Dimensions, contiguous first.
    pub shape: Vec<u64>,
    /// Content.
    pub fill: Fill,
}

/// A whole model.
pub struct Model {
    /// Keys.
    pub metadata: Metadata,
    /// Tensors in file order.
    pub tensors: Vec<Tensor>,
}

impl Model {
    /// Plans one.
    ///
    /// # Errors
    /// F32 in full size: no machine has a use for it.
    pub fn plan(family: Family, part: Part, shape: Shape, recipe: Recipe, seed: u64) -> anyhow::Result<Self> {
        if shape == Shape::Full && recipe == Recipe::F32 && part == Part::Model {
            return Err(Failure::error(EXIT_USAGE, "--recipe f32 would be over 1 TB in full size; use q2 or q4"));
        }
        let catalog = Catalog::builtin();
        let id = match family {
            Family::DeepseekV4Flash => "deepseek-v4-flash",
            Family::DeepseekV4Pro => "deepseek-v4-pro",
        };
        let real = catalog.entry(id).context("the catalog has lost the family")?;
        let mut metadata = catalog.metadata_of(real);
        for (key, value) in smaller(shape) {
            metadata.set(&format!("deepseek4.{key}"), Value::U64(*value));
        }
        // Sliding window, ratio 4, ratio 128; PRO has no layer of the first kind.
        let first = if family == Family::DeepseekV4Flash { 0 } else { 128 };
        let schedule: &[i64] = match shape {
            Shape::Full => &[],
            Shape::Small => &[first, first, 4, 128, 4, 128],
            Shape::Tiny => &[first, 4, 128],
        };
        if !schedule.is_empty() {
            metadata.set("deepseek4.attention.compress_ratios", Value::Ints(schedule.to_vec()));
            metadata.set("deepseek4.swiglu_clamp_exp", Value::Floats(vec![10.0; schedule.len()]));
        }
        metadata.set("deepseek4.expert_weights_norm", Value::Bool(true));
        metadata.set("deepseek4.rope.scaling.type", Value::String("yarn".into()));
        let size = match shape {
            Shape::Full => "",
            Shape::Small => " small",
            Shape::Tiny => " tiny",
        };
        label(&mut metadata, format!("{}{size} (synthetic)", real.title), seed);
        let vocab = metadata.u64("deepseek4.vocab_size").context("no vocabulary")?;
        tokenizer(&mut metadata, usize::try_from(vocab)?)?;

        let entry = if shape == Shape::Full { Some(real) } else { catalog.entry("dev-deepseek4") };
        let found = catalog.expand(entry.context("the catalog has no development entry")?, &metadata)?;
        let experts = found.hyper.int("experts").context("no experts")?;
        let tensor = |t: ExpectedTensor<'_>| {
            let fill = match t.role {
                "table" => Fill::Distinct { used: t.shape[0], below: experts },
                _ => Fill::Random(spread(&t.name, t.shape[0])),
            };
            let ty = match (part, t.role) {
                // As the published block has it.
                (Part::Mtp, "mixer" | "small") => GgmlType::F32,
                _ => type_of(&t.name, t.role, shape, recipe),
            };
            Tensor { ty, name: t.name, shape: t.shape, fill }
        };
        if part == Part::Model {
            let tensors = found.tensors().into_iter().map(tensor).collect();
            return Ok(Self { metadata, tensors });
        }
        let drafter = catalog.drafter_of(&found.family.name).context("the catalog has lost the prediction block")?;
        let tensors = drafter.tensors(&found).into_iter().map(tensor).collect();
        let mut metadata = Metadata::default();
        metadata.set("general.architecture", Value::String(drafter.family.clone()));
        label(&mut metadata, format!("{}{size} MTP (synthetic)", real.title), seed);
        Ok(Self { metadata, tensors })
    }
}

/// What says that the weights mean nothing.
fn label(metadata: &mut Metadata, name: String, seed: u64) {
    metadata.set("general.name", Value::String(name));
    metadata.set("ds4.synthetic", Value::Bool(true));
    metadata.set("ds4.synthetic.seed", Value::U64(seed));
}

fn smaller(shape: Shape) -> &'static [(&'static str, u64)] {
    match shape {
        Shape::Full => &[],
        Shape::Small => &[
            ("block_count", 6),
            ("embedding_length", 512),
            ("vocab_size", 32768),
            ("context_length", 65536),
            ("attention.head_count", 8),
            ("attention.key_length", 128),
            ("attention.value_length", 128),
            ("attention.q_lora_rank", 256),
            ("attention.output_lora_rank", 128),
            ("attention.output_group_count", 4),
            ("expert_count", 16),
            ("expert_used_count", 4),
            ("expert_feed_forward_length", 512),
            ("attention.indexer.head_count", 8),
        ],
        // Quantised blocks of 256 force hidden and expert width to 256.
        Shape::Tiny => &[
            ("block_count", 3),
            ("embedding_length", 256),
            ("vocab_size", 288),
            ("context_length", 8192),
            ("attention.head_count", 4),
            ("attention.key_length", 32),
            ("attention.value_length", 32),
            ("rope.dimension_count", 16),
            ("attention.q_lora_rank", 64),
            ("attention.output_lora_rank", 32),
            ("attention.output_group_count", 2),
            ("expert_count", 4),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", 256),
            ("hash_layer_count", 1),
            ("attention.indexer.head_count", 2),
            ("attention.indexer.key_length", 64),
            ("attention.indexer.top_k", 16),
        ],
    }
}

fn type_of(name: &str, role: &str, shape: Shape, recipe: Recipe) -> GgmlType {
    match (role, recipe) {
        ("table", _) => GgmlType::I32,
        ("vector", _) | (_, Recipe::F32) => GgmlType::F32,
        ("experts", Recipe::Q2) if name.contains("down") => GgmlType::Q2_K,
        ("experts", Recipe::Q2) => GgmlType::IQ2_XXS,
        ("experts", Recipe::Q4) => GgmlType::Q4_K,
        // A shared expert as wide as one of only four would be half of a tiny file.
        ("shared", _) if shape == Shape::Tiny => GgmlType::Q4_K,
        ("shared" | "matrix", _) => GgmlType::Q8_0,
        _ => GgmlType::F16,
    }
}

/// Values that keep the state's magnitude: products with unit inputs come out near one.
fn spread(name: &str, inputs: u64) -> Spread {
    #[allow(clippy::cast_precision_loss, reason = "dimensions are small")]
    let fan_in = 1.0 / (inputs as f32).sqrt();
    let (mean, std) = match name {
        n if n.ends_with("norm.weight") => (1.0, 0.07),
        n if n.ends_with("_scale.weight") || n.ends_with("hc_head_scale") => (1.0, 0.15),
        n if n.ends_with("_base.weight") => (0.0, 0.15),
        n if n.ends_with("attn_sinks.weight") || n.ends_with("_ape.weight") => (0.0, 0.3),
        n if n.ends_with("exp_probs_b.bias") => (0.0, 0.05),
        "token_embd.weight" => (0.0, 1.0),
        // Logits with a clear first among them.
        "output.weight" => (0.0, 2.0 * fan_in),
        _ => (0.0, fan_in),
    };
    Spread { mean, std }
}

/// DeepSeek's control tokens with their ids in the real vocabulary.
const SPECIALS: [(&str, usize); 20] = [
    ("<｜begin▁of▁sentence｜>", 0),
    ("<｜end▁of▁sentence｜>", 1),
    ("<｜▁pad▁｜>", 2),
    ("<｜fim▁hole｜>", 128_800),
    ("<｜fim▁begin｜>", 128_801),
    ("<｜fim▁end｜>", 128_802),
    ("<｜User｜>", 128_803),
    ("<｜Assistant｜>", 128_804),
    ("<|EOT|>", 128_805),
    ("<think>", 128_821),
    ("</think>", 128_822),
    ("｜DSML｜", 128_825),
    ("<｜latest_reminder｜>", 128_828),
    ("<｜action｜>", 128_829),
    ("<｜query｜>", 128_830),
    ("<｜authority｜>", 128_831),
    ("<｜domain｜>", 128_832),
    ("<｜title｜>", 128_836),
    ("<｜read_url｜>", 128_845),
    ("<｜place▁holder▁no▁0｜>", 129_279),
];
const REAL_VOCAB: usize = 129_280;
/// Merges, so that there is something to merge.
const MERGES: [&str; 6] = ["t h", "th e", "i n", "e r", "a n", "Ġ t"];

/// A byte-level tokenizer: all bytes, a few merges, the control tokens (where the real vocabulary has them, counted from
/// its end; in a vocabulary that is too small, side by side at the end), and words nothing merges to in all other places.
fn tokenizer(m: &mut Metadata, vocab: usize) -> anyhow::Result<()> {
    let mut tokens: Vec<Option<String>> = vec![None; vocab];
    let mut types = vec![1_i64; vocab];
    for (i, (text, id)) in SPECIALS.iter().enumerate() {
        let id = match (*id, vocab) {
            (first @ 0..3, _) => first,
            (id, 1024..) => id - (REAL_VOCAB - vocab),
            _ => vocab - SPECIALS.len() + i,
        };
        tokens[id] = Some((*text).to_owned());
        types[id] = 3;
    }
    let merged = MERGES.iter().map(|m| m.replace(' ', ""));
    let words = (0_u32..).map(|i| {
        // Base 26, five letters: never a merge's product.
        let letter = |p: u32| char::from(b'a' + u8::try_from(i / 26_u32.pow(p) % 26).unwrap_or(0));
        format!("Ġ{}", (0..5).rev().map(letter).collect::<String>())
    });
    let mut text = (0..=255).map(|b| byte_char(b).to_string()).chain(merged).chain(words);
    let mut table = StringTable::default();
    for token in tokens {
        let token = token.or_else(|| text.next()).context("words do not end")?;
        table.push(token.as_bytes()).context("the vocabulary's text is over 4 GiB")?;
    }
    ensure!(text.next().is_some_and(|next| next.chars().count() == 6), "{vocab} tokens are too few for all bytes");
    let mut merges = StringTable::default();
    MERGES.iter().try_for_each(|merge| merges.push(merge.as_bytes())).context("merges")?;
    m.set("tokenizer.ggml.model", Value::String("gpt2".into()));
    m.set("tokenizer.ggml.pre", Value::String("joyai-llm".into()));
    m.set("tokenizer.ggml.tokens", Value::Strings(table));
    m.set("tokenizer.ggml.token_type", Value::Ints(types));
    m.set("tokenizer.ggml.merges", Value::Strings(merges));
    for (key, id) in [("bos", 0), ("eos", 1), ("padding", 2)] {
        m.set(&format!("tokenizer.ggml.{key}_token_id"), Value::U64(id));
    }
    m.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
    m.set("tokenizer.ggml.add_eos_token", Value::Bool(false));
    Ok(())
}

/// GPT-2's printable character of a byte: itself, or one of the 68 from U+0100 on in order.
fn byte_char(byte: u8) -> char {
    let itself = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if itself(byte) {
        return char::from(byte);
    }
    let before = u32::try_from((0..byte).filter(|b| !itself(*b)).count()).unwrap_or(0);
    char::from_u32(0x100 + before).unwrap_or(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(model: &Model) -> u64 {
        model.tensors.iter().map(|t| t.ty.tensor_bytes(&t.shape).unwrap()).sum()
    }

    #[test]
    fn deepseek_v4_synth_in_full_size_is_the_published_file() {
        for (recipe, size) in [(Recipe::Q2, 86_714_775_900), (Recipe::Q4, 164_628_167_004)] {
            let model = Model::plan(Family::DeepseekV4Flash, Part::Model, Shape::Full, recipe, 1).unwrap();
            assert_eq!((model.tensors.len(), bytes(&model)), (1328, size));
            let tokens = model.metadata.strings("tokenizer.ggml.tokens").unwrap();
            assert_eq!(tokens.len(), REAL_VOCAB);
            for (text, id) in SPECIALS {
                assert_eq!(tokens.get(id), Some(text.as_bytes()));
            }
        }
        assert!(Model::plan(Family::DeepseekV4Flash, Part::Model, Shape::Full, Recipe::F32, 1).is_err());
        let pro = Model::plan(Family::DeepseekV4Pro, Part::Model, Shape::Full, Recipe::Q4, 1).unwrap();
        assert_eq!(pro.tensors.len(), 1894);
    }

    #[test]
    fn deepseek_v4_synth_of_the_prediction_block_has_the_published_count_and_size() {
        let plan = |recipe| Model::plan(Family::DeepseekV4Flash, Part::Mtp, Shape::Full, recipe, 1).unwrap();
        let published = plan(Recipe::Q4);
        assert_eq!(published.tensors.len(), 32);
        // 3.80 GB with F16 mixers and router; those are 2 to 4 million values.
        assert!((3_800_000_000..3_810_000_000).contains(&bytes(&published)), "{}", bytes(&published));
        assert!(bytes(&plan(Recipe::Q2)) < bytes(&published));
        let pro = Model::plan(Family::DeepseekV4Pro, Part::Mtp, Shape::Full, Recipe::Q4, 1).unwrap();
        let shape = |m: &Model, n: &str| m.tensors.iter().find(|t| t.name == n).unwrap().shape.clone();
        assert_eq!(shape(&pro, "mtp.0.e_proj.weight"), [7168, 7168]);
    }

    #[test]
    fn deepseek_v4_synth_tokens_are_all_different_and_cover_every_byte() {
        for shape in [Shape::Tiny, Shape::Small, Shape::Full] {
            let model = Model::plan(Family::DeepseekV4Flash, Part::Model, shape, Recipe::Q2, 1).unwrap();
            let tokens = model.metadata.strings("tokenizer.ggml.tokens").unwrap();
            let different: std::collections::HashSet<&[u8]> = tokens.iter().collect();
            assert_eq!(different.len(), tokens.len(), "{shape:?}");
            assert!(SPECIALS.iter().all(|(s, _)| different.contains(s.as_bytes())));
            assert!((0..=255).all(|b| different.contains(byte_char(b).to_string().as_bytes())));
        }
        assert_eq!((byte_char(b' '), byte_char(b'\n'), byte_char(b'a'), byte_char(0xad)), ('Ġ', 'Ċ', 'a', 'Ń'));
    }

    #[test]
    fn deepseek_v4_synth_small_has_about_a_hundred_million_weights() {
        let model = Model::plan(Family::DeepseekV4Flash, Part::Model, Shape::Small, Recipe::Q2, 1).unwrap();
        let weights: u64 = model.tensors.iter().map(|t| t.shape.iter().product::<u64>()).sum();
        assert!((80_000_000..140_000_000).contains(&weights), "{weights}");
    }
}
