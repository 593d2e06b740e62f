//! Files that commands write.
//!
//! A regular file is written beside its name and renamed when it is whole, so that nobody ever reads half of one: not after an
//! error, an interrupt or a file-size limit. Only kill -9 and a crash of the machine leave the hidden `.ds4-unfinished-…`, and the
//! next file that is written into that directory removes it: writers hold a lock on theirs. So it is with directories for what is
//! needed only meanwhile.
//! What is no regular file (a pipe, a device, standard output by any of its names) is written in place and never replaced.

use std::collections::BTreeSet;
use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError, mpsc};

use anyhow::Context as _;
use ds4_settings::EXIT_USAGE;
use nix::sys::signal::Signal;
use tempfile::{NamedTempFile, TempDir};
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;

/// How files are called until they are whole, before random letters.
const PREFIX: &str = ".ds4-unfinished-";
/// How directories for the meantime are called, before random letters.
const SCRATCH: &str = "ds4-scratch-";
/// Symbolic links that are followed: the kernel's own limit.
const MAX_LINKS: usize = 40;

/// Where bytes go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// `-`, or a name of this process's standard output.
    Stdout,
    /// A pipe, a device, or a descriptor's name, as it was given.
    InPlace(PathBuf),
    /// A regular file or a free name, symbolic links followed.
    File(PathBuf),
}

impl Target {
    /// What `path` names.
    ///
    /// # Errors
    /// Exit code 2 for a directory, a socket, a name in no directory, and links in a circle.
    pub fn of(path: &Path) -> anyhow::Result<Self> {
        if path == Path::new("-") {
            return Ok(Self::Stdout);
        }
        let refused = |why: &str| Failure::error(EXIT_USAGE, format!("{} {why}: give a file to write", path.display()));
        let found = path.metadata().ok();
        if let Some(found) = &found {
            if found.is_dir() {
                return Err(refused("is a directory"));
            }
            if found.file_type().is_socket() {
                return Err(refused("is a socket"));
            }
            if is_stdout(found) {
                return Ok(Self::Stdout);
            }
            if !found.is_file() {
                return Ok(Self::InPlace(path.to_owned()));
            }
        }
        let mut at = path.to_owned();
        for _ in 0..MAX_LINKS {
            let name = at.file_name().ok_or_else(|| refused("is not a file's name"))?.to_owned();
            let dir = directory(&at).canonicalize().ok().filter(|d| d.is_dir());
            let dir = dir.ok_or_else(|| refused("lies in no directory that exists"))?;
            // /proc/self/fd/N is no link that could be followed by its text, and its file belongs to whoever opened it.
            if dir.starts_with("/proc") {
                return Ok(Self::InPlace(path.to_owned()));
            }
            let whole = dir.join(name);
            match whole.read_link() {
                Ok(next) => at = dir.join(next),
                Err(_) => return Ok(Self::File(whole)),
            }
        }
        Err(refused("is a circle of links"))
    }

