//! `ds4 serve`: a weight owner and a worker under one supervisor, for people without systemd.

mod keep;
pub mod keeper;
pub mod lock;
pub mod needs;
pub mod orphan;
pub mod plan;
pub mod process;
mod takeover;

use std::convert::Infallible;
use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use ds4_manifests::{Catalog, GgufModel};
use ds4_os::wait::LOOK;
use ds4_settings::{ConfigArgs, EXIT_MODEL, Origins};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::client::{control, reachable};
use crate::failure::Failure;
use keep::{Health, Kept, Wish, keep};
pub use lock::holder as supervisor;
use needs::{Needs, Wants};
use plan::{Plan, ServeFlags};
use process::{Launch, Notify, Process};
use takeover::{adopt, announce};

/// `ds4 serve`.
#[derive(clap::Args)]
#[command(
    after_help = "The flags below --model go to the processes that they belong to; what is not given comes from \
    their sections of the configuration file. `ds4 config` shows the result.\n\n\
    Ctrl-C or SIGTERM drains the worker, then ends the owner; a second one ends both at once. After kill -9 of serve \
    both keep running, and the next `ds4 serve` takes them over; if that fails, or they serve another model than it asks for, they go on \
    as they were.\n\n\
    A worker whose model is unloaded waits for one (`ds4 ctl load`); clients wait with it. When an owner that died is back \
    with the model, the worker is replaced by one that uses the new copy, after its requests."
)]
pub struct ServeArgs {
    /// GGUF file to serve, or its first shard (repeatable) [default: the starter model of `ds4 pull`]
    #[arg(long, value_name = "FILE")]
    model: Vec<PathBuf>,
    /// Prediction block (MTP) of the model, a GGUF file: it guesses tokens ahead at temperature 0 and in the syntax of tool
    /// calls, and never changes an answer
    #[arg(long, value_name = "FILE", requires = "model")]
    mtp: Option<PathBuf>,
    /// Most tokens that it guesses ahead in a step, 1 to 16
    #[arg(long, value_name = "N", requires = "mtp")]
    mtp_draft: Option<u32>,
    /// It guesses no further when its best guess's logit leads the second's by less
    #[arg(long, value_name = "LOGITS", requires = "mtp")]
    mtp_margin: Option<f32>,
    /// Token that it gets beside the model's state of a position: next (the one that follows) or same
    #[arg(long, value_name = "TOKEN", requires = "mtp")]
    mtp_alignment: Option<String>,
    /// Whose memory holds the weights: memfd (the machine's), cuda-vmm, or auto (a CUDA device where there is one)
    #[arg(long, value_name = "BACKEND", value_parser = ["auto", "memfd", "cuda-vmm"])]
    backend: Option<String>,
    /// Address that the HTTP API listens on, with its port
    #[arg(long, value_name = "ADDR", value_parser = ds4_settings::listen_address)]
    http: Option<SocketAddr>,
    /// Allow an address that other machines can reach, although the API asks for no keys
    #[arg(long)]
    allow_remote: bool,
    /// Serve models that are made for development and tests, such as the small ones of `ds4 gguf synth`
    #[arg(long)]
    allow_dev_models: bool,
    /// Context length in tokens
    #[arg(long, value_name = "TOKENS")]
    ctx: Option<u32>,
    /// Most requests that are computed together
    #[arg(long, value_name = "N")]
    max_batch: Option<u32>,
    /// Compute threads
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// More arguments for ds4-worker, after --
    #[arg(last = true, value_name = "WORKER_ARGS")]
    rest: Vec<OsString>,
    #[command(flatten)]
    flags: ServeFlags,
    #[command(flatten)]
    config: ConfigArgs,
}

impl ServeArgs {
    fn owner_args(&self) -> anyhow::Result<Vec<OsString>> {
        let mut args = Vec::new();
        for model in self.model.iter().chain(&self.mtp) {
            args.extend(["--model".into(), std::path::absolute(model)?.into()]);
        }
        if let Some(backend) = &self.backend {
            args.extend(["--backend".into(), backend.into()]);
        }
        args.extend(self.allow_dev_models.then(|| "--allow-dev-models".into()));
        Ok(args)
    }

