//! Families of kernels, checked and timed as `ds4 bench kernel` does.

use ds4_kernels::bench::kernel::{self, Options, Size, Timed};
use ds4_kernels::conformance::Random;
use serde_json::{Value, json};

/// Runs family `name` at Flash's shapes (on the CPU: at small ones) and prints its lines.
///
/// # Panics
/// When a line did not pass.
pub fn check<D: Timed>(d: &D, name: &str) -> Value {
    let size = if d.cache() > 0 { Size::Flash } else { Size::Tiny };
    let options = Options { rows: vec![1, 4, 16, 512, 2048], size, seed: Random::fresh_seed() };
    let lines = kernel::run(d, name, &options).unwrap().unwrap();
    let mut all = Vec::new();
    for l in &lines {
        let (per_us, ceiling) = (1.0 / l.microseconds, l.of_ceiling.unwrap_or_default());
        println!(
            "  {:44} rows {:4} {:9.1} us {:7.1} GB/s ({:4.1} %) {:7.2} TFLOP/s ({:4.1} %) error {:.1e} of {:.0e}, varying rows {}",
            l.what,
            l.rows,
            l.microseconds,
            l.bytes * per_us / 1e3,
            ceiling.0 * 100.0,
            2.0 * l.macs * per_us / 1e6,
            ceiling.1 * 100.0,
            l.error,
            l.bound,
            l.varying_rows
        );
        all.push(
            json!({"what": l.what, "rows": l.rows, "us": (l.microseconds * 100.0).round() / 100.0, "bytes": l.bytes,
            "flops": 2.0 * l.macs, "error": l.error, "bound": l.bound, "of_ceiling": [ceiling.0, ceiling.1]}),
        );
    }
    let failed: Vec<_> = lines.iter().filter(|l| !l.passed()).collect();
    assert!(failed.is_empty(), "seed {}: {failed:?}", options.seed);
    Value::Array(all)
}
