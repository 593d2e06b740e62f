//! Drives the real binary: tiny models, start and stop, gRPC and broker clients.
#![allow(dead_code, reason = "each test file uses its part")]

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ds4_manifests::{GgmlType, GgufWriter, Value};
use ds4_os::seqpacket::Connection;
use ds4_proto::broker::{MAX_FRAME, Message};
use ds4_proto::v1;
use ds4_proto::v1::owner_client::OwnerClient;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::transport::{Channel, Endpoint, Uri};

/// Everything must be over by then.
pub const LIMIT: Duration = Duration::from_secs(5);

/// A llama of one layer with `vocab` rows of 32 floats, whose content depends on `seed`.
pub fn tiny(vocab: u64, seed: u8) -> GgufWriter {
    let meta = [
        ("llama.block_count", 1),
        ("llama.embedding_length", 32),
        ("llama.feed_forward_length", 64),
        ("llama.attention.head_count", 2),
        ("llama.attention.head_count_kv", 1),
        ("llama.vocab_size", vocab),
        ("llama.context_length", 128),
    ];
    let mut file = GgufWriter::new()
        .metadata("general.architecture", Value::String("llama".into()))
        .metadata("general.name", Value::String(format!("tiny {seed}")))
        .metadata("llama.attention.layer_norm_rms_epsilon", Value::F64(1e-5));
    for (key, value) in meta {
        file = file.metadata(key, Value::U64(value));
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
    for (name, shape) in tensors {
        let len = usize::try_from(shape.iter().product::<u64>() * 4).unwrap();
        file = file.tensor(name, GgmlType::F32, shape, vec![seed; len]);
    }
    file
}

/// Writes a tiny model of a few hundred KiB.
pub fn write_tiny(path: &Path, seed: u8) {
    tiny(300, seed).write_to(path).unwrap();
}

/// Writes a model of 128 MiB: long enough a load to be caught in the middle.
pub fn write_big(path: &Path, seed: u8) {
    tiny(1 << 20, seed).write_to(path).unwrap();
}

/// A temporary directory that other users may enter.
pub struct Dir(tempfile::TempDir);

impl Dir {
    pub fn new() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::Builder::new().prefix("ds4-owner-").tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        Self(dir)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A tiny model in it.
    pub fn tiny(&self, seed: u8) -> PathBuf {
        let path = self.join(&format!("tiny-{seed}.gguf"));
        write_tiny(&path, seed);
        path
    }
}

/// The binary with its environment cut off from the machine's configuration.
pub fn command(dir: &Dir, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ds4-weight-owner"));
    for (key, _) in std::env::vars_os() {
        if key.to_string_lossy().starts_with("DS4_") {
            command.env_remove(key);
        }
    }
    command
        .env("XDG_CONFIG_HOME", dir.join("no-config"))
        .env_remove("NOTIFY_SOCKET")
        .env("DS4_CONFIG", "/dev/null")
        .env("DS4_ALLOW_DEV_MODELS", "true")
        .env("DS4_RESERVE_MIB", "64")
        .env("DS4_RUNTIME_DIR", dir.join("run"))
        .args(args)
        .stdin(Stdio::null());
    command
}

/// Exit code and what was written to stderr and stdout, of a run that must end by itself within [`LIMIT`].
pub fn run_to_exit(command: &mut Command) -> (i32, String, String) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let status = wait(&mut child, LIMIT).unwrap_or_else(|| {
        let _ = child.kill();
        panic!("still running after {LIMIT:?}: {:?}", read(child.stderr.take()));
    });
    (status.code().unwrap_or(-1), read(child.stderr.take()), read(child.stdout.take()))
}

fn read(stream: Option<impl Read>) -> String {
    let mut text = String::new();
    stream.unwrap().read_to_string(&mut text).unwrap();
    text
}

