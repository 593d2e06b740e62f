//! The op-conformance suite, and whole models against transformers, on a device: the checks of `tests/`, for a machine that has
//! nothing but this binary and the fixtures.
//!
//! `gpu [cpu|cuda] [OUT.json] [FILTER]`; `DS4_FIXTURES` is the folder `tests/fixtures`, `DS4_STARTER_MODEL` the starter model.
//! Exit code 1 when a check failed.

#[path = "parts/attention.rs"]
mod attention;
#[path = "parts/families.rs"]
mod families;
#[path = "parts/flash.rs"]
mod flash;
#[cfg(feature = "cuda")]
#[path = "parts/hashes.rs"]
mod hashes;
#[path = "parts/layers.rs"]
mod layers;
#[path = "parts/lost.rs"]
mod lost;
#[path = "parts/models.rs"]
mod models;
#[path = "parts/products.rs"]
mod products;
#[path = "../tests/support/seeded.rs"]
mod seeded;
#[path = "parts/starts.rs"]
mod starts;
#[path = "parts/sublayers.rs"]
mod sublayers;
#[path = "../tests/support/mod.rs"]
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use ds4_kernels::bench::kernel::{FAMILIES, Timed as Full};
use ds4_kernels::conformance::{self, Bounds};
use ds4_kernels::{BatchPlan, CpuDevice, Device, StateSpec, TensorSource};
use ds4_manifests::GgmlType;
use ds4_models::Model;
use ds4_os::SharedBytes;
use serde_json::{Value, json};

fn row<D: Device>(device: &D, model: &dyn Model<D>, i: usize) -> Vec<f32> {
    let mut row = Vec::new();
    device.read(model.logits(), i, &mut row);
    row
}

fn bind<D: Device>(d: &D, ty: GgmlType, rows: usize, cols: usize, bytes: &[u8]) -> D::Weight {
    let bytes = SharedBytes::from_vec(bytes.to_vec());
    d.bind(&TensorSource { name: format!("{ty}"), ty, cols, rows, bytes }).unwrap()
}

/// Rows of activations on the device: the op set's way in is a table of embeddings.
fn upload<D: Device>(d: &D, width: usize, x: &[f32]) -> D::Buffer {
    let rows = x.len() / width;
    let bytes: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
    let table = bind(d, GgmlType::F32, rows, width, &bytes);
    let mut banks = [d.bank(&StateSpec::default(), rows).unwrap()];
    d.bank_commit(&mut banks[0], rows).unwrap();
    let mut plan = BatchPlan::default();
    plan.push(0, 0, &(0..u32::try_from(rows).unwrap()).collect::<Vec<_>>(), false);
    let mut out = d.buffer(width);
    d.embed(&d.step(&plan, &mut banks).unwrap(), &table, &mut out);
    out
}

fn download<D: Device>(d: &D, x: &D::Buffer, rows: usize) -> Vec<f32> {
    let (mut all, mut row) = (Vec::new(), Vec::new());
    for r in 0..rows {
        d.read(x, r, &mut row);
        all.extend_from_slice(&row);
    }
    all
}

