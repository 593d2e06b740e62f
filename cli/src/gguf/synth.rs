//! `ds4 gguf synth`: writes a planned model, many threads at once, each its own pieces of the file.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use ds4_manifests::{GgmlType, GgufPlan};

use super::blocks::{Fill, fill, key};
use super::shape::{Family, Model, Part, Recipe, Shape, Tensor};
use crate::output::Unfinished;

/// `ds4 gguf synth`.
#[derive(clap::Args)]
#[command(
    after_help = "The file says that it is synthetic (`ds4.synthetic`, and in its name), and a worker says so in its log.\n\
    The same flags and seed give the same bytes. Shapes other than full need `--allow-dev-models` of the owner.\n\n\
    Example:\n  ds4 gguf synth --shape tiny --recipe q2 -o tiny-v4.gguf"
)]
pub struct SynthArgs {
    /// Model to imitate
    #[arg(long, value_enum, default_value_t = Family::DeepseekV4Flash)]
    family: Family,
    /// File to make of it
    #[arg(long, value_enum, default_value_t = Part::Model)]
    part: Part,
    /// Dimensions
    #[arg(long, value_enum)]
    shape: Shape,
    /// Types of the weights
    #[arg(long, value_enum, default_value_t = Recipe::Q2)]
    recipe: Recipe,
    /// Start of the random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    /// Threads that write [default: the CPUs that this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: Option<u32>,
}

/// Bytes that a thread makes and writes at a time: enough for the system call to vanish, few enough for the cache.
const PIECE: u64 = 1 << 20;

/// Runs it.
pub fn synth(args: &SynthArgs) -> anyhow::Result<()> {
    let model = Model::plan(args.family, args.part, args.shape, args.recipe, args.seed)?;
    let table: Vec<(&str, GgmlType, &[u64])> =
        model.tensors.iter().map(|t| (t.name.as_str(), t.ty, t.shape.as_slice())).collect();
    let plan = GgufPlan::new(&model.metadata, &table)?;
    let path = &args.output;
    let shown = path.display();
    let output = Unfinished::begin(path, args.force)?;
    let threads = match args.threads {
        Some(n) => usize::try_from(n)?,
        None => std::thread::available_parallelism()?.get(),
    };
    let begun = Instant::now();
    write(output.file(), &model, &plan, args.seed, threads)
        .with_context(|| format!("cannot write {shown} ({:.2} GiB); is there room for it?", gib(plan.file_len)))?;
    output.finish()?;
    let seconds = begun.elapsed().as_secs_f64();
    ds4_os::say!(
        "{shown}: {} tensors, {} bytes, {:.2} GiB/s; the weights are random: {}",
        model.tensors.len(),
        plan.file_len,
        gib(plan.file_len) / seconds,
        model.metadata.str("general.name").unwrap_or_default(),
    );
    Ok(())
}

fn gib(bytes: u64) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "for people")]
    let bytes = bytes as f64;
    bytes / f64::from(1_u32 << 30)
}

/// A run of whole blocks (of rows, for tables) of one tensor.
struct Piece<'a> {
    tensor: &'a Tensor,
    /// Number of its first block.
    first: u64,
    offset: u64,
    len: u64,
}

fn pieces<'a>(model: &'a Model, plan: &GgufPlan) -> Vec<Piece<'a>> {
    let mut out = Vec::new();
    for (tensor, (start, len)) in model.tensors.iter().zip(&plan.tensors) {
        let unit = match tensor.fill {
            Fill::Random(_) => tensor.ty.block_bytes(),
            Fill::Distinct { used, .. } => used * 4,
        };
        let step = (PIECE / unit).max(1) * unit;
        let mut at = 0;
        while at < *len {
            let here = step.min(len - at);
            out.push(Piece { tensor, first: at / unit, offset: start + at, len: here });
            at += here;
        }
    }
    out
}

