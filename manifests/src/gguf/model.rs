//! Opening a model: one file, or all shards of a split model as one.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use super::parse::{Parsed, parse_from};
use super::{GgufError, TensorInfo};
use crate::metadata::Metadata;

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Path as opened.
    pub path: PathBuf,
    /// Length in bytes when it was opened.
    pub file_len: u64,
    /// Offset of the tensor data.
    pub data_offset: u64,
    /// `general.alignment`.
    pub alignment: u64,
}

/// A model's headers: everything but the tensor data.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufModel {
    /// Files, in shard order; one when the model is not split.
    pub shards: Vec<Shard>,
    /// The first shard's keys without `split.*`, so that a split model and the whole one are the same model.
    pub metadata: Metadata,
    /// Tensors of all shards, in shard order, then in the order of the shard's table.
    pub tensors: Vec<TensorInfo>,
}

impl GgufModel {
    /// Reads the header of `path`, and of its siblings when it is one shard of a split model (any shard may be named).
    ///
    /// Shards are recognised by name (`…-00001-of-00003.gguf`) and by `split.no`, `split.count`,
    /// `split.tensors.count`, which must agree. A shard whose counts, architecture and tensor names fit is
    /// indistinguishable from the right one here; the catalog's known content hash tells.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let first = read_file(path).map_err(|e| in_file(path, e))?;
        let declared = SplitKeys::of(&first.1.metadata).map_err(|e| in_file(path, e))?;
        let named = SplitName::of(path);
        match (declared, named) {
            (None, None) => Ok(Self::merge(vec![(path.to_owned(), first)])),
            (Some(keys), Some(name)) => {
                if keys.count != name.count || keys.no.checked_add(1) != Some(name.k) {
                    return Err(in_file(
                        path,
                        GgufError::BadSplit(format!(
                            "its name says shard {} of {}, its metadata says shard {} of {}; restore the original name",
                            name.k,
                            name.count,
                            u64::from(keys.no) + 1,
                            keys.count
                        )),
                    ));
                }
                Self::open_split(path, first, keys, &name)
            }
            (Some(keys), None) => Err(in_file(
                path,
                GgufError::BadSplit(format!(
                    "its metadata says shard {} of {}, but its name does not end in -{:05}-of-{:05}.gguf, so its \
                     siblings cannot be found; restore the original name",
                    u64::from(keys.no) + 1,
                    keys.count,
                    u64::from(keys.no) + 1,
                    keys.count
                )),
            )),
            (None, Some(name)) if name.count > 1 => Err(in_file(
                path,
                GgufError::BadSplit(format!(
                    "its name says shard {} of {}, but it has no split.count; rename it if it is a whole model",
                    name.k, name.count
                )),
            )),
            (None, Some(_)) => Ok(Self::merge(vec![(path.to_owned(), first)])),
        }
    }

    fn open_split(path: &Path, opened: (u64, Parsed), keys: SplitKeys, name: &SplitName) -> Result<Self, GgufError> {
        let n = name.count;
        let mut opened = Some(opened);
        let mut files: Vec<(PathBuf, (u64, Parsed))> = Vec::new();
        for k in 1..=n {
            let (path, file) = if k == name.k { (path.to_owned(), opened.take()) } else { (name.sibling(k), None) };
            let file = match file {
                Some(file) => file,
                None => match read_file(&path) {
                    Ok(file) => file,
                    Err(GgufError::NotFound) => return Err(GgufError::MissingShard { k, n, path }),
                    Err(e) => return Err(GgufError::InShard { k, n, cause: Box::new(in_file(&path, e)) }),
                },
            };
            let first = files.first().map_or(&file.1.metadata, |(_, (_, parsed))| &parsed.metadata);
            if let Some(reason) = foreign(k, &keys, first, &file.1.metadata) {
                return Err(GgufError::ForeignShard { k, n, path, reason });
            }
            files.push((path, file));
        }
        let mut owner: HashMap<&str, usize> = HashMap::new();
        let mut total: u64 = 0;
        for (index, (path, (_, parsed))) in files.iter().enumerate() {
            for t in &parsed.tensors {
                total += 1;
                if let Some(earlier) = owner.insert(&t.name, index) {
                    let reason = format!("it holds tensor {:?}, which shard {} has already", t.name, earlier + 1);
                    let k = u32::try_from(index + 1).unwrap_or(u32::MAX);
                    return Err(GgufError::ForeignShard { k, n, path: path.clone(), reason });
                }
            }
        }
        if let Some(expected) = keys.tensors.filter(|expected| *expected != total) {
            return Err(in_file(
                &files[0].0,
                GgufError::BadSplit(format!(
                    "split.tensors.count is {expected}, but its {n} shards hold {total} tensors; \
                     one of them is from another model: fetch all again"
                )),
            ));
        }
        Ok(Self::merge(files))
    }

    fn merge(files: Vec<(PathBuf, (u64, Parsed))>) -> Self {
        let mut model = GgufModel { shards: Vec::new(), metadata: Metadata::default(), tensors: Vec::new() };
        for (index, (path, (file_len, parsed))) in files.into_iter().enumerate() {
            let Parsed { metadata, tensors, alignment, data_offset } = parsed;
            model.shards.push(Shard { path, file_len, data_offset, alignment });
            model.tensors.extend(tensors.into_iter().map(|t| TensorInfo { shard: index, ..t }));
            if index == 0 {
                model.metadata = metadata;
                model.metadata.entries.retain(|(key, _)| !key.starts_with("split."));
            }
        }
        model
    }

    /// Bytes of all tensors, without padding.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |sum, t| sum.saturating_add(t.len))
    }
}

