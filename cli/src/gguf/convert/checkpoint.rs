//! A Hugging Face checkpoint directory: its JSON files, and the tensors of its safetensors files by name.
//!
//! Only headers are kept; tensor data is read piece by piece. Format: <https://huggingface.co/docs/safetensors>.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, tensor};

use super::bad;

/// Longest header, as the format has it.
const MAX_HEADER: u64 = 100_000_000;
const INDEX: &str = "model.safetensors.index.json";

/// One file of tensors.
#[derive(Debug)]
pub struct Source {
    pub path: PathBuf,
    file: File,
}

/// Where a tensor is.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// Index into [`Checkpoint::sources`].
    pub source: usize,
    pub dtype: Dtype,
    /// Dimensions as PyTorch has them: the last is contiguous.
    pub shape: Vec<u64>,
    /// Absolute offset in the file.
    pub offset: u64,
}

/// A checkpoint, opened.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    pub sources: Vec<Source>,
    pub tensors: BTreeMap<String, Stored>,
}

impl Checkpoint {
    /// Opens the directory and reads the headers of its safetensors files: those of `model.safetensors.index.json`, else
    /// `model.safetensors`.
    pub fn open(dir: &Path) -> anyhow::Result<Self> {
        if !dir.is_dir() {
            return Err(bad(format!("{} is not a directory; --from takes the checkpoint's directory", dir.display())));
        }
        let mut checkpoint = Self { dir: dir.to_owned(), sources: Vec::new(), tensors: BTreeMap::new() };
        match checkpoint.json(INDEX)? {
            Some(index) => checkpoint.open_index(&index)?,
            None if dir.join("model.safetensors").exists() => checkpoint.open_file("model.safetensors")?,
            None => {
                return Err(bad(format!(
                    "{} has neither {INDEX} nor model.safetensors; other formats (.bin, .pt) are not read: save the \
                     model with safe_serialization",
                    dir.display()
                )));
            }
        }
        Ok(checkpoint)
    }

    fn open_index(&mut self, index: &serde_json::Value) -> anyhow::Result<()> {
        let map = index
            .get("weight_map")
            .and_then(|m| m.as_object())
            .ok_or_else(|| bad(format!("{INDEX} has no weight_map of names to files")))?;
        let mut files = BTreeMap::new();
        for (name, file) in map {
            // A name with a directory in it could lead anywhere.
            let file = file.as_str().filter(|f| Path::new(f).file_name() == Some(f.as_ref()));
            let file = file.ok_or_else(|| bad(format!("{INDEX}: the file of {name} is not a file name")))?;
            files.entry(file).or_insert_with(Vec::new).push(name);
        }
        for (file, names) in files {
            self.open_file(file)?;
            let source = self.sources.len() - 1;
            if let Some(name) = names.iter().find(|n| self.tensors.get(**n).is_none_or(|t| t.source != source)) {
                return Err(bad(format!("{INDEX} says that {file} has tensor {name}, but it does not")));
            }
        }
        Ok(())
    }

    fn open_file(&mut self, name: &str) -> anyhow::Result<()> {
        let path = self.dir.join(name);
        let damaged = |what: String| bad(format!("{}: {what}", path.display()));
        let file = File::open(&path).map_err(|e| damaged(format!("{e}")))?;
        let file_len = file.metadata()?.len();
        let mut size = [0; 8];
        (&file).read_exact(&mut size).map_err(|_| damaged("is too short for a safetensors file".into()))?;
        let header_len = u64::from_le_bytes(size);
        if header_len > MAX_HEADER.min(file_len - 8) {
            return Err(damaged(format!(
                "its header would have {header_len} bytes: not a safetensors file, or cut off"
            )));
        }
        let mut header = vec![0; usize::try_from(header_len)?];
        (&file).read_exact(&mut header)?;
        let metadata: tensor::Metadata =
            serde_json::from_slice(&header).map_err(|e| damaged(format!("its header is damaged: {e}")))?;
        let data = 8 + header_len;
        let end = data + u64::try_from(metadata.data_len())?;
        if end != file_len {
            return Err(damaged(format!("has {file_len} bytes, its header says {end}; fetch it again")));
        }
        let source = self.sources.len();
        for (name, info) in metadata.tensors() {
            let stored = Stored {
                source,
                dtype: info.dtype,
                shape: info.shape.iter().map(|d| u64::try_from(*d)).collect::<Result<_, _>>()?,
                offset: data + u64::try_from(info.data_offsets.0)?,
            };
            if let Some(earlier) = self.tensors.insert(name.clone(), stored) {
                let earlier = self.sources[earlier.source].path.display();
                return Err(damaged(format!("has tensor {name}, which {earlier} has already")));
            }
        }
        self.sources.push(Source { path, file });
        Ok(())
    }

