//! Where ds4 keeps its sockets and models.

use std::path::PathBuf;

/// Name of the broker's SOCK_SEQPACKET socket in the runtime directory.
pub const BROKER_SOCKET: &str = "broker.sock";
/// Name of the owner's gRPC socket in the runtime directory.
pub const OWNER_SOCKET: &str = "owner.sock";
/// Name of the worker's gRPC socket in the runtime directory.
pub const WORKER_SOCKET: &str = "worker.sock";

/// An absolute path from the environment; empty and relative values count as unset, as the XDG specification asks.
fn absolute(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute())
}

/// The runtime directory when neither flag nor file names one: `$XDG_RUNTIME_DIR/ds4`, `/run/ds4` for root, else
/// `ds4-UID` in the temporary directory.
pub fn default_runtime_dir() -> PathBuf {
    let uid = nix::unistd::geteuid();
    match absolute("XDG_RUNTIME_DIR") {
        Some(dir) => dir.join("ds4"),
        None if uid.is_root() => PathBuf::from("/run/ds4"),
        None => std::env::temp_dir().join(format!("ds4-{uid}")),
    }
}

/// `$XDG_CACHE_HOME/ds4`, by default `~/.cache/ds4`; `None` without a home directory.
pub fn cache_dir() -> Option<PathBuf> {
    absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|h| h.join(".cache"))).map(|c| c.join("ds4"))
}

/// Where `ds4 pull` puts models: `models` in [`cache_dir`].
pub fn models_dir() -> Option<PathBuf> {
    cache_dir().map(|c| c.join("models"))
}
