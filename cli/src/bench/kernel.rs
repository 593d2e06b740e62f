//! `ds4 bench kernel`: one family of kernels, checked against its reference and timed. The worker's binary has the kernels and does it;
//! this shows what it says.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::Context as _;
use serde_json::Value;

use crate::failure::Failure;
use crate::serve::plan::sibling;

/// `ds4 bench kernel`.
#[derive(clap::Args)]
#[command(
    after_help = "Each line is one shape and number of rows: microseconds (median), bytes and FLOPs a second (a multiply-add is two), \
    on devices whose limits are known their share of these, and the largest error beside its bound: of products against exact \
    arithmetic, in units of the bound, and of other operations against the CPU (on the CPU itself: against its scalar instructions). \
    A line fails when the error is above its bound, or when a row has other bits in a launch of its own. Inputs are random and \
    fresh; --seed repeats a run. Figures are printed at the end, and each family is named on standard error when its turn comes: `all` \
    at full size takes minutes on a CPU.\n\n\
    Exit codes: 0 all passed; 1 a line failed; 2 bad usage, or no such device."
)]
pub struct KernelArgs {
    /// Family of kernels, `all`, or `list`
    #[arg(value_name = "FAMILY")]
    family: String,
    /// Numbers of rows
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,4,16,512,2048",
        value_parser = clap::value_parser!(u32).range(1..=4096))]
    rows: Vec<u32>,
    /// Where: auto is the first CUDA device that there is, else the CPU
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = ["auto", "cpu", "cuda"])]
    device: String,
    /// Shapes of a few hundred elements instead of DeepSeek V4 Flash's: a check, not a measurement
    #[arg(long)]
    tiny: bool,
    /// Of the random inputs [default: another one each time]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Compute threads of the CPU [default: the CPUs that this process may use]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
}

/// Has the worker's binary do it. `failed` of the result is the number of lines that did not pass.
pub fn kernel(args: &KernelArgs) -> anyhow::Result<(Value, String)> {
    let mut command = Command::new(sibling("ds4-worker")?);
    let rows: Vec<String> = args.rows.iter().map(u32::to_string).collect();
    command.args([
        "--config",
        "/dev/null",
        "--log",
        "error",
        "--bench-kernel",
        &args.family,
        "--bench-rows",
        &rows.join(","),
    ]);
    command.args(["--bench-device", &args.device]);
    if args.tiny {
        command.arg("--bench-tiny");
    }
    if let Some(seed) = args.seed {
        command.args(["--bench-seed", &seed.to_string()]);
    }
    if let Some(threads) = args.threads {
        command.args(["--threads", &threads.to_string()]);
    }
    // The worker would go on for minutes for nobody.
    command.env(ds4_settings::PARENT_VARIABLE, std::process::id().to_string());
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start ds4-worker")?;
    let figures = child.stdout.take().context("no standard output")?;
    let errors = child.stderr.take().context("no standard error")?;
    // Both at once: the worker ends only when all figures are read, which may be more than a pipe holds.
    let figures = std::thread::spawn(|| std::io::read_to_string(figures));
    let errors = follow(BufReader::new(errors));
    let figures = figures.join().map_err(|_| anyhow::anyhow!("reading figures panicked"))??;
    let status = child.wait()?;
    if !status.success() {
        let code = status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1);
        return Err(Failure::error(code, said(status, &errors)));
    }
    let mut value: Value = serde_json::from_str(&figures).context("the figures of ds4-worker --bench-kernel")?;
    let text = text(&value);
    if let Some(lines) = value.get("lines").and_then(Value::as_array) {
        let failed = lines.iter().filter(|l| l["passed"] != true).count();
        value["failed"] = failed.into();
    }
    Ok((value, text))
}

/// Shows how far it is and returns what else was said, up to the end.
fn follow(errors: impl BufRead) -> String {
    let mut said = String::new();
    for line in errors.lines().map_while(Result::ok) {
        if line.starts_with(ds4_settings::KERNEL_PROGRESS) {
            ds4_os::say!("{}", line.trim_start_matches("ds4-worker: "));
        } else {
            said += &line;
            said.push('\n');
        }
    }
    said
}

/// Why the worker's binary did not do it.
fn said(status: ExitStatus, errors: &str) -> String {
    match errors.trim().trim_start_matches("ds4-worker: ") {
        "" => format!("ds4-worker --bench-kernel ended without a word ({status})"),
        said => said.to_owned(),
    }
}

fn text(value: &Value) -> String {
    let mut out = String::new();
    let str = |v: &Value, key: &str| v[key].as_str().unwrap_or_default().to_owned();
    for family in value["families"].as_array().into_iter().flatten() {
        let _ = writeln!(out, "{:12} {}", str(family, "name"), str(family, "about"));
    }
    if let Some(device) = value["device"].as_str() {
        let _ = writeln!(out, "{device}, seed {}", value["seed"]);
    }
    for l in value["lines"].as_array().into_iter().flatten() {
        let n = |key: &str| l[key].as_f64().unwrap_or(0.0);
        let share = |key: &str| l[key].as_f64().map_or_else(String::new, |v| format!(" ({:4.1} %)", v * 100.0));
        let per_us = if n("us") > 0.0 { 1.0 / n("us") } else { 0.0 };
        let _ = writeln!(
            out,
            "{:10} {:52} rows {:4.0} {:10.1} us {:7.1} GB/s{} {:8.2} TFLOP/s{}  error {:.1e} of {:.1e}{}",
            str(l, "family"),
            str(l, "what"),
            n("rows"),
            n("us"),
            n("bytes") * per_us / 1e3,
            share("of_read_ceiling"),
            n("flops") * per_us / 1e6,
            share("of_compute_ceiling"),
            n("error"),
            n("bound"),
            match (l["passed"] == true, n("varying_rows") > 0.0) {
                (true, _) => "",
                (false, true) => "  FAILED: rows have other bits on their own",
                (false, false) => "  FAILED",
            }
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn a_worker_that_was_killed_is_not_an_empty_message() {
        let end = |status: i32, stderr: &str| said(ExitStatus::from_raw(status), &follow(stderr.as_bytes()));
        assert!(end(9, "").contains("signal: 9"), "{}", end(9, ""));
        assert_eq!(end(2 << 8, "ds4-worker: no such family\n"), "no such family");
        assert_eq!(end(1 << 8, "ds4-worker: checking and timing hyper (1 of 2)\nds4-worker: lost\n"), "lost");
    }

    #[test]
    fn what_failed_is_said() {
        let line = |passed: bool, varying: u32| {
            serde_json::json!({"family": "hyper", "what": "x", "rows": 4, "us": 2.0, "bytes": 4000, "flops": 8e6,
                "of_read_ceiling": 0.5, "of_compute_ceiling": null, "error": 1e-7, "bound": 1e-5, "varying_rows": varying, "passed": passed})
        };
        let value =
            serde_json::json!({"device": "cpu", "seed": 1, "lines": [line(true, 0), line(false, 0), line(false, 3)]});
        let text = text(&value);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[1].contains("2.0 GB/s (50.0 %)")
                && lines[1].contains("4.00 TFLOP/s ")
                && !lines[1].contains("FAILED"),
            "{text}"
        );
        assert!(lines[2].ends_with("FAILED") && lines[3].ends_with("other bits on their own"), "{text}");
    }
}
