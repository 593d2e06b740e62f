//! `ds4 ctl load`: a load with its plan and progress.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use ds4_proto::v1;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::Output;
use super::render::bytes;
use crate::client::control;
use crate::failure::Failure;

/// `ds4 ctl load`.
#[derive(clap::Args)]
pub struct LoadArgs {
    /// The GGUF file, or its first shard
    path: PathBuf,
    /// Serve it under this name [default: the catalog's]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Only print the plan: bytes needed, bytes free, and the verdict
    #[arg(long)]
    dry_run: bool,
    /// Refuse unless the content has this BLAKE3 hash
    #[arg(long, value_name = "HEX")]
    expect_blake3: Option<String>,
    /// Load again although the same content is there: a new epoch, the old one is drained
    #[arg(long)]
    reload: bool,
    /// Seconds until an unfinished load fails [default: the owner's]
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<u32>,
}

/// Exit code of a failed load: memory has its own.
pub fn exit_code(error_code: &str) -> u8 {
    if error_code.contains("memory") { ds4_settings::EXIT_MEMORY } else { ds4_settings::EXIT_MODEL }
}

fn plan_text(plan: &v1::Plan) -> String {
    format!(
        "plan: {} of weights + {} of metadata, {} stay free for the rest; {} are available ({}): {}",
        bytes(plan.weight_bytes),
        bytes(plan.metadata_bytes),
        bytes(plan.reserve_bytes),
        bytes(plan.available_bytes),
        plan.available_source,
        if plan.fits { "fits" } else { "does not fit" }
    )
}

fn progress_json(p: &v1::LoadProgress) -> Value {
    json!({
        "state": super::state_name(p.state),
        "stage": p.stage,
        "done_bytes": p.done_bytes,
        "total_bytes": p.total_bytes,
        "gib_per_s": p.gib_per_s,
        "epoch": p.epoch,
        "model": p.model,
        "error_code": p.error_code,
        "error": p.error,
        "plan": p.plan.as_ref().map(|plan| json!({
            "weight_bytes": plan.weight_bytes,
            "metadata_bytes": plan.metadata_bytes,
            "reserve_bytes": plan.reserve_bytes,
            "available_bytes": plan.available_bytes,
            "available_source": plan.available_source,
            "fits": plan.fits,
        })),
    })
}

/// Asks the owner to load and follows it to READY or FAILED.
pub(super) async fn load(dir: &Path, out: Output, args: LoadArgs) -> anyhow::Result<()> {
    // The owner has another working directory, so it must hear an absolute path.
    let path = std::path::absolute(&args.path).context("cannot make the path absolute")?;
    let request = v1::LoadRequest {
        path: path.to_str().context("the path is not UTF-8")?.into(),
        name: args.name.unwrap_or_default(),
        dry_run: args.dry_run,
        expect_blake3: args.expect_blake3.unwrap_or_default(),
        reload: args.reload,
        deadline_s: args.deadline.unwrap_or(0),
    };
    let mut progress = control::owner(dir).await?.load(request).await.map_err(control::status)?.into_inner();
    let bar = if out.json { ProgressBar::hidden() } else { byte_bar(0) };
    let mut fits = true;
    let mut last = v1::LoadProgress::default();
    while let Some(step) = progress.message().await.map_err(control::status)? {
        if out.json {
            out.object(progress_json(&step), "")?;
        }
        if let Some(plan) = &step.plan {
            fits = plan.fits;
            if !out.json {
                out.object(Value::Null, &plan_text(plan))?;
            }
        }
        bar.set_length(step.total_bytes);
        bar.set_position(step.done_bytes);
        bar.set_message(step.stage.clone());
        last = step;
    }
    bar.finish_and_clear();
    match v1::ModelState::try_from(last.state) {
        Ok(v1::ModelState::Ready) if out.json => Ok(()),
        Ok(v1::ModelState::Ready) => {
            out.object(Value::Null, &format!("{} is READY (epoch {}).", last.model, last.epoch))
        }
        Ok(v1::ModelState::Failed) => {
            Err(Failure::error(exit_code(&last.error_code), format!("{} ({})", last.error, last.error_code)))
        }
        _ if args.dry_run && fits => Ok(()),
        _ if args.dry_run => {
            Err(Failure::error(ds4_settings::EXIT_MEMORY, "the model does not fit; see the plan above"))
        }
        _ => Err(Failure::error(1, "the owner ended the load without a result")),
    }
}

/// A progress bar over bytes, drawn only on a terminal.
pub fn byte_bar(total: u64) -> ProgressBar {
    let template = "{msg:10} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_refusals_have_their_own_exit_code() {
        assert_eq!(exit_code("not_enough_memory"), 5);
        assert_eq!(exit_code("truncated_file"), 4);
    }

    #[test]
    fn the_plan_says_everything() {
        let plan = v1::Plan {
            weight_bytes: 1 << 30,
            metadata_bytes: 1 << 20,
            reserve_bytes: 2 << 30,
            available_bytes: 1 << 29,
            available_source: "MemAvailable".into(),
            fits: false,
        };
        assert_eq!(
            plan_text(&plan),
            "plan: 1.0 GiB of weights + 1.0 MiB of metadata, 2.0 GiB stay free for the rest; 512.0 MiB are available \
             (MemAvailable): does not fit"
        );
    }
}