    /// A JSON file of the directory; `None` when there is none.
    pub fn json(&self, name: &str) -> anyhow::Result<Option<serde_json::Value>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|e| bad(format!("{}: {e}", self.dir.join(name).display())))
    }

    /// A text file of the directory; `None` when there is none.
    pub fn text(&self, name: &str) -> anyhow::Result<Option<String>> {
        let path = self.dir.join(name);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(bad(format!("{}: {e}", path.display()))),
        }
    }

    /// Reads bytes of a tensor, from `offset` of its file on.
    pub fn read(&self, source: usize, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.sources[source].file.read_exact_at(out, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, name: &str, tensors: &[(&str, Dtype, Vec<usize>)]) {
        let views = tensors.iter().map(|(name, dtype, shape)| {
            let bytes = vec![0u8; shape.iter().product::<usize>() * dtype.bitsize() / 8];
            (*name, (dtype, shape.clone(), bytes))
        });
        let owned: Vec<_> = views.collect();
        let views: Vec<_> = owned
            .iter()
            .map(|(n, (d, s, b))| (*n, safetensors::tensor::TensorView::new(**d, s.clone(), b).unwrap()))
            .collect();
        safetensors::serialize_to_file(views, None, &dir.join(name)).unwrap();
    }

    fn refusal(dir: &Path) -> String {
        Checkpoint::open(dir).unwrap_err().to_string()
    }

    #[test]
    fn deepseek_v4_checkpoints_of_one_file_and_of_shards_are_read() {
        let dir = tempfile::tempdir().unwrap();
        assert!(refusal(dir.path()).contains("neither"), "{}", refusal(dir.path()));
        write(dir.path(), "model.safetensors", &[("a", Dtype::F32, vec![2, 3]), ("b", Dtype::BF16, vec![4])]);
        let one = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(one.tensors.len(), 2);
        assert_eq!((&one.tensors["a"].shape, one.tensors["b"].dtype), (&vec![2, 3], Dtype::BF16));

        write(dir.path(), "s1.safetensors", &[("a", Dtype::F32, vec![2, 3])]);
        write(dir.path(), "s2.safetensors", &[("b", Dtype::BF16, vec![4])]);
        let index = |a: &str, b: &str| format!(r#"{{"weight_map": {{"a": "{a}", "b": "{b}"}}}}"#);
        std::fs::write(dir.path().join(INDEX), index("s1.safetensors", "s2.safetensors")).unwrap();
        let sharded = Checkpoint::open(dir.path()).unwrap();
        assert_eq!((sharded.sources.len(), sharded.tensors["b"].source), (2, 1));

        std::fs::write(dir.path().join(INDEX), index("s1.safetensors", "s1.safetensors")).unwrap();
        assert!(refusal(dir.path()).contains("has tensor b, but it does not"), "{}", refusal(dir.path()));
        std::fs::write(dir.path().join(INDEX), index("s1.safetensors", "s3.safetensors")).unwrap();
        assert!(refusal(dir.path()).contains("s3.safetensors"), "{}", refusal(dir.path()));
        std::fs::write(dir.path().join(INDEX), index("s1.safetensors", "../s2.safetensors")).unwrap();
        assert!(refusal(dir.path()).contains("not a file name"), "{}", refusal(dir.path()));
        std::fs::write(dir.path().join(INDEX), index("s1.safetensors", "model.safetensors")).unwrap();
        assert!(refusal(dir.path()).contains("has already"), "{}", refusal(dir.path()));
    }

    #[test]
    fn deepseek_v4_checkpoint_files_that_are_cut_or_damaged_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        write(dir.path(), "model.safetensors", &[("a", Dtype::F32, vec![2, 3])]);
        let whole = std::fs::read(&path).unwrap();
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(refusal(dir.path()).contains("model.safetensors"), "{len}: {}", refusal(dir.path()));
        }
        let mut longer = whole.clone();
        longer.push(0);
        std::fs::write(&path, longer).unwrap();
        assert!(refusal(dir.path()).contains("fetch it again"));
        std::fs::write(&path, b"PK\x03\x04 this is a zip archive and no safetensors file").unwrap();
        assert!(refusal(dir.path()).contains("not a safetensors file"));
    }
}
