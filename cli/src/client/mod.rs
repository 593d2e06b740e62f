//! How the command talks to running processes: HTTP to a worker's API, gRPC to owner and worker.

pub mod control;
pub mod debug;
pub mod http;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use ds4_proto::v1::debug_client::DebugClient;
use ds4_settings::EXIT_PEER;
use tonic::transport::Channel;

use crate::failure::Failure;
use http::Server;

/// Where to find a running worker.
#[derive(clap::Args, Clone, Debug)]
pub struct WorkerArgs {
    /// The worker's HTTP address, e.g. http://127.0.0.1:8080 [default: asked of the worker in the runtime directory]
    #[arg(long, env = "DS4_URL", value_name = "URL")]
    url: Option<String>,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Where the sockets are.
#[derive(clap::Args, Clone, Debug)]
pub struct RuntimeArgs {
    /// Directory of the control sockets [default: $XDG_RUNTIME_DIR/ds4; without that /run/ds4 for root, /tmp/ds4-UID for
    /// others]
    #[arg(long, global = true, env = "DS4_RUNTIME_DIR", value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

impl RuntimeArgs {
    /// The directory that is meant.
    pub fn dir(&self) -> PathBuf {
        self.runtime_dir.clone().unwrap_or_else(ds4_settings::default_runtime_dir)
    }
}

impl WorkerArgs {
    /// The running worker's HTTP server.
    ///
    /// # Errors
    /// Exit code 3 when no worker answers, with how to start one.
    pub async fn find(&self) -> anyhow::Result<Server> {
        if let Some(url) = &self.url {
            return Server::parse(url);
        }
        let dir = self.runtime.dir();
        let status = control::ready_worker(&dir).await.map_err(|e| no_worker(&dir, &e))?;
        let address: SocketAddr = status.http.parse().map_err(|e| {
            Failure::error(EXIT_PEER, format!("the worker reports the HTTP address `{}`: {e}", status.http))
        })?;
        Ok(Server::at(reachable(address)))
    }
}

impl RuntimeArgs {
    /// The debugging service of the worker in the directory that is meant.
    ///
    /// # Errors
    /// Exit code 3 when no worker answers, with how to start one.
    pub async fn debug(&self) -> anyhow::Result<DebugClient<Channel>> {
        let dir = self.dir();
        control::ready_worker(&dir).await.map_err(|e| no_worker(&dir, &e))?;
        debug::connect(&dir).await.map_err(|e| no_worker(&dir, &e))
    }
}

impl WorkerArgs {
    /// The running worker's debugging service, which is on its Unix socket only.
    ///
    /// # Errors
    /// Exit code 2 when a URL was given, 3 when no worker answers.
    pub async fn debug(&self) -> anyhow::Result<DebugClient<Channel>> {
        if let Some(url) = &self.url {
            return Err(Failure::error(
                ds4_settings::EXIT_USAGE,
                format!(
                    "dumps go over a worker's Unix socket, not over {url}: give --runtime-dir instead of --url or DS4_URL"
                ),
            ));
        }
        self.runtime.debug().await
    }
}

fn no_worker(dir: &Path, error: &anyhow::Error) -> anyhow::Error {
    if let Some(pid) = crate::serve::supervisor(dir) {
        let text = format!("`ds4 serve` (pid {pid}) supervises {}, but no worker is ready: {error:#}", dir.display());
        return Failure::error(EXIT_PEER, text);
    }
    if let Some(why) = control::denied(dir) {
        return Failure::error(EXIT_PEER, why);
    }
    Failure::error(
        EXIT_PEER,
        format!("{error:#}\nStart one with `ds4 serve`, or name a running one with --url or --runtime-dir.",),
    )
}

/// An address to connect to for an address that is listened on.
pub fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_listener_is_reached_over_loopback() {
        assert_eq!(reachable("0.0.0.0:80".parse().unwrap()), "127.0.0.1:80".parse().unwrap());
        assert_eq!(reachable("[::]:80".parse().unwrap()), "[::1]:80".parse().unwrap());
        assert_eq!(reachable("10.0.0.7:80".parse().unwrap()), "10.0.0.7:80".parse().unwrap());
    }
}
