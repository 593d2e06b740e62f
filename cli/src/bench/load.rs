//! `ds4 bench load`: how fast the owner takes a model in, stage by stage.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::Context as _;
use ds4_proto::v1;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde_json::{Value, json};

use super::rig::{Rig, RigArgs};
use super::stats::median;
use crate::client::control;
use crate::failure::Failure;

/// `ds4 bench load`.
#[derive(clap::Args)]
pub struct LoadBenchArgs {
    #[command(flatten)]
    rig: RigArgs,
    /// Loads; medians are reported
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Warn when a stage is slower than this many GiB/s
    #[arg(long, value_name = "GIB_S", default_value_t = 0.5)]
    floor: f64,
    /// Ask the kernel to forget the file before each load, so that the disk is measured and not the page cache
    #[arg(long)]
    cold: bool,
    /// After the last load, attach and detach this many times and compare all bytes with the owner's hashes
    #[arg(long, value_name = "N")]
    attach_cycles: Option<u32>,
}

/// Loads, measures, unloads, again.
pub async fn load(args: &LoadBenchArgs) -> anyhow::Result<(Value, String)> {
    let conditions = args.rig.conditions()?;
    let path = args.rig.model()?;
    let rig = Rig::start(&args.rig, false).await?;
    let mut stages: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut seconds = Vec::new();
    let mut bytes = 0;
    let mut attach = Value::Null;
    for left in (0..args.repeats).rev() {
        if args.cold {
            forget(&path)?;
        }
        let begun = Instant::now();
        let request = v1::LoadRequest { path: path.to_string_lossy().into_owned(), ..v1::LoadRequest::default() };
        let mut steps = control::owner(rig.dir()).await?.load(request).await.map_err(control::status)?.into_inner();
        let mut model = None;
        let mut reported: BTreeMap<String, f64> = BTreeMap::new();
        while let Some(step) = steps.message().await.map_err(control::status)? {
            if step.gib_per_s > 0.0 {
                reported.insert(step.stage.clone(), step.gib_per_s);
            }
            bytes = bytes.max(step.total_bytes);
            match step.state() {
                v1::ModelState::Ready => model = Some(step.model),
                v1::ModelState::Failed => {
                    let code = crate::ctl::load_exit_code(&step.error_code);
                    return Err(Failure::error(code, format!("{} ({})", step.error, step.error_code)));
                }
                _ => {}
            }
        }
        seconds.push(begun.elapsed().as_secs_f64());
        for (stage, speed) in reported {
            stages.entry(stage).or_default().push(speed);
        }
        let model = model.context("the owner ended the load without READY")?;
        if let (0, Some(cycles)) = (left, args.attach_cycles) {
            attach = rig.self_test(cycles)?;
        }
        let request = v1::UnloadRequest { model, epoch: 0, deadline_s: 10 };
        control::owner(rig.dir()).await?.unload(request).await.map_err(control::status)?;
    }

    let stages: BTreeMap<String, f64> = stages.into_iter().map(|(stage, v)| (stage, median(&v))).collect();
    let slow: Vec<String> = stages
        .iter()
        .filter(|(_, speed)| **speed < args.floor)
        .map(|(stage, speed)| {
            format!("stage `{stage}` runs at {speed:.2} GiB/s, below the floor of {} GiB/s", args.floor)
        })
        .collect();
    for warning in &slow {
        ds4_os::say!("warning: {warning}");
    }
    let text = stages.iter().map(|(stage, speed)| format!("{stage:10} {speed:6.2} GiB/s\n")).collect::<String>()
        + &format!("load       {:6.3} s\n", median(&seconds))
        + &attach_text(&attach);
    let value = json!({
        "gib_per_s": stages,
        "load_s": median(&seconds),
        "load_s_each": seconds,
        "attach": attach,
        "bytes": bytes,
        "floor_gib_per_s": args.floor,
        "warnings": slow,
        "cold": args.cold,
        "repeats": args.repeats,
        "conditions": conditions,
    });
    Ok((value, text))
}

fn attach_text(attach: &Value) -> String {
    match attach.get("attach_median_ms").and_then(Value::as_f64) {
        Some(ms) => format!("attach     {ms:6.2} ms, the median of {} cycles\n", attach["cycles"]),
        None => String::new(),
    }
}

fn forget(path: &Path) -> anyhow::Result<()> {
    let file = File::open(path)?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).context("posix_fadvise")
}