    fn worker_args(&self) -> anyhow::Result<Vec<OsString>> {
        let given = [
            ("--mtp", self.mtp.as_deref().map(block_name).transpose()?),
            ("--mtp-draft", self.mtp_draft.map(|v| v.to_string())),
            ("--mtp-margin", self.mtp_margin.map(|v| v.to_string())),
            ("--mtp-alignment", self.mtp_alignment.clone()),
            ("--ctx", self.ctx.map(|v| v.to_string())),
            ("--max-batch", self.max_batch.map(|v| v.to_string())),
            ("--threads", self.threads.map(|v| v.to_string())),
        ];
        let flags = given.into_iter().filter_map(|(flag, value)| Some([OsString::from(flag), value?.into()])).flatten();
        let remote = self.allow_remote.then(|| "--allow-remote".into());
        Ok(flags.chain(remote).chain(self.rest.iter().cloned()).collect())
    }

    fn http_args(&self) -> Vec<OsString> {
        self.http.iter().flat_map(|address| ["--http".into(), address.to_string().into()]).collect()
    }
}

/// Name under which the owner holds the prediction block of this file.
fn block_name(path: &Path) -> anyhow::Result<String> {
    let refused = |why: String| Failure::error(EXIT_MODEL, format!("--mtp {}: {why}", path.display()));
    let file = GgufModel::open(path).map_err(|e| refused(e.to_string()))?;
    // Whether development blocks are allowed is the owner's business.
    match Catalog::builtin().identify_drafter(&file.metadata, &file.tensors, true) {
        Some(found) => Ok(found.map_err(|e| refused(e.to_string()))?.name),
        None => Err(refused("it is not the file of a prediction block, whose tensors are called mtp.0.…".into())),
    }
}

/// Runs until told to stop, or until a process cannot be started.
pub async fn serve(args: ServeArgs, origins: &Origins) -> anyhow::Result<ExitCode> {
    let mut plan = Plan::new(&args, origins)?;
    if args.config.print_config {
        ds4_os::show!("{}", plan.printed())?;
        return Ok(ExitCode::SUCCESS);
    }
    plan.create_dir()?;
    let mut lock = lock::Lock::take(&plan.dir)?;
    plan::remove_left(&plan.dir);
    let mut signals = Signals::new()?;

    let running_owner = adopt(control::owner_status(&plan.dir).await.ok().map(|s| s.pid));
    let worker_status = control::worker_status(&plan.dir).await.ok();
    let running_worker = adopt(worker_status.as_ref().map(|s| s.pid));
    let held = if running_owner.is_some() { control::models(&plan.dir).await? } else { Vec::new() };
    let models = if !plan.owner.config.contains_key("model") && held.iter().any(needs::alive) {
        // What it already holds is enough when no model is asked for.
        Vec::new()
    } else {
        plan.models()?
    };
    let wants = Wants::of(&plan.worker.config);
    // Before anything is taken over or loaded: what fails here concerns this command alone.
    if let Some(worker) = worker_status.filter(|_| running_worker.is_some()) {
        takeover::same_model(&worker, &held, &models, &wants)?;
        if let Some(asked) = args.http.filter(|a| a.port() != 0 && a.to_string() != worker.http) {
            ds4_os::say!("ds4 serve: the running worker goes on listening on {}, and not on {asked}", worker.http);
        }
    }
    let mut http = Http::new(&plan)?;
    if running_worker.is_none() {
        http.listen()?;
    }
    let mut asked = None;
    if let Some(owner) = &running_owner {
        tokio::select! {
            loaded = takeover::ensure_loaded(&plan.dir, &models) => {
                asked = loaded.map_err(|e| takeover::refused_by_running(&e, owner))?;
            }
            () = signals.stop() => {
                ds4_os::say!("ds4 serve: told to stop before it took over; what runs goes on");
                return Ok(ExitCode::SUCCESS);
            }
        }
    }

    let (owner_is_ours, worker_is_ours) = (running_owner.is_none(), running_worker.is_none());
    let mut owner = Task::start(Kept {
        name: "weight owner",
        notify: Notify::bind(&plan.dir, "owner")?,
        policy: plan.owner_policy(),
        needs: None,
        adopted: announce("weight owner", running_owner),
        launch: {
            let (path, args) = (plan.owner.path.clone(), plan.owner.args.clone());
            move |notify: &Notify, _: &[OsString]| {
                Launch { program: &path, args: &args, listener: None, notify, log: None, isolated: false }.start()
            }
        },
    });
    let mut worker = None;
    let needs = Needs::new(owner.health.clone(), plan.dir.clone(), wants, asked);
    let supervised = tokio::select! {
        ended = supervise(&plan, http, &mut owner, (running_worker, needs), &mut worker, &mut signals) => ended,
        never = stay_found(&plan, &mut lock) => match never {},
    };
    match supervised {
        Ok(()) => shut_down(worker, Some(owner), &mut signals).await,
        Err(error) => {
            // What was found running is left alone.
            shut_down(worker.filter(|_| worker_is_ours), owner_is_ours.then_some(owner), &mut signals).await?;
            Err(error)
        }
    }
}

