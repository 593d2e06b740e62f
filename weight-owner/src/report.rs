//! What the daemon and its loader child say to each other, over a SOCK_SEQPACKET pair that is the child's stdin.
//!
//! Both ends are the same program file (`/proc/self/exe`), so the messages have no version: JSON, one a packet.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::loader::backend::Choice;

/// No report is longer, in bytes. The longest is [`Report::Published`] with a length per chunk.
pub const MAX_REPORT: usize = 256 << 10;

/// What a loader is to do: the first and only message of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The GGUF, or any of its shards.
    pub path: PathBuf,
    /// Name to serve it under; empty: the catalog's.
    pub name: String,
    /// Content hash that it must have, in hexadecimal.
    pub expect_blake3: Option<String>,
    /// Only report the plan.
    pub plan_only: bool,
    /// Content of the epoch that was loaded from this path earlier: when the file still has it, nothing is loaded.
    pub unless_blake3: Option<String>,
    /// Epoch that goes into the manifest.
    pub epoch: u64,
    /// Bytes to leave free.
    pub reserve_bytes: u64,
    /// Accept catalog entries for development.
    pub allow_dev_models: bool,
    /// Whose memory.
    pub backend: Choice,
}

/// Bytes that a load needs and what there is, judged before the first large allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Name that the model will have.
    pub model: String,
    /// Architecture family.
    pub family: String,
    /// Catalog entry.
    pub artifact: String,
    /// The weights are random.
    pub synthetic: bool,
    /// Tensor chunks with padding.
    pub weight_bytes: u64,
    /// The manifest.
    pub metadata_bytes: u64,
    /// To be left free.
    pub reserve_bytes: u64,
    /// Free now.
    pub available_bytes: u64,
    /// By whose estimate.
    pub available_source: String,
    /// Number of chunks.
    pub chunks: u64,
    /// Whose memory: `memfd` or `cuda-vmm`.
    pub backend: String,
    /// Why that one.
    pub why: String,
}

impl Plan {
    /// All that must be free.
    pub fn needed_bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.metadata_bytes).saturating_add(self.reserve_bytes)
    }

    /// Whether it is.
    pub fn fits(&self) -> bool {
        self.needed_bytes() <= self.available_bytes
    }

    /// The refusal when it does not fit: missing bytes and levers.
    pub fn refusal(&self) -> Failure {
        let missing = self.needed_bytes().saturating_sub(self.available_bytes);
        Failure::memory(format!(
            "{missing} bytes ({}) are missing to load {}: weights {} + metadata {} + reserve {} = {}, but only {} are \
             available according to {}; unload another model or free memory, lower --reserve-mib, or take a smaller \
             quantisation",
            bytes(missing),
            self.model,
            bytes(self.weight_bytes),
            bytes(self.metadata_bytes),
            bytes(self.reserve_bytes),
            bytes(self.needed_bytes()),
            bytes(self.available_bytes),
            self.available_source,
        ))
    }

    /// For people, a line a class of bytes.
    pub fn to_text(&self) -> String {
        format!(
            "plan for {} ({}, {})\n  backend    {} ({})\n  weights    {:>12} in {} chunk(s)\n  metadata   {:>12}\n  reserve    {:>12}\n  needed     \
             {:>12}\n  available  {:>12} ({})\n  verdict    {}\n",
            self.model,
            self.family,
            self.artifact,
            self.backend,
            self.why,
            bytes(self.weight_bytes),
            self.chunks,
            bytes(self.metadata_bytes),
            bytes(self.reserve_bytes),
            bytes(self.needed_bytes()),
            bytes(self.available_bytes),
            self.available_source,
            if self.fits() { "fits" } else { "does not fit" },
        )
    }
}

/// `n` bytes in a binary unit, with one decimal.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// What a loader says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// The file is valid and this is what it takes.
    Planned(Plan),
    /// Within a stage.
    Progress {
        /// Stage.
        stage: String,
        /// Bytes done.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// A stage is over.
    Stage {
        /// Stage.
        stage: String,
        /// Bytes that it handled.
        bytes: u64,
        /// GiB/s of it; 0 when it handles none.
        gib_per_s: f64,
        /// Seconds that it took.
        seconds: f64,
    },
    /// Something that a person should know.
    Note {
        /// A sentence.
        text: String,
    },
    /// The file still has the content `unless_blake3`; nothing was loaded.
    Unchanged,
    /// Carries descriptors of the next `count` chunks.
    Chunks {
        /// How many.
        count: u64,
    },
    /// The last message; carries the manifest's descriptor.
    Published {
        /// Bytes of the manifest.
        manifest_len: u64,
        /// Length of each chunk.
        chunks: Vec<u64>,
        /// Content hash in hexadecimal.
        blake3: String,
        /// The catalog knows this hash.
        known: bool,
        /// The chunks are sealed memfds; otherwise device memory, of which only a driver can tell anything.
        sealed: bool,
    },
    /// The last message of a load that failed.
    Failed(Failure),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            model: "m".into(),
            weight_bytes: 100 << 20,
            metadata_bytes: 1 << 20,
            reserve_bytes: 512 << 20,
            available_bytes: 600 << 20,
            available_source: "MemAvailable".into(),
            ..Plan::default()
        }
    }

    #[test]
    fn m8_refusal_names_the_missing_bytes_and_the_lever_and_has_its_own_exit_code() {
        let failure = plan().refusal();
        assert!(!plan().fits());
        assert_eq!((failure.code.as_str(), failure.exit), ("not_enough_memory", 5));
        // 100 + 1 + 512 - 600 = 13 MiB.
        assert!(failure.message.starts_with("13631488 bytes (13.0 MiB) are missing"), "{failure}");
        assert!(failure.message.contains("--reserve-mib") && failure.message.contains("MemAvailable"), "{failure}");
    }

    #[test]
    fn a_plan_that_needs_exactly_what_there_is_fits() {
        let exact = Plan { available_bytes: 613 << 20, ..plan() };
        assert!(exact.fits());
        assert!(!Plan { available_bytes: (613 << 20) - 1, ..plan() }.fits());
        assert!(!Plan { weight_bytes: u64::MAX, ..plan() }.fits());
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(90 << 30), "90.0 GiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
    }
}
