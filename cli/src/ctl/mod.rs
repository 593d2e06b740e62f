//! `ds4 ctl`: look at and control a running owner and worker.

mod lifecycle;
mod load;
pub mod render;

pub use load::{byte_bar, exit_code as load_exit_code};

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use clap::Subcommand;
use ds4_proto::v1;
use serde_json::{Value, json};

use crate::client::{RuntimeArgs, control};
use crate::serve::keeper::{Keeper, keeper};
use crate::serve::{needs, orphan};
use render::{Cell, age, bytes, cell, object, sheet, table};

/// `ds4 ctl`.
#[derive(clap::Args)]
pub struct CtlArgs {
    #[command(flatten)]
    runtime: RuntimeArgs,
    /// Print JSON: one object, or for load and watch one object a line
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: CtlCommand,
}

#[derive(Subcommand)]
enum CtlCommand {
    /// Owner, worker and models at a glance
    Status,
    /// Models that the owner holds, one row an epoch
    Models,
    /// Processes that have a model's memory mapped
    Leases,
    /// Load a model into the owner and follow its progress
    Load(load::LoadArgs),
    /// Give a model's memory back once its workers have left, or clear its FAILED load. Under `ds4 serve` the worker then waits
    /// for the next model
    Unload {
        /// Model name, as `ds4 ctl models` shows it
        model: String,
        /// Only this epoch
        #[arg(long, value_name = "N")]
        epoch: Option<u64>,
        /// Seconds until workers that still hold it are told to leave [default: the owner's]
        #[arg(long, value_name = "SECONDS")]
        deadline: Option<u32>,
    },
    /// Replace the running worker: drain it, then wait for its successor
    Restart(lifecycle::RestartArgs),
    /// Let the worker finish its requests and exit (a supervisor starts its successor)
    Drain {
        /// Seconds that running and waiting requests may take [default: the worker's]
        #[arg(long, value_name = "SECONDS")]
        deadline: Option<u32>,
    },
    /// End worker, owner and supervisor, in that order
    Stop(lifecycle::StopArgs),
    /// Print each change of a model's state as it happens; with --json also each lease that comes or goes
    Watch,
}

/// Runs one command.
pub async fn ctl(args: CtlArgs) -> anyhow::Result<()> {
    let dir = args.runtime.dir();
    let out = Output { json: args.json };
    match args.command {
        CtlCommand::Status => status(&dir, out).await,
        CtlCommand::Models => {
            out.rows("models", &model_rows(&control::models(&dir).await?), "The owner holds no model.")
        }
        CtlCommand::Leases => leases(&dir, out).await,
        CtlCommand::Load(args) => load::load(&dir, out, args).await,
        CtlCommand::Unload { model, epoch, deadline } => {
            let request = v1::UnloadRequest {
                model: model.clone(),
                epoch: epoch.unwrap_or(0),
                deadline_s: deadline.unwrap_or(0),
            };
            let reply = control::owner(&dir).await?.unload(request).await.map_err(control::status)?.into_inner();
            let mut text = format!(
                "{model}: {} epoch(s) given back, {} lease(s) waited for.",
                reply.epochs, reply.leases_waited_for
            );
            let left = control::models(&dir).await?.iter().any(|m| needs::alive(m) && needs::servable(m));
            if !left && crate::serve::supervisor(&dir).is_some() {
                text.push_str(
                    "\nNothing is served now, and requests wait: `ds4 ctl load FILE.gguf` gives the worker its next model.",
                );
            }
            let value =
                json!({"epochs": reply.epochs, "leases_waited_for": reply.leases_waited_for, "model_left": left});
            out.object(value, &text)
        }
        CtlCommand::Restart(args) => lifecycle::restart(&dir, out, &args).await,
        CtlCommand::Drain { deadline } => {
            let worker = control::ready_worker(&dir).await?;
            let alone = keeper(&dir, worker.pid) == Keeper::Nobody;
            let reply = lifecycle::drain(&dir, deadline).await?;
            let mut text = format!("Draining: {} running, {} queued.", reply.running, reply.queued);
            if alone {
                text.push_str("\nNothing supervises the worker: none follows it until `ds4 serve` starts one.");
            }
            out.object(json!({"running": reply.running, "queued": reply.queued}), &text)
        }
        CtlCommand::Stop(args) => lifecycle::stop(&dir, out, &args).await,
        CtlCommand::Watch => watch(&dir, out).await,
    }
}

/// Prints for people or for scripts.
#[derive(Clone, Copy)]
struct Output {
    json: bool,
}

impl Output {
    fn object(self, value: Value, text: &str) -> anyhow::Result<()> {
        let line = if self.json { value.to_string() } else { text.trim_end().to_string() };
        let mut out = std::io::stdout();
        writeln!(out, "{line}")?;
        Ok(out.flush()?)
    }

