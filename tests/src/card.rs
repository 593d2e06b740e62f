//! A GPU that is not there: `libcuda.so.1` of the crate `ds4-fake-cuda`, found through LD_LIBRARY_PATH.

use std::collections::HashMap;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use ds4_manifests::{GgmlType, GgufPlan, Metadata, Value};
use tempfile::TempDir;

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// A card of one test. Its memory is what processes with its environment hold.
pub struct Card {
    dir: TempDir,
    tag: String,
    settings: Vec<(&'static str, String)>,
}

impl Default for Card {
    fn default() -> Self {
        Self::new()
    }
}

impl Card {
    /// A card of 1 GiB.
    ///
    /// # Panics
    /// When the library has not been built: it is a dependency of the tests, so Cargo builds it beside them.
    pub fn new() -> Self {
        let test = std::env::current_exe().expect("own path");
        let library = test.parent().expect("directory").join("libfake_cuda.so");
        assert!(library.exists(), "{} is missing", library.display());
        let dir = tempfile::Builder::new().prefix("ds4c-").tempdir().expect("temporary directory");
        // The second name is looked for first.
        for name in ["libcuda.so.1", "libcuda.so"] {
            symlink(&library, dir.path().join(name)).expect("link");
        }
        let tag = format!("{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        Self { dir, tag, settings: Vec::new() }
    }

    /// One of the variables that the crate lists.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.settings.push((name, value.to_string()));
        self
    }

    /// The same card, seen by processes with other settings.
    #[must_use]
    pub fn seen_with(&self, name: &'static str, value: impl ToString) -> Vec<(&'static str, String)> {
        let mut environment = self.environment();
        environment.retain(|(known, _)| *known != name);
        environment.push((name, value.to_string()));
        environment
    }

    /// What a process needs to see it.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let mut all = vec![
            ("LD_LIBRARY_PATH", self.dir.path().to_string_lossy().into_owned()),
            ("FAKE_CUDA_TAG", self.tag.clone()),
        ];
        all.extend(self.settings.iter().cloned());
        all
    }

    /// The same card, whose calls are written to the file that `FAKE_CUDA_LOG` names in its processes.
    #[must_use]
    pub fn logged(self) -> Self {
        let path = self.dir.path().join("calls");
        self.with("FAKE_CUDA_LOG", path.to_string_lossy().into_owned())
    }

    /// What was called of a card that is [`logged`](Card::logged), a line each.
    ///
    /// # Panics
    /// When nothing was.
    pub fn calls(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("calls")).expect("the log")
    }

    /// True in a process that has the card; otherwise runs this test binary's test `name` in one and checks its end. libcuda is found
    /// when a process starts, so each test of what uses it in its own process runs itself again.
    ///
    /// # Panics
    /// When the test failed there, or left memory of the card behind.
    pub fn is_here(&self, name: &str) -> bool {
        if std::env::var_os("FAKE_CUDA_TAG").is_some() {
            return true;
        }
        let (code, said) = self.run_test(name);
        assert!(code == Some(0) && said.contains("1 passed"), "{said}");
        assert_eq!(self.held(), (0, 0));
        false
    }

    /// Exit code and output of this test binary's test `name` in a process that has the card.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn run_test(&self, name: &str) -> (Option<i32>, String) {
        let mut command = Command::new(std::env::current_exe().expect("own path"));
        let output = self.give(&mut command).args(["--exact", name, "--nocapture"]).output().expect("the test again");
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        (output.status.code(), said)
    }

    /// Gives a process that is to be started the card.
    pub fn give<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.envs(self.environment())
    }

    /// Bytes of its memory that any process holds a descriptor of, and the number of descriptors.
    pub fn held(&self) -> (u64, usize) {
        let prefix = format!("/memfd:fake-cuda-{} ", self.tag);
        let mut sizes: HashMap<u64, u64> = HashMap::new();
        let mut descriptors = 0;
        for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            for fd in std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten() {
                let ours = std::fs::read_link(fd.path()).is_ok_and(|l| l.to_string_lossy().starts_with(&prefix));
                if let (true, Ok(metadata)) = (ours, std::fs::metadata(fd.path())) {
                    sizes.insert(metadata.ino(), metadata.len());
                    descriptors += 1;
                }
            }
        }
        (sizes.values().sum(), descriptors)
    }

    /// A development model in the card's directory: a llama whose embedding has `vocab` rows of 32 floats, mostly zeros.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn model(&self, name: &str, vocab: u64) -> PathBuf {
        let mut metadata = Metadata::default();
        metadata.set("general.architecture", Value::String("llama".into()));
        metadata.set("general.name", Value::String(name.into()));
        metadata.set("llama.attention.layer_norm_rms_epsilon", Value::F64(1e-5));
        for (key, value) in [
            ("block_count", 1),
            ("embedding_length", 32),
            ("feed_forward_length", 64),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
            ("vocab_size", vocab),
            ("context_length", 128),
        ] {
            metadata.set(&format!("llama.{key}"), Value::U64(value));
        }
        let tensors: [(&str, &[u64]); 11] = [
            ("token_embd.weight", &[32, vocab]),
            ("blk.0.attn_norm.weight", &[32]),
            ("blk.0.attn_q.weight", &[32, 32]),
            ("blk.0.attn_k.weight", &[32, 16]),
            ("blk.0.attn_v.weight", &[32, 16]),
            ("blk.0.attn_output.weight", &[32, 32]),
            ("blk.0.ffn_norm.weight", &[32]),
            ("blk.0.ffn_gate.weight", &[32, 64]),
            ("blk.0.ffn_up.weight", &[32, 64]),
            ("blk.0.ffn_down.weight", &[64, 32]),
            ("output_norm.weight", &[32]),
        ];
        let planned: Vec<(&str, GgmlType, &[u64])> =
            tensors.iter().map(|(name, shape)| (*name, GgmlType::F32, *shape)).collect();
        let plan = GgufPlan::new(&metadata, &planned).expect("plan");
        let path = self.dir.path().join(format!("{name}.gguf"));
        let file = std::fs::File::create(&path).expect("create");
        file.set_len(plan.file_len).expect("length");
        use std::os::unix::fs::FileExt;
        file.write_all_at(&plan.header, 0).expect("header");
        // Something to tell one place from another: every 3 MiB and a bit, the place itself.
        let begin = plan.header.len() as u64;
        let mut at = begin;
        while at + 8 <= plan.file_len {
            file.write_all_at(&at.to_le_bytes(), at).expect("mark");
            at += (3 << 20) + 40;
        }
        file.write_all_at(&[0x3c; 4], plan.file_len - 4).expect("mark");
        path
    }
}
