//! Importance matrices: how much each input channel of a matrix matters, as llama.cpp's tool measures it.
//!
//! The file is a GGUF of `general.type` = `imatrix`. For a tensor `X` it has `X.in_sum2`, the sum of squared activations of each
//! input channel (and, for stacked experts, of each expert), and `X.counts`, over how many tokens. The importance is their
//! quotient: the mean square of what a weight is multiplied with, and so of what an error in it does.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::Context as _;
use ds4_manifests::{GgmlType, GgufModel, Metadata, TensorInfo, Value};

use super::bad;

/// An opened importance matrix.
pub struct Imatrix {
    model: GgufModel,
    files: Vec<File>,
    shown: String,
}

impl Imatrix {
    /// Opens one.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display().to_string();
        let model = GgufModel::open(path).map_err(|e| {
            bad(format!("{shown}: {e}; an importance matrix is a GGUF file (the older .dat format is not read)"))
        })?;
        if model.metadata.str("general.type") != Some("imatrix") {
            return Err(bad(format!("{shown} is no importance matrix: general.type is not \"imatrix\"")));
        }
        let files = model.shards.iter().map(|s| File::open(&s.path)).collect::<Result<_, _>>();
        let files = files.with_context(|| format!("cannot open {shown}"))?;
        Ok(Self { model, files, shown })
    }

    /// The tensors by name.
    fn index(&self) -> HashMap<&str, &TensorInfo> {
        self.model.tensors.iter().map(|t| (t.name.as_str(), t)).collect()
    }

    fn floats(&self, t: &TensorInfo) -> anyhow::Result<Vec<f32>> {
        if t.ty != GgmlType::F32 {
            return Err(bad(format!("{}: tensor {} is {}, expected F32", self.shown, t.name, t.ty)));
        }
        let mut bytes = vec![0; usize::try_from(t.len)?];
        self.files[t.shard]
            .read_exact_at(&mut bytes, t.offset)
            .with_context(|| format!("cannot read {}", self.shown))?;
        let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        match values.iter().position(|v| !v.is_finite() || *v < 0.0) {
            Some(at) => Err(bad(format!("{}: {} has {} at {at}, expected 0 or more", self.shown, t.name, values[at]))),
            None => Ok(values),
        }
    }

    /// The importance of a tensor's input channels, `shape[0]` for each of its matrices (one, or one an expert). `None` when the
    /// file does not have it. An expert that no token reached has the mean of the others.
    pub fn of(&self, name: &str, shape: &[u64]) -> anyhow::Result<Option<Vec<f32>>> {
        let index = self.index();
        let (sums, counts) = (format!("{name}.in_sum2"), format!("{name}.counts"));
        let (Some(sums), Some(counts)) = (index.get(sums.as_str()), index.get(counts.as_str())) else {
            return Ok(None);
        };
        let cols = usize::try_from(shape[0])?;
        let matrices = usize::try_from(shape.get(2).copied().unwrap_or(1))?;
        let (mut values, counts) = (self.floats(sums)?, self.floats(counts)?);
        if values.len() != cols * matrices || counts.len() != matrices {
            return Err(bad(format!(
                "{}: {name} has {} sums and {} counts, expected {} and {matrices}: it is another model's",
                self.shown,
                values.len(),
                counts.len(),
                cols * matrices
            )));
        }
        let reached = |count: &f32| *count > 0.0;
        let mut mean = vec![0.0f32; cols];
        for (row, count) in values.chunks_exact_mut(cols).zip(&counts).filter(|(_, c)| reached(c)) {
            row.iter_mut().zip(&mut mean).for_each(|(v, m)| {
                *v /= count;
                *m += *v;
            });
        }
        #[allow(clippy::cast_precision_loss, reason = "a few hundred experts")]
        let share = 1.0 / counts.iter().filter(|c| reached(c)).count().max(1) as f32;
        mean.iter_mut().for_each(|m| *m *= share);
        for (row, _) in values.chunks_exact_mut(cols).zip(&counts).filter(|(_, c)| !reached(c)) {
            row.copy_from_slice(&mean);
        }
        Ok(Some(values))
    }

    /// Says in the model's metadata where its importance came from, under the usual keys.
    pub fn describe(&self, path: &Path, m: &mut Metadata) {
        let entries = self.model.tensors.iter().filter(|t| t.name.ends_with(".in_sum2")).count();
        let file = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        m.set("quantize.imatrix.file", Value::String(file));
        if let Some(first) = self.model.metadata.strings("imatrix.datasets").and_then(|d| d.get(0)) {
            m.set("quantize.imatrix.dataset", Value::String(String::from_utf8_lossy(first).into_owned()));
        }
        m.set("quantize.imatrix.entries_count", Value::U64(u64::try_from(entries).unwrap_or(0)));
        if let Some(chunks) = self.model.metadata.u64("imatrix.chunk_count") {
            m.set("quantize.imatrix.chunks_count", Value::U64(chunks));
        }
    }
}

#[cfg(test)]
mod tests {
    use ds4_manifests::GgufWriter;

    use super::*;

    fn bytes(v: &[f32]) -> Vec<u8> {
        v.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    fn write(dir: &Path, counts: &[f32]) -> std::path::PathBuf {
        let path = dir.join("i.gguf");
        GgufWriter::new()
            .metadata("general.type", Value::String("imatrix".into()))
            .metadata("imatrix.chunk_count", Value::U64(7))
            .tensor("a.weight.in_sum2", GgmlType::F32, &[2, 3], bytes(&[2.0, 4.0, 9.0, 9.0, 30.0, 60.0]))
            .tensor("a.weight.counts", GgmlType::F32, &[1, 3], bytes(counts))
            .write_to(&path)
            .unwrap();
        path
    }

    #[test]
    fn deepseek_v4_importance_is_the_mean_square_and_unreached_experts_have_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), &[2.0, 0.0, 10.0]);
        let imatrix = Imatrix::open(&path).unwrap();
        // Experts 0 and 2: (1, 2) and (3, 6); their mean is (2, 4).
        let want = [1.0, 2.0, 2.0, 4.0, 3.0, 6.0];
        assert_eq!(imatrix.of("a.weight", &[2, 5, 3]).unwrap().unwrap(), want);
        assert_eq!(imatrix.of("b.weight", &[2, 5, 3]).unwrap(), None);
        let error = imatrix.of("a.weight", &[2, 5, 4]).unwrap_err().to_string();
        assert!(error.contains("a.weight has 6 sums and 3 counts, expected 8 and 4"), "{error}");
        let mut m = Metadata::default();
        imatrix.describe(&path, &mut m);
        assert_eq!(m.str("quantize.imatrix.file"), Some("i.gguf"));
        let numbers = ["entries_count", "chunks_count"].map(|k| m.u64(&format!("quantize.imatrix.{k}")));
        assert_eq!(numbers, [Some(1), Some(7)]);
    }

    #[test]
    fn deepseek_v4_bad_importance_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let imatrix = Imatrix::open(&write(dir.path(), &[1.0, -1.0, 1.0])).unwrap();
        assert!(imatrix.of("a.weight", &[2, 5, 3]).unwrap_err().to_string().contains("a.weight.counts has -1"));
        let path = dir.path().join("model.gguf");
        GgufWriter::new().metadata("general.architecture", Value::String("llama".into())).write_to(&path).unwrap();
        assert!(Imatrix::open(&path).err().unwrap().to_string().contains("no importance matrix"));
        std::fs::write(&path, [0u8; 64]).unwrap();
        assert!(Imatrix::open(&path).err().unwrap().to_string().contains(".dat"));
    }
}