/// From the owner's start until told to stop. The worker's task is left in `worker`.
///
/// # Errors
/// A process cannot be started.
async fn supervise(
    plan: &Plan,
    mut http: Http,
    owner: &mut Task,
    (running_worker, needs): (Option<Process>, Needs),
    worker: &mut Option<Task>,
    signals: &mut Signals,
) -> anyhow::Result<()> {
    tokio::select! {
        result = owner.ready() => result?,
        () = signals.stop() => return Ok(()),
    }
    if running_worker.is_none()
        && let Some(why) = needs::only_blocks(&control::models(&plan.dir).await?)
    {
        return Err(Failure::error(EXIT_MODEL, why));
    }
    let worker = worker.insert(Task::start(Kept {
        name: "worker",
        notify: Notify::bind(&plan.dir, "worker")?,
        policy: plan.worker_policy(),
        needs: Some(needs),
        adopted: announce("worker", running_worker),
        launch: {
            let (path, args) = (plan.worker.path.clone(), plan.worker.args.clone());
            move |notify: &Notify, more: &[OsString]| {
                let listener = http.listen()?;
                // The port that was really bound, for the worker's own reports; it matters when the asked one was 0.
                let address = vec!["--http".into(), listener.local_addr()?.to_string().into()];
                let args = [args.as_slice(), more, &address].concat();
                Launch { program: &path, args: &args, listener: Some(listener), notify, log: None, isolated: false }
                    .start()
            }
        },
    }));
    tokio::select! {
        result = worker.ready() => result?,
        () = signals.stop() => return Ok(()),
    }
    if let Err(error) = welcome(&plan.dir).await {
        ds4_os::say!("ds4 serve: the worker is ready, but does not say where it listens: {error:#}");
    }
    let mut owner_watched = true;
    let orphans = orphan::replace(plan.dir.clone(), owner.health.clone());
    tokio::pin!(orphans);
    loop {
        tokio::select! {
            () = signals.stop() => return Ok(()),
            result = worker.finished() => return result,
            never = &mut orphans => match never {},
            // The worker has the weights mapped: it serves on without an owner, but could not be replaced.
            result = owner.finished(), if owner_watched => {
                owner_watched = false;
                if let Err(error) = result {
                    ds4_os::say!("ds4 serve: {error}; the worker serves on, but has no successor until an owner is back");
                }
            }
        }
    }
}

/// Makes a runtime directory again that somebody removed, and this supervisor's lock in it: owner and worker listen there again
/// by themselves, and what comes next needs it.
async fn stay_found(plan: &Plan, lock: &mut lock::Lock) -> Infallible {
    let mut said = None;
    loop {
        tokio::time::sleep(LOOK).await;
        if lock.intact(&plan.dir) {
            continue;
        }
        let shown = plan.dir.display();
        match plan.create_dir().and_then(|()| lock::Lock::take(&plan.dir)) {
            Ok(taken) => {
                *lock = taken;
                said = None;
                ds4_os::say!("ds4 serve: somebody removed files in {shown}, or all of it; made again");
            }
            Err(error) => {
                let text = format!("{error:#}");
                if said.as_ref() != Some(&text) {
                    ds4_os::say!(
                        "ds4 serve: somebody removed files in {shown}, or all of it, and no worker can follow: {text}"
                    );
                    said = Some(text);
                }
            }
        }
    }
}

/// A kept process and the wires to it. Dropped, it lets go of the process and leaves it running.
struct Task {
    wish: watch::Sender<Wish>,
    health: watch::Receiver<Health>,
    join: JoinHandle<anyhow::Result<()>>,
}

