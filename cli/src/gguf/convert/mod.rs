//! `ds4 gguf convert`: a Hugging Face checkpoint of DeepSeek V4 as a GGUF file.
//!
//! config.json becomes metadata ([`config`]), the catalog expands that to the table of tensors, each is found in the
//! checkpoint ([`names`]), given a type ([`recipe`]), and read, encoded and written piece by piece ([`write`]). The file
//! appears under its name only after the catalog has accepted it.

mod checkpoint;
mod config;
mod encode;
mod imatrix;
mod names;
mod recipe;
mod tokenizer;
mod write;

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use ds4_manifests::catalog::Class;
use ds4_manifests::{Catalog, GgmlType, GgufModel, GgufPlan, Metadata, TensorInfo, Value};
use ds4_settings::{EXIT_MODEL, EXIT_USAGE};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use self::checkpoint::Checkpoint;
use self::imatrix::Imatrix;
use self::recipe::{Override, Recipe};
use self::write::Typed;
use crate::failure::Failure;
use crate::output::Unfinished;

/// `ds4 gguf convert`.
#[derive(clap::Args)]
#[command(
    after_help = "Reads config.json, tokenizer.json and the safetensors files (one, or shards with their index; BF16, F16, \
    F32, or FP8 and FP4 with scales) of a DeepseekV4ForCausalLM, under transformers' names or DeepSeek's. The multi-token \
    prediction block (mtp.*) is left out.\n\n\
    Classes of --type: embedding, output, attention, shared (shared experts), experts (gate and up), experts-down, small \
    (routers, compressors, indexers), mixer (hyper-connections). Norms, biases and sinks stay F32.\n\n\
    A model of the catalog's exact shape and types is served as it is; any other needs --allow-dev-models of the owner.\n\n\
    Examples:\n  \
    ds4 gguf convert --from DeepSeek-V4-Flash --recipe q2 -o flash-q2.gguf\n  \
    ds4 gguf convert --from small-v4 --recipe q2 --type experts@4-5=q4_k --type experts-down@4-5=q4_k -o mixed.gguf"
)]
pub struct ConvertArgs {
    /// Directory of the checkpoint
    #[arg(long, value_name = "DIR")]
    from: PathBuf,
    /// Types of the weights
    #[arg(long, value_enum)]
    recipe: Recipe,
    /// Another type for a class of tensors, perhaps in some layers: CLASS=TYPE or CLASS@FIRST-LAST=TYPE; the last one counts
    #[arg(long = "type", value_name = "CLASS=TYPE")]
    types: Vec<Override>,
    /// Importance matrix (GGUF, as llama.cpp's tool writes it) that Q4_K, Q2_K and IQ2_XXS are weighted by
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Name of the model (general.name) [default: that of the directory]
    #[arg(long)]
    name: Option<String>,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    /// Threads that encode [default: the CPUs that this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: Option<u32>,
}

/// An error about the checkpoint.
fn bad(message: String) -> anyhow::Error {
    Failure::error(EXIT_MODEL, message)
}

/// Runs it.
pub fn convert(args: &ConvertArgs) -> anyhow::Result<()> {
    let shown = args.output.display();
    let checkpoint = Checkpoint::open(&args.from)?;
    refuse_inputs(args)?;
    // Before the work, and while it is written beside its name.
    let output = Unfinished::begin(&args.output, args.force)?;
    let config = checkpoint.json("config.json")?;
    let config = config.ok_or_else(|| bad(format!("{} has no config.json", args.from.display())))?;
    let mut metadata = describe(args, &checkpoint, &config)?;
    let imatrix = args.imatrix.as_deref().map(Imatrix::open).transpose()?;
    if let (Some(imatrix), Some(path)) = (&imatrix, &args.imatrix) {
        imatrix.describe(path, &mut metadata);
    }

    let catalog = Catalog::builtin();
    let dev = catalog.entry("dev-deepseek4").context("the catalog has lost its development entry")?;
    let table = catalog.expand(dev, &metadata).map_err(|e| bad(format!("config.json: {e}")))?;
    let experts = table.hyper.int("experts").context("no experts")?;
    let resolved = names::resolve(&checkpoint, &table.tensors())?;
    let planned = resolved.tensors.iter().map(|t| (t.name.as_str(), t.role.as_str(), t.layer));
    recipe::refuse_idle(&args.types, &planned.collect::<Vec<_>>())?;
    if resolved.drafter > 0 {
        ds4_os::say!("{} tensors of the multi-token prediction block are left out", resolved.drafter);
    }
    let mut tensors = Vec::new();
    let mut unweighted = 0;
    for planned in resolved.tensors {
        let about = (planned.name.as_str(), planned.role.as_str(), planned.layer, planned.shape[0]);
        let ty = recipe::type_of(args.recipe, &args.types, about)?;
        let mut importance = None;
        if let (Some(imatrix), GgmlType::Q4_K | GgmlType::Q2_K | GgmlType::IQ2_XXS) = (&imatrix, ty) {
            importance = imatrix.of(&planned.name, &planned.shape)?;
            unweighted += usize::from(importance.is_none());
        }
        tensors.push(Typed { planned, ty, importance });
    }
    if unweighted > 0 {
        ds4_os::say!("the importance matrix does not have {unweighted} of the tensors; they are encoded without one");
    }
    let layout: Vec<(&str, GgmlType, &[u64])> =
        tensors.iter().map(|t| (t.planned.name.as_str(), t.ty, t.planned.shape.as_slice())).collect();
    let plan = GgufPlan::new(&metadata, &layout)?;
    // Refused before the work, not after it.
    identify(&metadata, &infos(&tensors, &plan))?;

    let threads = match args.threads {
        Some(n) => usize::try_from(n)?,
        None => std::thread::available_parallelism()?.get(),
    };
    let begun = Instant::now();
    let bar = progress(plan.tensors.iter().map(|(_, len)| len).sum());
    write::write(output.file(), &plan, &tensors, (&checkpoint, experts), threads, &bar)
        .inspect_err(|_| bar.abandon())
        .with_context(|| format!("{shown} was not written"))?;
    bar.finish_and_clear();
    output.file().sync_all().with_context(|| format!("cannot write {shown}"))?;

    let model = GgufModel::open(output.path()).context("the written file cannot be read back")?;
    let class = identify(&model.metadata, &model.tensors).context("the written file is refused")?;
    output.finish()?;
    ds4_os::say!(
        "{shown}: {} tensors, {} in {:.1} s{}",
        tensors.len(),
        HumanBytes(plan.file_len),
        begun.elapsed().as_secs_f64(),
        if class == Class::Dev { "; a development model: serve it with --allow-dev-models" } else { "" }
    );
    Ok(())
}