    /// Whether its name has this extension, in any case.
    pub fn ends_with(&self, extension: &str) -> bool {
        match self {
            Self::Stdout => false,
            Self::InPlace(path) | Self::File(path) => {
                path.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension))
            }
        }
    }

    /// Writes all of it: a file appears whole or not at all, and replaces what was there.
    pub fn write(&self, bytes: &[u8]) -> anyhow::Result<()> {
        let unwritten = || format!("cannot write {self}");
        match self {
            Self::Stdout => {
                let mut out = std::io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush()).with_context(unwritten)
            }
            // Appending: another descriptor of the same file, such as a shell's, keeps what it wrote.
            Self::InPlace(path) => {
                let file = File::options().append(true).open(path);
                file.and_then(|mut f| f.write_all(bytes)).with_context(unwritten)
            }
            Self::File(path) => {
                let unfinished = Unfinished::new(path.clone(), true)?;
                unfinished.file().write_all(bytes).with_context(unwritten)?;
                unfinished.finish()
            }
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stdout => f.write_str("standard output"),
            Self::InPlace(path) | Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

/// The directory that a name lies in.
fn directory(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn is_stdout(found: &std::fs::Metadata) -> bool {
    let own = nix::sys::stat::fstat(std::io::stdout());
    // /dev/null is standard output for many programs, and no less writable for it.
    own.is_ok_and(|own| (own.st_dev, own.st_ino) == (found.dev(), found.ino()))
}

/// A file that is being written. Dropped, it is gone.
#[derive(Debug)]
pub struct Unfinished {
    temporary: NamedTempFile,
    /// Dropped after the file is gone or renamed.
    _registered: Registered,
    target: PathBuf,
    replace: bool,
}

impl Unfinished {
    /// Begins a regular file that is written at any of its positions.
    ///
    /// # Errors
    /// Exit code 2 when something is there and is not to be replaced, and for what is no regular file.
    pub fn begin(path: &Path, replace: bool) -> anyhow::Result<Self> {
        let shown = path.display();
        match Target::of(path)? {
            Target::File(target) => Self::new(target, replace),
            Target::Stdout | Target::InPlace(_) => Err(Failure::error(
                EXIT_USAGE,
                format!("{shown} is not a regular file; a model is written in no order, so give a file's name"),
            )),
        }
    }

    fn new(target: PathBuf, replace: bool) -> anyhow::Result<Self> {
        let shown = target.display();
        let there = target.metadata().ok();
        if there.is_some() && !replace {
            return Err(exists(&target));
        }
        // As any new file, or as the one that it replaces.
        let mode = there.map_or(0o666, |m| m.permissions().mode() & 0o777);
        guard_signals();
        // Held, so that no signal comes between the file and its entry.
        let mut unfinished = unfinished_files();
        // In the same directory, so that it can be renamed into place.
        let dir = directory(&target);
        remove_abandoned(dir);
        let temporary = begin_in(dir, mode).with_context(|| format!("cannot write {shown}"))?;
        unfinished.insert(temporary.path().to_owned());
        let registered = Registered(temporary.path().to_owned());
        Ok(Self { temporary, _registered: registered, target, replace })
    }

    /// To write to.
    pub fn file(&self) -> &File {
        self.temporary.as_file()
    }

    /// Its name until it is finished.
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// Gives it its name.
    ///
    /// # Errors
    /// Exit code 2 when something has appeared there that is not to be replaced.
    pub fn finish(self) -> anyhow::Result<()> {
        let Self { temporary, target, replace, .. } = self;
        let done = if replace { temporary.persist(&target) } else { temporary.persist_noclobber(&target) };
        done.map(drop).map_err(|e| match e.error.kind() {
            std::io::ErrorKind::AlreadyExists => exists(&target),
            _ => anyhow::Error::new(e.error).context(format!("cannot write {}", target.display())),
        })
    }
}

/// A file of its own under a hidden name, locked for as long as it is open.
fn begin_in(dir: &Path, mode: u32) -> std::io::Result<NamedTempFile> {
    loop {
        let builder = &mut tempfile::Builder::new();
        let temporary = builder.prefix(PREFIX).permissions(Permissions::from_mode(mode)).tempfile_in(dir)?;
        // Where there are no locks nobody removes it either.
        let locked = temporary.as_file().lock();
        // Another writer may have found it without its lock.
        if locked.is_err() || temporary.as_file().metadata()?.nlink() > 0 {
            return Ok(temporary);
        }
    }
}

/// Removes what writers that were killed left in `dir`. What cannot be looked at or removed stays.
fn remove_abandoned(dir: &Path) {
    let entries = dir.read_dir().into_iter().flatten().flatten();
    for entry in entries.filter(|e| e.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes())) {
        // Neither followed nor waited for: others may put a link or a pipe of that name there.
        let file =
            File::options().read(true).custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK).open(entry.path());
        if let Ok(file) = file
            && file.metadata().is_ok_and(|m| m.is_file())
            && file.try_lock().is_ok()
            && std::fs::remove_file(entry.path()).is_ok()
        {
            ds4_os::say!("ds4: removed {}, which a command that was killed had left", entry.path().display());
        }
    }
}

/// A directory for what is needed only meanwhile, gone when it is dropped.
#[derive(Debug)]
pub struct Scratch {
    directory: TempDir,
    /// Dropped after the directory is gone.
    _registered: Registered,
    _lock: Option<File>,
}

impl Scratch {
    /// A fresh one where the system keeps such. Removes those of commands that were killed.
    pub fn new() -> std::io::Result<Self> {
        Self::new_in(&std::env::temp_dir())
    }