/// Largest difference relative to the root mean square of `want`; infinite when one is no number.
fn apart(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let rms = (want.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
    let worst = got.iter().zip(want).map(|(g, w)| f64::from(g - w).abs()).fold(0.0, support::greater);
    if rms > 0.0 { worst / rms } else { f64::INFINITY }
}

/// A check, which panics or tells what it saw.
type Check<D> = Box<dyn Fn(&D) -> Value>;

fn run<D: Full>(d: &D, activation: f64, out: Option<&str>, filter: &str) -> bool {
    println!("{}", d.describe());
    let mut checks: Vec<(String, Check<D>)> = vec![(
        "conformance".into(),
        Box::new(move |d| {
            conformance::run(d, Bounds { activation });
            json!({"activation_bound": activation})
        }),
    )];
    use GgmlType as T;
    for (gate, down) in [(T::IQ2_XXS, T::Q2_K), (T::Q4_K, T::Q4_K), (T::Q8_0, T::Q8_0), (T::F16, T::BF16)] {
        checks.push((format!("experts {gate} {down}"), Box::new(move |d| products::experts(d, gate, down))));
    }
    for hidden in [1024, 4096] {
        checks.push((format!("sublayers {hidden}"), Box::new(move |d| sublayers::check(d, hidden))));
    }
    checks.push(("products".into(), Box::new(products::products)));
    checks.push(("attention".into(), Box::new(attention::check)));
    checks.push(("starts".into(), Box::new(starts::check)));
    if d.describe().starts_with("cuda") {
        checks.push(("lost device".into(), Box::new(lost::check)));
        #[cfg(feature = "cuda")]
        checks.push(("hashes".into(), Box::new(|_| hashes::check())));
    }
    for (name, _) in FAMILIES {
        checks.push((format!("kernel {name}"), Box::new(move |d| families::check(d, name))));
    }
    for kind in layers::KINDS {
        checks.push((format!("layer {}", kind.0), Box::new(move |d| layers::check(d, kind))));
    }
    for name in models::CASES {
        checks.push((format!("deepseek_v4 {name}"), Box::new(move |d| models::v4_agrees(d, name))));
    }
    checks.push(("deepseek_v4 cut".into(), Box::new(models::v4_cut)));
    checks.push(("deepseek_v4 batched".into(), Box::new(models::v4_batched)));
    for name in ["mixed", "production-geometry"] {
        checks.push((format!("deepseek_v4 official {name}"), Box::new(move |d| models::v4_official(d, name))));
    }
    checks.push(("tiny-llama".into(), Box::new(models::tiny_llama)));
    // 92 MB that a machine with nothing but this binary may lack.
    let left_out = if support::starter_place().is_file() {
        checks.push(("smollm2".into(), Box::new(models::smollm2)));
        None
    } else {
        Some("smollm2: no model")
    };

    let mut results = Vec::new();
    let mut good = true;
    for (name, check) in checks.iter().filter(|(n, _)| n.contains(filter)) {
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| check(d)));
        let seconds = start.elapsed().as_secs_f64();
        let (passed, facts) = match result {
            Ok(facts) => (true, facts),
            Err(e) => {
                let text =
                    e.downcast_ref::<String>().cloned().or_else(|| e.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                (false, json!({"error": text.unwrap_or_default().chars().take(600).collect::<String>()}))
            }
        };
        good &= passed;
        println!("{} {name} ({seconds:.2} s) {facts}", if passed { "PASS" } else { "FAIL" });
        results.push(json!({"check": name, "passed": passed, "seconds": seconds, "facts": facts}));
    }
    if let Some(path) = out {
        let all = json!({"device": d.describe(), "checks": results, "left_out": left_out});
        std::fs::write(path, serde_json::to_string_pretty(&all).unwrap()).unwrap();
    }
    good
}

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize| args.get(i).map(String::as_str);
    let filter = arg(2).unwrap_or("");
    let good = match arg(0) {
        #[cfg(feature = "cuda")]
        None | Some("cuda") => match ds4_kernels::cuda::CudaDevice::open(0) {
            // Activations have 16 bits per 256, with outliers 30 times the rest: a 32nd of that may round to 30 half steps.
            Ok(d) => run(&d, 32.0 / 65024.0, arg(1), filter),
            Err(e) => {
                eprintln!("{e}");
                false
            }
        },
        #[cfg(feature = "cuda")]
        Some(lost::ARGUMENT) => {
            lost::fault(&ds4_kernels::cuda::CudaDevice::open(0).unwrap());
            true
        }
        Some("cpu") => run(&CpuDevice::default(), 1.0 / 65024.0, arg(1), filter),
        other => {
            eprintln!("no device {other:?}; there is cpu, and cuda when built with that feature");
            false
        }
    };
    if good { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