/// The exit status, or `None` after `limit`.
pub fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if start.elapsed() > limit {
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Polls `check` until it gives something.
pub fn eventually<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(start.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A running owner that has told its service manager that it is ready.
pub struct Owner {
    pub dir: Dir,
    pub child: Child,
    manager: UnixDatagram,
}

impl Owner {
    pub fn start(dir: Dir, args: &[&str]) -> Self {
        let owner = Self::launch(dir, args);
        owner.await_notice("READY=1");
        owner
    }

    /// Started, not yet ready.
    pub fn launch(dir: Dir, args: &[&str]) -> Self {
        let notify = dir.join("notify");
        let manager = UnixDatagram::bind(&notify).unwrap();
        manager.set_read_timeout(Some(LIMIT)).unwrap();
        let log = std::fs::File::create(dir.join("log")).unwrap();
        let child =
            command(&dir, args).env("NOTIFY_SOCKET", &notify).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        Self { dir, child, manager }
    }

    /// Waits for a message of the service manager's protocol that contains `text`.
    pub fn await_notice(&self, text: &str) {
        let mut buffer = [0; 4096];
        loop {
            let n = self.manager.recv(&mut buffer).unwrap_or_else(|e| panic!("no {text}: {e}; log:\n{}", self.log()));
            if String::from_utf8_lossy(&buffer[..n]).contains(text) {
                return;
            }
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn broker(&self) -> PathBuf {
        self.dir.join("run/broker.sock")
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    /// A connection that has said nothing yet.
    pub fn connect(&self) -> Connection {
        connect(&self.broker())
    }

    /// Attaches to `model`, or gives the refusal's code and sentence.
    pub fn attach(&self, model: &str) -> Result<Attached, (String, String)> {
        attach(&self.broker(), model, None)
    }

    /// A client of the control socket.
    pub async fn control(&self) -> OwnerClient<Channel> {
        OwnerClient::new(self.channel().await)
    }

    pub async fn channel(&self) -> Channel {
        let path = self.dir.join("run/owner.sock");
        let connector = tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move {
                let stream = tokio::net::UnixStream::connect(path).await?;
                Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
            }
        });
        Endpoint::from_static("http://owner").connect_with_connector(connector).await.unwrap()
    }

    /// Loads `path` and returns everything that was said about it.
    pub async fn load(&self, request: v1::LoadRequest) -> Vec<v1::LoadProgress> {
        let mut stream = self.control().await.load(request).await.unwrap().into_inner();
        let mut said = Vec::new();
        while let Some(progress) = stream.message().await.unwrap() {
            said.push(progress);
        }
        said
    }

    /// The loader child, as soon as there is one, stopped by SIGSTOP.
    pub fn freeze_loader(&self) -> Pid {
        let pid = self.child.id();
        let children = format!("/proc/{pid}/task/{pid}/children");
        let loader = eventually("a loader", || {
            let text = std::fs::read_to_string(&children).ok()?;
            let child = text.split_whitespace().next()?;
            // Before its exec the child still runs in the owner's memory, which waits for it (vfork): leave it alone.
            let arguments = std::fs::read(format!("/proc/{child}/cmdline")).ok()?;
            arguments.ends_with(b"\0loader\0").then(|| child.parse().ok().map(Pid::from_raw)).flatten()
        });
        kill(loader, Signal::SIGSTOP).unwrap();
        loader
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // A loader that a test froze would outlive a killed owner: ask first.
        self.signal_if_alive(Signal::SIGTERM);
        self.signal_if_alive(Signal::SIGTERM);
        if wait(&mut self.child, Duration::from_secs(2)).is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Owner {
    fn signal_if_alive(&mut self, signal: Signal) {
        if self.child.try_wait().is_ok_and(|s| s.is_none()) {
            let _ = kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal);
        }
    }
}

pub fn load_request(path: &Path) -> v1::LoadRequest {
    v1::LoadRequest { path: path.to_str().unwrap().into(), ..Default::default() }
}

pub fn connect(path: &Path) -> Connection {
    let connection = Connection::connect(path).unwrap();
    connection.set_timeout(Some(LIMIT * 2)).unwrap();
    connection
}

/// A lease with its descriptors.
pub struct Attached {
    pub connection: Connection,
    pub epoch: u64,
    pub model: String,
    pub manifest: (OwnedFd, u64),
    pub chunks: Vec<OwnedFd>,
}

pub fn receive(connection: &Connection) -> (Message, Vec<OwnedFd>) {
    let received = connection.recv(MAX_FRAME).unwrap().expect("a message, not a hang-up");
    (Message::decode(&received.bytes).unwrap(), received.fds)
}

/// The worker's side of the handshake.
pub fn attach(path: &Path, model: &str, expected: Option<[u8; 32]>) -> Result<Attached, (String, String)> {
    let connection = connect(path);
    let hello = Message::Hello { model: model.into(), expected, client: "test".into() };
    // A peer that is not allowed is refused, and the connection closed, before it says anything.
    let _ = connection.send(&hello.encode(), &[]);
    let (welcome, mut fds) = receive(&connection);
    let (epoch, count, manifest_len, model) = match welcome {
        Message::Welcome { epoch, chunks, manifest_len, model, .. } => (epoch, chunks, manifest_len, model),
        Message::Refused { code, sentence, .. } => return Err((code, sentence)),
        other => panic!("{other:?}"),
    };
    let manifest = (fds.pop().expect("the manifest's descriptor"), manifest_len);
    let mut chunks = Vec::new();
    while chunks.len() < count as usize {
        match receive(&connection) {
            (Message::Chunks { first, count }, fds) => {
                assert_eq!((first as usize, count as usize), (chunks.len(), fds.len()));
                chunks.extend(fds);
            }
            other => panic!("{other:?}"),
        }
    }
    Ok(Attached { connection, epoch, model, manifest, chunks })
}