    fn new_in(dir: &Path) -> std::io::Result<Self> {
        guard_signals();
        let mut unfinished = unfinished_files();
        remove_abandoned_scratch(dir);
        loop {
            let directory = tempfile::Builder::new().prefix(SCRATCH).tempdir_in(dir)?;
            // Where there are no locks nobody removes it either.
            let lock = File::open(directory.path()).ok().filter(|lock| lock.lock().is_ok());
            // Another command may have found it without its lock.
            if !directory.path().exists() {
                continue;
            }
            unfinished.insert(directory.path().to_owned());
            let registered = Registered(directory.path().to_owned());
            return Ok(Self { directory, _registered: registered, _lock: lock });
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Removes this user's directories in `dir` that nobody holds. What cannot be looked at or removed stays.
fn remove_abandoned_scratch(dir: &Path) {
    let entries = dir.read_dir().into_iter().flatten().flatten();
    for entry in entries.filter(|e| e.file_name().as_encoded_bytes().starts_with(SCRATCH.as_bytes())) {
        // Neither followed nor waited for, as the directory is everybody's.
        let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK | nix::libc::O_DIRECTORY;
        let found = File::options().read(true).custom_flags(flags).open(entry.path());
        if let Ok(found) = found
            && found.metadata().is_ok_and(|m| m.uid() == nix::unistd::geteuid().as_raw())
            && found.try_lock().is_ok()
            && std::fs::remove_dir_all(entry.path()).is_ok()
        {
            ds4_os::say!("ds4: removed {}, which a command that was killed had left", entry.path().display());
        }
    }
}

/// An entry of [`UNFINISHED`].
#[derive(Debug)]
struct Registered(PathBuf);

impl Drop for Registered {
    fn drop(&mut self) {
        unfinished_files().remove(&self.0);
    }
}

/// The refusal of a name that is taken.
fn exists(path: &Path) -> anyhow::Error {
    Failure::error(EXIT_USAGE, format!("{} exists; --force replaces it", path.display()))
}

static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unfinished_files() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on SIGINT, SIGTERM and SIGHUP remove unfinished files before they end the process, and a write beyond the limit
/// of a file's size (SIGXFSZ) is an error like any other, which removes them too.
fn guard_signals() {
    static GUARD: Once = Once::new();
    GUARD.call_once(|| {
        let (ready, wait) = mpsc::channel();
        std::thread::spawn(move || watch_signals(&ready));
        // An error means that they cannot be watched: the file is written all the same.
        let _ = wait.recv();
    });
}

fn watch_signals(ready: &mpsc::Sender<()>) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    runtime.block_on(async {
        let file_size = SignalKind::from_raw(Signal::SIGXFSZ as i32);
        let [Ok(mut int), Ok(mut term), Ok(mut hup), Ok(_size)] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup(), file_size].map(signal)
        else {
            return;
        };
        // The receiver waits for this and nothing else.
        let _ = ready.send(());
        let got = tokio::select! {
            _ = int.recv() => Signal::SIGINT,
            _ = term.recv() => Signal::SIGTERM,
            _ = hup.recv() => Signal::SIGHUP,
        };
        // Never given back: nothing is renamed or begun any more.
        let unfinished = unfinished_files();
        for path in unfinished.iter() {
            // What cannot be removed now will not be removable later either.
            let _ = std::fs::remove_file(path).or_else(|_| std::fs::remove_dir_all(path));
        }
        // As shells count.
        std::process::exit(128 + got as i32);
    });
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::fs::symlink;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            dir.read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_appear_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let unfinished = Unfinished::begin(&path, false).unwrap();
        unfinished.file().write_all(b"half").unwrap();
        assert!(!path.exists() && unfinished.path().exists());
        drop(unfinished);
        assert_eq!(names(dir.path()), [""; 0]);
        let (one, two) = (Unfinished::begin(&path, false).unwrap(), Unfinished::begin(&path, false).unwrap());
        one.file().write_all(b"one").unwrap();
        one.finish().unwrap();
        let late = two.finish().unwrap_err();
        assert!(late.to_string().contains("--force") && Failure::code_of(&late) == EXIT_USAGE, "{late}");
        assert!(Unfinished::begin(&path, false).unwrap_err().to_string().contains("--force"));
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        Target::of(&path).unwrap().write(b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640, "as the file that was there");
        assert_eq!(names(dir.path()), ["x"]);
    }