fn in_file(path: &Path, cause: GgufError) -> GgufError {
    GgufError::InFile { path: path.to_owned(), cause: Box::new(cause) }
}

/// File length and header.
fn read_file(path: &Path) -> Result<(u64, Parsed), GgufError> {
    let io = |e: std::io::Error| match e.kind() {
        ErrorKind::NotFound => GgufError::NotFound,
        // A component of the path is a file: as absent as any other.
        ErrorKind::NotADirectory => GgufError::NotFound,
        _ => GgufError::Unreadable(e),
    };
    // Asked before opening: opening a pipe would wait for its writer.
    refuse_special(&std::fs::metadata(path).map_err(io)?)?;
    let file = File::open(path).map_err(io)?;
    let meta = file.metadata().map_err(io)?;
    refuse_special(&meta)?;
    let parsed = parse_from(BufReader::with_capacity(1 << 20, file), meta.len())?;
    Ok((meta.len(), parsed))
}

fn refuse_special(meta: &std::fs::Metadata) -> Result<(), GgufError> {
    use std::os::unix::fs::FileTypeExt;
    let ty = meta.file_type();
    if ty.is_file() {
        return Ok(());
    }
    Err(GgufError::NotAFile(if ty.is_dir() {
        "directory"
    } else if ty.is_fifo() {
        "pipe"
    } else if ty.is_socket() {
        "socket"
    } else {
        "device"
    }))
}

/// `split.*` of one file. Absent, or a count of 0 or 1: not split.
struct SplitKeys {
    no: u32,
    count: u32,
    tensors: Option<u64>,
}

impl SplitKeys {
    fn of(metadata: &Metadata) -> Result<Option<Self>, GgufError> {
        let int = |key: &str| -> Result<Option<u32>, GgufError> {
            let Some(value) = metadata.get(key) else { return Ok(None) };
            let number = metadata.u64(key).and_then(|v| u32::try_from(v).ok());
            number.map(Some).ok_or_else(|| GgufError::BadSplit(format!("{key} is {value:?}, not a small whole number")))
        };
        match int("split.count")? {
            None | Some(0 | 1) => Ok(None),
            Some(count) => {
                let no = int("split.no")?
                    .ok_or_else(|| GgufError::BadSplit(format!("split.count is {count}, but split.no is absent")))?;
                if no >= count {
                    return Err(GgufError::BadSplit(format!("split.no is {no}, but split.count is {count}")));
                }
                Ok(Some(Self { no, count, tensors: int("split.tensors.count")?.map(u64::from) }))
            }
        }
    }
}

/// `<stem>-<k>-of-<n>.gguf`, five digits each.
struct SplitName {
    dir: PathBuf,
    stem: String,
    k: u32,
    count: u32,
}

impl SplitName {
    fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = digits(name)?;
        let (rest, k) = digits(rest.strip_suffix("-of")?)?;
        if k == 0 || k > count {
            return None;
        }
        Some(Self { dir: path.parent()?.to_owned(), stem: rest.to_owned(), k, count })
    }

    fn sibling(&self, k: u32) -> PathBuf {
        self.dir.join(format!("{}-{k:05}-of-{:05}.gguf", self.stem, self.count))
    }
}

/// Splits a trailing `-ddddd` off.
fn digits(s: &str) -> Option<(&str, u32)> {
    let (rest, number) = s.rsplit_once('-')?;
    (number.len() == 5 && number.bytes().all(|b| b.is_ascii_digit())).then_some((rest, number.parse().ok()?))
}

/// Why shard `k` with `meta` does not belong to the model of `keys` whose first shard has `first`; `None` when it does.
fn foreign(k: u32, keys: &SplitKeys, first: &Metadata, meta: &Metadata) -> Option<String> {
    let own = match SplitKeys::of(meta) {
        Ok(Some(own)) => own,
        Ok(None) => return Some("it has no split.count, so it is a model of its own".into()),
        Err(e) => return Some(e.to_string()),
    };
    if own.count != keys.count {
        return Some(format!("its split.count is {}, that of the shard opened first is {}", own.count, keys.count));
    }
    if own.no.checked_add(1) != Some(k) {
        return Some(format!("its metadata says shard {}; the files were swapped or renamed", u64::from(own.no) + 1));
    }
    if own.tensors != keys.tensors {
        return Some(format!(
            "its split.tensors.count is {}, that of the shard opened first is {}",
            shown(own.tensors),
            shown(keys.tensors)
        ));
    }
    // Later shards usually carry nothing but `split.*`; what else they say must not contradict the first.
    meta.iter()
        .filter(|(key, _)| !key.starts_with("split.") && *key != "general.alignment")
        .find(|(key, value)| first.get(key).is_some_and(|v| v != *value))
        .map(|(key, _)| format!("its {key} differs from the first shard's"))
}

fn shown(count: Option<u64>) -> String {
    count.map_or_else(|| "absent".to_owned(), |c| c.to_string())
}