impl Task {
    fn start<L>(kept: Kept<L>) -> Self
    where
        L: FnMut(&Notify, &[OsString]) -> anyhow::Result<Process> + Send + 'static,
    {
        let (wish, wished) = watch::channel(Wish::Run);
        let (report, health) = watch::channel(Health::default());
        Self { wish, health, join: tokio::spawn(keep(kept, wished, report)) }
    }

    /// Returns at the first ready, or with why there will be none.
    async fn ready(&mut self) -> anyhow::Result<()> {
        if self.health.wait_for(|h| h.starts > 0).await.is_ok() {
            return Ok(());
        }
        // Its sender is gone, so it has ended.
        self.finished().await
    }

    /// Returns when it has given up or was ended. Not to be asked again after that.
    async fn finished(&mut self) -> anyhow::Result<()> {
        (&mut self.join).await.context("the supervisor's own task broke")?
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.join.abort();
    }
}

/// Ends the worker, then the owner; one more signal kills instead.
async fn shut_down(worker: Option<Task>, owner: Option<Task>, signals: &mut Signals) -> anyhow::Result<ExitCode> {
    for mut task in worker.into_iter().chain(owner) {
        if task.join.is_finished() {
            continue;
        }
        let _ = task.wish.send(Wish::Drain);
        tokio::select! {
            result = task.finished() => result?,
            () = signals.stop() => {
                let _ = task.wish.send(Wish::Kill);
                task.finished().await?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// SIGTERM, SIGINT and SIGHUP: a closed terminal ends serve in order too.
struct Signals([Signal; 3]);

impl Signals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self([signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, signal(SignalKind::hangup())?]))
    }

    async fn stop(&mut self) {
        let [term, int, hup] = &mut self.0;
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            _ = hup.recv() => {}
        }
    }
}

/// The worker's listening socket. Held here too, connections queue while a worker is replaced instead of being refused.
struct Http {
    address: SocketAddr,
    listener: Option<TcpListener>,
}

impl Http {
    fn new(plan: &Plan) -> anyhow::Result<Self> {
        let text = plan.worker.config.get("http").and_then(toml::Value::as_str);
        let address = text.context("the worker's configuration has no http address")?.parse()?;
        Ok(Self { address, listener: None })
    }

    /// Binds at the first call: a worker that we took over still holds the port until it ends.
    fn listen(&mut self) -> anyhow::Result<&TcpListener> {
        let listener = match self.listener.take() {
            Some(listener) => listener,
            None => TcpListener::bind(self.address)
                .with_context(|| format!("cannot listen on {}; choose another address with --http", self.address))?,
        };
        Ok(self.listener.insert(listener))
    }
}

/// Where it is and how to talk to it.
async fn welcome(dir: &Path) -> anyhow::Result<()> {
    let status = control::worker_status(dir).await?;
    let url = format!("http://{}", status.http.parse().map_or(status.http.clone(), |a| reachable(a).to_string()));
    let elsewhere = elsewhere(dir);
    // A terminal that is gone is no reason to end what serves.
    let _ = ds4_os::show!(
        "ds4 serves {model} at {url}\n\n  \
         curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n    \
         -d '{{\"model\": \"{model}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Hello!\"}}], \"temperature\": 0}}'\n\n\
         or `ds4 chat{elsewhere}`. `ds4 ctl status{elsewhere}` shows what runs; Ctrl-C ends it.\n",
        model = status.model,
    );
    Ok(())
}

/// The flag that commands of another shell need to find `dir`.
fn elsewhere(dir: &Path) -> String {
    if dir == ds4_settings::default_runtime_dir() {
        return String::new();
    }
    let text = dir.display().to_string();
    let plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-+".contains(c));
    format!(" --runtime-dir {}", if plain { text } else { format!("'{}'", text.replace('\'', r"'\''")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_of_a_directory_where_they_would_not_look() {
        assert_eq!(elsewhere(&ds4_settings::default_runtime_dir()), "");
        assert_eq!(elsewhere(Path::new("/run/my-ds4")), " --runtime-dir /run/my-ds4");
        assert_eq!(elsewhere(Path::new("/a b/it's")), r" --runtime-dir '/a b/it'\''s'");
    }
}