    fn rows(self, key: &str, rows: &[Vec<Cell>], empty: &str) -> anyhow::Result<()> {
        let values: Vec<Value> = rows.iter().map(|r| object(r)).collect();
        let text = if rows.is_empty() { empty.to_string() } else { table(rows) };
        self.object(json!({key: values}), &text)
    }
}

/// `READY`, `LOADING`, ...
fn state_name(state: i32) -> &'static str {
    v1::ModelState::try_from(state).map_or("UNKNOWN", |s| s.as_str_name())
}

fn model_row(m: &v1::Model) -> Vec<Cell> {
    let state = match state_name(m.state) {
        "LOADING" if m.bytes > 0 => format!("LOADING {}%", u128::from(m.done_bytes) * 100 / u128::from(m.bytes)),
        state => state.to_string(),
    };
    vec![
        cell("name", m.name.as_str()),
        cell("epoch", m.epoch),
        cell("state", state_name(m.state)).shown(state),
        cell("bytes", m.bytes).shown(bytes(m.bytes)),
        cell("leases", m.leases),
        cell("family", m.family.as_str()).shown(format!(
            "{}{}",
            m.family,
            if m.synthetic { " (synthetic weights)" } else { "" }
        )),
        cell("synthetic", m.synthetic).hidden(),
        cell("artifact", m.artifact.as_str()).hidden(),
        cell("chunks", m.chunks).hidden(),
        cell("done_bytes", m.done_bytes).hidden(),
        cell("loaded_s", m.loaded_s).shown(format!("{:.1}s", m.loaded_s)),
        cell("blake3", m.blake3.as_str()).shown(format!(
            "{}{}",
            m.blake3.get(..12).unwrap_or(&m.blake3),
            if m.known_hash { " (known)" } else { "" }
        )),
        cell("known_hash", m.known_hash).hidden(),
        cell("path", m.path.as_str()).hidden(),
        cell("error_code", m.error_code.as_str()).hidden(),
        cell("error", m.error.as_str()),
    ]
}

fn model_rows(models: &[v1::Model]) -> Vec<Vec<Cell>> {
    models.iter().map(model_row).collect()
}

fn owner_cells(s: &v1::StatusReply) -> Vec<Cell> {
    vec![
        cell("version", s.version.as_str()),
        cell("pid", s.pid),
        cell("uptime_s", s.uptime_s).shown(age(s.uptime_s)),
        cell("draining", s.draining),
        cell("backend", s.backend.as_str()),
        cell("weight_bytes", s.weight_bytes).shown(bytes(s.weight_bytes)),
        cell("rss_bytes", s.rss_bytes).shown(bytes(s.rss_bytes)),
        cell("fds", s.fds),
    ]
}

/// The prediction block and how often its guesses came true.
fn guesses(s: &v1::WorkerStatusReply) -> String {
    match (s.drafter.as_str(), u128::from(s.accepted_tokens) * 100 / u128::from(s.drafted_tokens.max(1))) {
        ("", _) => "none".to_owned(),
        (name, _) if s.drafted_tokens == 0 => format!("{name}, nothing guessed yet"),
        (name, percent) => format!("{name}, {percent}% of {} guesses came true", s.drafted_tokens),
    }
}

fn worker_cells(s: &v1::WorkerStatusReply) -> Vec<Cell> {
    vec![
        cell("version", s.version.as_str()),
        cell("pid", s.pid),
        cell("state", s.state.as_str()),
        cell("model", s.model.as_str()).shown(format!(
            "{} (epoch {}{})",
            s.model,
            s.epoch,
            if s.synthetic { ", synthetic weights" } else { "" }
        )),
        cell("synthetic", s.synthetic).hidden(),
        cell("epoch", s.epoch).hidden(),
        cell("blake3", s.blake3.as_str()).hidden(),
        cell("http", s.http.as_str()).shown(format!("http://{}", s.http)),
        cell("device", s.device.as_str()),
        cell("drafter", s.drafter.as_str()).shown(guesses(s)),
        cell("drafted_tokens", s.drafted_tokens).hidden(),
        cell("accepted_tokens", s.accepted_tokens).hidden(),
        cell("running", s.running),
        cell("queued", s.queued),
        cell("context", s.context),
        cell("max_batch", s.max_batch),
        cell("requests_total", s.requests_total),
        cell("uptime_s", s.uptime_s).shown(age(s.uptime_s)),
        cell("ready_ms", s.ready_ms).shown(format!("{:.0} ms after its start", s.ready_ms)),
    ]
}

/// Whose memory the worker has mapped. `leases` are those of the running owner.
fn weights_cell(worker: &v1::WorkerStatusReply, leases: Option<&[v1::Lease]>) -> Cell {
    match leases {
        Some(leases) if !orphan::is_orphan(worker, leases) => cell("weights", "leased").shown("leased from the owner"),
        Some(_) => cell("weights", "orphaned").shown(
            "of an owner that is gone, held beside this one's; `ds4 serve` replaces such a worker by itself once the same \
             model is READY, `ds4 ctl restart` does it by hand",
        ),
        None => cell("weights", "orphaned").shown("of an owner that is gone; served on, but not for a successor"),
    }
}