fn write(file: &File, model: &Model, plan: &GgufPlan, seed: u64, threads: usize) -> anyhow::Result<()> {
    file.set_len(plan.file_len)?;
    file.write_all_at(&plan.header, 0)?;
    let pieces = pieces(model, plan);
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let work = || -> anyhow::Result<()> {
        let mut buffer = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let Some(p) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            buffer.resize(usize::try_from(p.len)?, 0);
            fill(p.tensor.ty, p.tensor.fill, key(&p.tensor.name, seed), p.first, &mut buffer);
            file.write_all_at(&buffer, p.offset).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| Err(anyhow!("a writing thread panicked"))))
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ds4_manifests::{Catalog, GgufModel};

    use super::*;

    fn args(dir: &Path, name: &str, recipe: Recipe, threads: u32) -> SynthArgs {
        SynthArgs {
            family: Family::DeepseekV4Flash,
            part: Part::Model,
            shape: Shape::Tiny,
            recipe,
            seed: 7,
            output: dir.join(name),
            force: false,
            threads: Some(threads),
        }
    }

    #[test]
    fn deepseek_v4_synth_files_are_accepted_small_and_the_same_for_any_number_of_threads() {
        let dir = tempfile::tempdir().unwrap();
        for recipe in [Recipe::Q2, Recipe::Q4, Recipe::F32] {
            let (one, four) = (args(dir.path(), "1", recipe, 1), args(dir.path(), "4", recipe, 4));
            synth(&one).unwrap();
            synth(&four).unwrap();
            let bytes = std::fs::read(&one.output).unwrap();
            assert!(bytes == std::fs::read(&four.output).unwrap());
            assert!(recipe != Recipe::Q2 || bytes.len() <= 2_000_000, "{}", bytes.len());
            let model = GgufModel::open(&one.output).unwrap();
            assert_eq!(model.metadata.bool("ds4.synthetic"), Some(true));
            let found = Catalog::builtin().identify(&model.metadata, &model.tensors, true).unwrap();
            assert_eq!(
                (found.entry.id.as_str(), found.served_name.as_str()),
                ("dev-deepseek4", "deepseek-v4-flash-tiny-synthetic")
            );
            assert!(synth(&one).unwrap_err().to_string().contains("--force"));
            std::fs::remove_file(&one.output).unwrap();
            std::fs::remove_file(&four.output).unwrap();
        }
    }

    #[test]
    fn deepseek_v4_synth_prediction_blocks_fit_the_model_of_the_same_flags() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::builtin();
        for shape in [Shape::Tiny, Shape::Small] {
            let model = SynthArgs { shape, ..args(dir.path(), "model", Recipe::Q2, 2) };
            let block = SynthArgs { part: Part::Mtp, shape, ..args(dir.path(), "block", Recipe::Q2, 2) };
            synth(&model).unwrap();
            synth(&block).unwrap();
            let (model, block) = (GgufModel::open(&model.output).unwrap(), GgufModel::open(&block.output).unwrap());
            let base = catalog.identify(&model.metadata, &model.tensors, true).unwrap();
            let found = catalog.identify_drafter(&block.metadata, &block.tensors, true).unwrap().unwrap();
            assert_eq!(found.family, "deepseek4-mtp");
            assert!(found.name.starts_with("deepseek-v4-flash-") && found.name.ends_with("-mtp-synthetic"));
            assert_eq!(catalog.drafter(found.family).unwrap().difference(&base, &block.tensors), None);
            assert!(catalog.identify_drafter(&model.metadata, &model.tensors, true).is_none());
            std::fs::remove_file(dir.path().join("model")).unwrap();
            std::fs::remove_file(dir.path().join("block")).unwrap();
        }
    }

    #[test]
    fn deepseek_v4_synth_names_the_file_that_it_cannot_write() {
        let error = synth(&args(Path::new("/nonexistent"), "x.gguf", Recipe::Q2, 1)).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/x.gguf"), "{error}");
    }
}