/// Refuses to write over a file that is read: one of the checkpoint's, under whatever name, or the importance matrix.
fn refuse_inputs(args: &ConvertArgs) -> anyhow::Result<()> {
    let identity = |path: &Path| path.metadata().ok().map(|m| (m.dev(), m.ino()));
    let Some(output) = identity(&args.output) else { return Ok(()) };
    let listed = args.from.read_dir().with_context(|| format!("cannot list {}", args.from.display()))?;
    // Of a checkpoint's directory everything may be read but an earlier result.
    let files = listed.flatten().map(|e| e.path()).filter(|p| p.extension().is_none_or(|e| e != "gguf"));
    let input = files.chain(args.imatrix.clone()).find(|p| identity(p) == Some(output));
    match input {
        Some(input) => {
            let (output, input) = (args.output.display(), input.display());
            let why = format!("-o {output} is an input of the conversion ({input}); give another file");
            Err(Failure::error(EXIT_USAGE, why))
        }
        None => Ok(()),
    }
}

/// The file's metadata.
fn describe(args: &ConvertArgs, checkpoint: &Checkpoint, config: &serde_json::Value) -> anyhow::Result<Metadata> {
    let mut metadata = config::metadata(config)?;
    let directory = args.from.canonicalize().unwrap_or_else(|_| args.from.clone());
    let own = directory.file_name().map(|n| n.to_string_lossy().into_owned());
    let name = args.name.clone().or(own).unwrap_or_else(|| "DeepSeek V4".into());
    metadata.set("general.name", Value::String(name));
    metadata.set("general.quantization_version", Value::U64(2));
    tokenizer::add(&mut metadata, checkpoint, config)?;
    Ok(metadata)
}

fn infos(tensors: &[Typed], plan: &GgufPlan) -> Vec<TensorInfo> {
    let info = |(t, (offset, len)): (&Typed, &(u64, u64))| TensorInfo {
        name: t.planned.name.clone(),
        ty: t.ty,
        shape: t.planned.shape.clone(),
        shard: 0,
        offset: *offset,
        len: *len,
    };
    tensors.iter().zip(&plan.tensors).map(info).collect()
}

/// Whether the catalog takes such a file, and as what.
fn identify(metadata: &Metadata, tensors: &[TensorInfo]) -> anyhow::Result<Class> {
    let found = Catalog::builtin().identify(metadata, tensors, true);
    found.map(|m| m.entry.class).map_err(|e| Failure::error(EXIT_USAGE, format!("no engine takes such a file: {e}")))
}

fn progress(bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("convert {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    let bar = ProgressBar::new(bytes);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    /// What a conversion of the real model would write, without its weights: the catalog takes it for the published file.
    #[test]
    fn deepseek_v4_a_converted_flash_is_the_catalogs_flash() {
        let catalog = Catalog::builtin();
        let flash = config::tests::saved();
        let mut metadata = config::metadata(&flash).unwrap();
        let words: Map<String, serde_json::Value> = (0..129_280).map(|i| (format!("w{i}"), json!(i))).collect();
        let mut file = tokenizer::tests::file();
        file["model"]["vocab"] = words.into();
        file["added_tokens"] = json!([]);
        tokenizer::from_json(&mut metadata, &file, 129_280).unwrap();
        let dev = catalog.entry("dev-deepseek4").unwrap();
        let found = catalog.expand(dev, &metadata).unwrap();
        let tensors = found.tensors();
        assert_eq!(tensors.len(), 1328);
        for (recipe, ok) in [(Recipe::Q2, true), (Recipe::Q4, true), (Recipe::Q8, false), (Recipe::F16, false)] {
            let info = |t: &ds4_manifests::catalog::ExpectedTensor<'_>| TensorInfo {
                name: t.name.clone(),
                ty: recipe::type_of(recipe, &[], (&t.name, t.role, t.layer, t.shape[0])).unwrap(),
                shape: t.shape.clone(),
                shard: 0,
                offset: 0,
                len: 0,
            };
            let infos: Vec<TensorInfo> = tensors.iter().map(info).collect();
            let entry = catalog.identify(&metadata, &infos, false).ok().map(|m| m.entry.id.as_str());
            assert_eq!(entry, ok.then_some("deepseek-v4-flash"), "{recipe:?}");
            assert_eq!(identify(&metadata, &infos).unwrap(), if ok { Class::Validated } else { Class::Dev });
        }
    }
}
