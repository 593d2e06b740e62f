//! Shared by this crate's tests: fixtures, the starter model's metadata, random numbers.

use std::path::PathBuf;

/// SplitMix64 (Steele, Lea and Flood, 2014): reproducible random cases.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..n`; 0 for n = 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % (n.max(1) as u64)).expect("below a usize")
    }
}

/// A JSON file under `tests/fixtures`.
pub(crate) fn fixture(name: &str) -> serde_json::Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("fixture is JSON")
}

/// Metadata of the starter model, SmolLM2-135M-Instruct.
pub(crate) fn starter_metadata() -> &'static ds4_manifests::Metadata {
    static METADATA: std::sync::OnceLock<ds4_manifests::Metadata> = std::sync::OnceLock::new();
    METADATA.get_or_init(|| {
        let path = std::env::var_os("DS4_STARTER_MODEL").map(PathBuf::from).unwrap_or_else(|| {
            let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
            cache.unwrap_or_default().join("ds4/models/SmolLM2-135M-Instruct.Q4_1.gguf")
        });
        match ds4_manifests::GgufModel::open(&path) {
            Ok(model) => model.metadata,
            Err(e) => {
                panic!("the starter model is needed: {e}; run scripts/test, which fetches it, or set DS4_STARTER_MODEL")
            }
        }
    })
}

/// Its tokenizer, built once.
pub(crate) fn starter_tokenizer() -> &'static crate::Tokenizer {
    static TOKENIZER: std::sync::OnceLock<crate::Tokenizer> = std::sync::OnceLock::new();
    TOKENIZER.get_or_init(|| crate::Tokenizer::from_metadata(starter_metadata()).expect("tokenizer"))
}

/// DeepSeek V4's `tokenizer.json`, which no repository of ours holds: 6 MB.
pub(crate) fn deepseek_v4_tokenizer_json() -> PathBuf {
    let path = std::env::var_os("DS4_DEEPSEEK_TOKENIZER").map(PathBuf::from).unwrap_or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
        cache.unwrap_or_default().join("ds4/tokenizers/deepseek-v4/tokenizer.json")
    });
    assert!(
        path.is_file(),
        "DeepSeek V4's tokenizer is needed at {}; run scripts/test, which fetches it, or set DS4_DEEPSEEK_TOKENIZER",
        path.display()
    );
    path
}