/// Owner, worker and models; fails with exit code 3 only when neither process answers.
async fn status(dir: &Path, out: Output) -> anyhow::Result<()> {
    let (owner, worker) = tokio::join!(control::owner_status(dir), control::worker_status(dir));
    if let (Err(error), Err(_)) = (&owner, &worker) {
        let nothing = || format!("nothing runs in {} ({error:#}); start it with `ds4 serve`", dir.display());
        let text = control::denied(dir).unwrap_or_else(nothing);
        return Err(crate::failure::Failure::error(ds4_settings::EXIT_PEER, text));
    }
    let (models, leases) = match &owner {
        Ok(_) => tokio::try_join!(control::models(dir), control::leases(dir))?,
        Err(_) => (Vec::new(), Vec::new()),
    };
    let supervisor = crate::serve::supervisor(dir);
    let kept_by = worker.as_ref().ok().map(|s| keeper(dir, s.pid));
    let supervised = match kept_by {
        Some(Keeper::Serve(_) | Keeper::Manager) => Some(true),
        Some(Keeper::Nobody) => Some(false),
        Some(Keeper::Unknown) | None => supervisor.map(|_| true),
    };
    let worker_cells = |s: &v1::WorkerStatusReply| {
        let mut cells = worker_cells(s);
        cells.push(weights_cell(s, owner.as_ref().ok().map(|_| leases.as_slice())));
        cells
    };
    let value = json!({
        "owner": owner.as_ref().ok().map(|s| object(&owner_cells(s))),
        "worker": worker.as_ref().ok().map(|s| object(&worker_cells(s))),
        "supervisor_pid": supervisor,
        "supervised": supervised,
        "models": models.iter().map(|m| object(&model_row(m))).collect::<Vec<_>>(),
    });
    let part = |name: &str, cells: Result<Vec<Cell>, &anyhow::Error>| match cells {
        Ok(cells) => sheet(name, &cells),
        Err(e) => format!("{name}\n  not running ({e:#})\n"),
    };
    let text = [
        part("owner", owner.as_ref().map(owner_cells)),
        part("worker", worker.as_ref().map(worker_cells)),
        if supervisor.is_some() && worker.is_err() && !models.iter().any(|m| needs::alive(m) && needs::servable(m)) {
            "  it waits for a model: `ds4 ctl load FILE.gguf`\n".into()
        } else {
            String::new()
        },
        match (supervisor, kept_by) {
            (Some(pid), _) => format!("supervised by `ds4 serve` (pid {pid})\n"),
            (None, Some(Keeper::Manager)) => "supervised by a service manager\n".into(),
            (None, Some(Keeper::Nobody)) => {
                "not supervised: when the worker ends, none follows it; `ds4 serve` takes over what runs\n".into()
            }
            (None, _) => String::new(),
        },
        table(&model_rows(&models)),
    ]
    .join("");
    out.object(value, &text)
}

async fn leases(dir: &Path, out: Output) -> anyhow::Result<()> {
    let leases = control::leases(dir).await?;
    let row = |l: &v1::Lease| {
        vec![
            cell("id", l.id),
            cell("pid", l.pid),
            cell("uid", l.uid),
            cell("model", l.model.as_str()),
            cell("epoch", l.epoch),
            cell("age_s", l.age_s).shown(age(l.age_s)),
            cell("client", l.client.as_str()),
        ]
    };
    let orphan = control::worker_status(dir).await.ok().filter(|w| orphan::is_orphan(w, &leases));
    if let Some(worker) = orphan.filter(|_| !out.json) {
        ds4_os::say!(
            "The worker (pid {}) holds no lease: it uses the weights of an owner that is gone (`ds4 ctl status`).",
            worker.pid
        );
    }
    out.rows("leases", &leases.iter().map(row).collect::<Vec<_>>(), "No process holds a lease.")
}

async fn watch(dir: &Path, out: Output) -> anyhow::Result<()> {
    let mut events = control::owner(dir).await?.watch(v1::WatchRequest {}).await.map_err(control::status)?.into_inner();
    // The owner also reports leases that come and go, which are fields of the JSON and nothing new in the text.
    let mut shown: BTreeMap<u64, String> = BTreeMap::new();
    while let Some(event) = events.message().await.map_err(control::status)? {
        let model = event.model.context("the owner sent an event without a model")?;
        let mut cells = vec![cell("sequence", event.sequence)];
        cells.extend(model_row(&model));
        let mut text = format!("{} epoch {}: {}", model.name, model.epoch, state_name(model.state));
        if !model.error.is_empty() {
            text.push_str(&format!(" ({}: {})", model.error_code, model.error));
        }
        let epoch = model.epoch;
        if out.json || shown.get(&epoch) != Some(&text) {
            out.object(object(&cells), &text)?;
            shown.insert(epoch, text);
        }
    }
    Ok(())
}