    #[test]
    fn what_a_killed_writer_left_is_removed_and_what_is_being_written_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at(".ds4-unfinished-abandoned"), "half").unwrap();
        std::fs::write(at("other"), "kept").unwrap();
        symlink("other", at(".ds4-unfinished-link")).unwrap();
        nix::unistd::mkfifo(&at(".ds4-unfinished-fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let one = Unfinished::begin(&at("x"), false).unwrap();
        let two = Unfinished::begin(&at("y"), false).unwrap();
        for unfinished in [&one, &two] {
            assert!(unfinished.path().exists());
        }
        two.finish().unwrap();
        one.finish().unwrap();
        assert_eq!(names(dir.path()), [".ds4-unfinished-fifo", ".ds4-unfinished-link", "other", "x", "y"]);
    }

    #[test]
    fn a_killed_command_s_directory_is_removed_and_a_living_one_s_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("ds4-scratch-abandoned/sub")).unwrap();
        std::fs::write(at("ds4-scratch-abandoned/sub/file"), "half").unwrap();
        std::fs::write(at("ds4-scratch-file"), "kept").unwrap();
        std::fs::create_dir(at("other")).unwrap();
        symlink("other", at("ds4-scratch-link")).unwrap();
        let one = Scratch::new_in(dir.path()).unwrap();
        std::fs::write(one.path().join("file"), "in use").unwrap();
        let two = Scratch::new_in(dir.path()).unwrap();
        assert!(one.path().join("file").exists() && two.path().exists());
        drop((one, two));
        assert_eq!(names(dir.path()), ["ds4-scratch-file", "ds4-scratch-link", "other"]);
    }

    #[test]
    fn links_are_followed_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("sub")).unwrap();
        symlink("sub/real", at("link")).unwrap();
        symlink("link", at("second")).unwrap();
        for text in ["nothing was there", "something was"] {
            Target::of(&at("second")).unwrap().write(text.as_bytes()).unwrap();
            assert_eq!(std::fs::read_to_string(at("sub/real")).unwrap(), text);
            assert!(at("link").is_symlink() && at("second").is_symlink());
        }
        assert_eq!(
            (names(dir.path()), names(&at("sub"))),
            (vec!["link".into(), "second".into(), "sub".into()], vec!["real".into()])
        );
        symlink("round", at("round")).unwrap();
        for (bad, says) in [("round", "circle"), ("sub", "is a directory"), ("none/x", "no directory")] {
            let error = Target::of(&at(bad)).unwrap_err();
            assert!(error.to_string().contains(says) && Failure::code_of(&error) == EXIT_USAGE, "{bad}: {error}");
        }
    }

    #[test]
    fn pipes_and_devices_are_written_in_place_and_never_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (from, to) = (fifo.clone(), Target::of(&fifo).unwrap());
        let reader = std::thread::spawn(move || std::fs::read(from).unwrap());
        to.write(b"through").unwrap();
        assert_eq!(reader.join().unwrap(), b"through");
        assert!(fifo.metadata().unwrap().file_type().is_fifo());

        let full = Target::of(Path::new("/dev/full")).unwrap();
        assert!(format!("{:#}", full.write(b"x").unwrap_err()).contains("No space left"));
        // A link to a descriptor, as /dev/stdout is.
        let (mut out, into) = std::io::pipe().unwrap();
        let link = dir.path().join("stdout");
        symlink(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&into)), &link).unwrap();
        Target::of(&link).unwrap().write(b"in the pipe").unwrap();
        drop(into);
        let mut got = String::new();
        out.read_to_string(&mut got).unwrap();
        assert_eq!(got, "in the pipe");
        assert!(link.is_symlink() && Path::new("/dev/full").metadata().unwrap().file_type().is_char_device());
        for path in [fifo.as_path(), link.as_path(), Path::new("/dev/full"), Path::new("-")] {
            let error = Unfinished::begin(path, true).unwrap_err();
            assert!(Failure::code_of(&error) == EXIT_USAGE, "{error}");
        }
        assert_eq!(names(dir.path()), ["fifo", "stdout"]);
    }

    #[test]
    fn a_minus_is_standard_output_and_a_file_of_that_name_can_still_be_had() {
        assert_eq!(Target::of(Path::new("-")).unwrap(), Target::Stdout);
        assert_eq!(Target::of(Path::new("/dev/stdout")).unwrap(), Target::Stdout);
        assert!(matches!(Target::of(Path::new("./-")).unwrap(), Target::File(path) if path.ends_with("-")));
    }
}
