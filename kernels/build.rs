//! With the feature `cuda`: compiles each `cuda/*.cu` to a fatbin (machine code for sm_90 and sm_121, PTX for what comes later).
//!
//! nvcc comes from `$NVCC`, else `$CUDA_HOME/bin`, else PATH; without one the build fails, because an empty fatbin would only fail
//! later. A kernel that spills registers fails it too.

use std::env;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::time::SystemTime;

/// Source files, without `.cu`.
const FILES: &[&str] = &[
    "attention",
    "compress",
    "compress_rows",
    "dense",
    "elementwise",
    "few",
    "hash",
    "hyper",
    "index_scores",
    "index_top",
    "indexer",
    "matmul",
    "moe",
    "narrow",
    "quantized",
    "sample",
    "qkv",
    "sparse_attention",
    "sparse_scores",
    "sparse_values",
    "sparse_values_narrow",
    "split",
    "state",
    "streams",
    "wide",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for var in ["NVCC", "CUDA_HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={var}");
    }
    println!("cargo::rerun-if-changed=cuda");
    println!("cargo::rerun-if-changed=src/quant/grids");
    if let Err(e) = build() {
        eprintln!("{e}");
        exit(1);
    }
}

fn build() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let nvcc = find_nvcc()?;
    write_if_new(&out.join("grids.h"), &grids()?)?;
    let headers = ["cuda", "src/quant/grids"].iter().flat_map(|d| newest_header(Path::new(d))).max();
    // nvcc runs one compiler a file and architecture; two files at once keep a small machine busy.
    let mut running = Vec::new();
    for file in FILES {
        let (source, fatbin) = (PathBuf::from(format!("cuda/{file}.cu")), out.join(format!("{file}.fatbin")));
        let newest = headers.into_iter().chain(modified(&source)).max();
        if modified(&fatbin).is_some_and(|t| newest.is_some_and(|n| n < t)) {
            continue;
        }
        if running.len() == 2 {
            finish(running.remove(0))?;
        }
        let command = compile(&nvcc, &out, &source, &fatbin)?;
        running.push((file, fatbin, command));
    }
    running.into_iter().try_for_each(finish)
}

fn compile(nvcc: &Path, out: &Path, source: &Path, fatbin: &Path) -> Result<std::process::Child, String> {
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17", "-Xptxas", "-warn-spills"]);
    for (arch, code) in [("compute_90", "sm_90"), ("compute_121", "sm_121"), ("compute_90", "compute_90")] {
        command.arg("-gencode").arg(format!("arch={arch},code={code}"));
    }
    command.arg("-I").arg(out).arg("-o").arg(fatbin).arg(source);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    command.spawn().map_err(|e| format!("{}: {e}", nvcc.display()))
}

fn finish((file, fatbin, child): (&&str, PathBuf, std::process::Child)) -> Result<(), String> {
    let output = child.wait_with_output().map_err(|e| format!("nvcc: {e}"))?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let spills = text.contains("spilled");
    if output.status.success() && !spills {
        return Ok(());
    }
    let _ = std::fs::remove_file(fatbin);
    let why = if spills { "registers are spilled" } else { "nvcc failed" };
    Err(format!("cuda/{file}.cu: {why}\n{text}"))
}

fn find_nvcc() -> Result<PathBuf, String> {
    if let Some(path) = env::var_os("NVCC") {
        return Ok(path.into());
    }
    let home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let found = home.into_iter().chain(env::split_paths(&path)).map(|dir| dir.join("nvcc")).find(|p| p.is_file());
    found.ok_or_else(|| {
        "the feature `cuda` needs nvcc, and there is none in $NVCC, $CUDA_HOME/bin or PATH; install the CUDA compiler (13.0) or \
         build without the feature"
            .into()
    })
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().and_then(|m| m.modified()).ok()
}

fn newest_header(dir: &Path) -> Option<SystemTime> {
    let entries = std::fs::read_dir(dir).ok()?;
    entries
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.extension().is_none_or(|x| x != "cu"))
        .filter_map(|p| modified(&p))
        .max()
}

fn write_if_new(path: &Path, text: &str) -> Result<(), String> {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

/// The codebooks of the IQ types as device tables: one integer an entry, element 0 in its lowest byte. `src/quant/grids.rs` tells
/// how they are packed.
fn grids() -> Result<String, String> {
    let mut text = String::from("#pragma once\n#include <stdint.h>\n");
    let magnitudes: &[i8] = &[8, 25, 43];
    for (name, file, values, bits, elems) in [
        ("IQ2_XXS", "iq2_xxs", magnitudes, 2, 8),
        ("IQ2_XS", "iq2_xs", magnitudes, 2, 8),
        ("IQ3_XXS", "iq3_xxs", &[4, 12, 20, 28, 36, 44, 52, 62], 4, 4),
        ("IQ1", "iq1", &[-1, 0, 1], 2, 8),
    ] {
        let path = format!("src/quant/grids/{file}.bin");
        let packed = std::fs::read(&path).map_err(|e| format!("{path}: {e}"))?;
        let per_byte = 8 / bits;
        let all: Vec<u8> = packed
            .iter()
            .flat_map(|b| (0..per_byte).map(move |i| (b >> (bits * i)) & ((1 << bits) - 1)))
            .map(|index| values.get(usize::from(index)).map_or(0, |v| v.cast_unsigned()))
            .collect();
        let entries = all.len() / elems;
        let _ = writeln!(text, "__device__ const uint{}_t {name}_GRID[{entries}] = {{", 8 * elems);
        for entry in all.chunks_exact(elems) {
            let value = entry.iter().rev().fold(0u64, |v, b| (v << 8) | u64::from(*b));
            let _ = write!(text, "{value:#x},");
        }
        text.push_str("};\n");
    }
    text.push_str("__device__ const int8_t IQ4_GRID[16] = {");
    for v in [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113] {
        let _ = write!(text, "{v},");
    }
    text.push_str("};\n");
    Ok(text)
}
