//! Taking over what a killed supervisor left running: only what serves what this command asks for.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use ds4_manifests::{Catalog, GgufModel};
use ds4_proto::v1;
use ds4_settings::EXIT_USAGE;

use super::needs::{self, Wants};
use super::process::{Process, Target};
use crate::client::control;
use crate::failure::Failure;

/// What every refusal to take over says.
const UNTOUCHED: &str = "Nothing was taken over: what runs goes on as it was.";

/// A process that was found running.
pub fn adopt(pid: Option<u32>) -> Option<Process> {
    pid.and_then(|pid| Target::of(pid).ok()).map(Process::Adopted)
}

/// Says that a process was taken over.
pub fn announce(name: &str, process: Option<Process>) -> Option<Process> {
    if let Some(process) = &process {
        ds4_os::say!(
            "ds4 serve: took over the running {name} (pid {}); it keeps the settings that it was started with",
            process.target().pid()
        );
    }
    process
}

/// Refuses a running worker that serves something else than this command asks for: it would go on doing so.
///
/// # Errors
/// Exit code 2, with both models and what to do.
pub fn same_model(
    worker: &v1::WorkerStatusReply,
    held: &[v1::Model],
    asked: &[PathBuf],
    wants: &Wants,
) -> anyhow::Result<()> {
    let of_worker = |m: &&v1::Model| m.name == worker.model && m.blake3 == worker.blake3;
    let file = held.iter().find(of_worker).map(|m| PathBuf::from(&m.path));
    let wanted = match &wants.model {
        Some(name) => (*name != worker.model).then(|| name.clone()),
        None => other_file(worker, file.as_deref(), asked),
    };
    let block = wants.block.as_ref().filter(|block| **block != worker.drafter);
    let (wanted, serves) = match (wanted, block) {
        (Some(wanted), _) => (wanted, worker.model.clone()),
        (None, Some(block)) => {
            let now = if worker.drafter.is_empty() { "no prediction block" } else { &worker.drafter };
            (format!("the prediction block {block}"), format!("{} with {now}", worker.model))
        }
        (None, None) => return Ok(()),
    };
    let from = file.as_ref().map(|f| format!(" from {}", f.display())).unwrap_or_default();
    let go_on = file.map(|f| format!("; to go on with it: `ds4 serve --model {}`", f.display())).unwrap_or_default();
    Err(Failure::error(
        EXIT_USAGE,
        format!(
            "[other_model] the running worker (pid {}) serves {serves}{from}, and this command asks for {wanted}. {UNTOUCHED}\n\
             To end it and start with what this command asks for: `ds4 ctl stop`, then this command again{go_on}.",
            worker.pid
        ),
    ))
}

/// What is asked for, when the worker's model, whose file is known unless its owner is gone, is not among it.
fn other_file(worker: &v1::WorkerStatusReply, file: Option<&Path>, asked: &[PathBuf]) -> Option<String> {
    let named: Vec<(String, &PathBuf)> = asked.iter().filter_map(|path| Some((name_of(path)?, path))).collect();
    let same = match file {
        Some(file) => std::fs::canonicalize(file).is_ok_and(|file| asked.contains(&file)),
        None => named.iter().any(|(name, _)| *name == worker.model),
    };
    // Files that nobody knows are the owner's to refuse.
    (!same).then_some(named).filter(|named| !named.is_empty()).map(|named| {
        let each: Vec<String> = named.iter().map(|(name, path)| format!("{name} ({})", path.display())).collect();
        each.join(" and ")
    })
}

/// The catalog's name of a model file; `None` for a prediction block and for what it does not know.
fn name_of(path: &Path) -> Option<String> {
    let file = GgufModel::open(path).ok()?;
    let catalog = Catalog::builtin();
    if catalog.identify_drafter(&file.metadata, &file.tensors, true).is_some() {
        return None;
    }
    // Whether development models are allowed is the owner's business.
    catalog.identify(&file.metadata, &file.tensors, true).ok().map(|found| found.served_name)
}

/// A load that an owner which we meant to take over refused.
pub fn refused_by_running(error: &anyhow::Error, owner: &Process) -> anyhow::Error {
    Failure::error(
        Failure::code_of(error),
        format!(
            "the running weight owner (pid {}) did not take the model: {error:#}\n{UNTOUCHED} It keeps the settings that it \
             was started with; to start with the settings of this command, end it first: `ds4 ctl stop`.",
            owner.target().pid()
        ),
    )
}

/// Has an owner that we took over load what it does not hold yet. Returns the name of the only model among `models`, blocks aside:
/// a worker that is started beside others shall serve that one.
///
/// # Errors
/// The owner refused one.
pub async fn ensure_loaded(dir: &Path, models: &[PathBuf]) -> anyhow::Result<Option<String>> {
    let path_of = |m: &v1::Model| std::fs::canonicalize(&m.path).ok();
    let held: Vec<PathBuf> =
        control::models(dir).await?.iter().filter(|m| needs::alive(m)).filter_map(path_of).collect();
    for model in models.iter().filter(|m| !held.contains(m)) {
        ds4_os::say!("ds4 serve: loading {} into the running owner", model.display());
        let path = model.to_str().context("the model's path is not UTF-8")?.to_string();
        let request = v1::LoadRequest { path, ..v1::LoadRequest::default() };
        let mut steps = control::owner(dir).await?.load(request).await.map_err(control::status)?.into_inner();
        while let Some(step) = steps.message().await.map_err(control::status)? {
            if step.state() == v1::ModelState::Failed {
                let code = crate::ctl::load_exit_code(&step.error_code);
                return Err(Failure::error(code, format!("{} ({})", step.error, step.error_code)));
            }
        }
    }
    let asked =
        |m: &v1::Model| needs::alive(m) && needs::servable(m) && path_of(m).is_some_and(|p| models.contains(&p));
    let mut names: Vec<String> = control::models(dir).await?.into_iter().filter(asked).map(|m| m.name).collect();
    names.dedup();
    Ok(names.pop().filter(|_| names.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_of_another_model_is_not_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().canonicalize().unwrap().join(name);
            std::fs::write(&path, name).unwrap();
            path
        };
        let (a, broken) = (file("a.gguf"), file("broken.gguf"));
        let v4 = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/deepseek_v4/tiny-v4.gguf");
        let v4 = v4.canonicalize().unwrap();
        let worker = |drafter: &str| v1::WorkerStatusReply {
            pid: 7,
            model: "a".into(),
            blake3: "00".into(),
            drafter: drafter.into(),
            ..v1::WorkerStatusReply::default()
        };
        let row = |blake3: &str| v1::Model {
            name: "a".into(),
            blake3: blake3.into(),
            path: a.to_string_lossy().into_owned(),
            ..v1::Model::default()
        };
        let wants = |model: Option<&str>, block: Option<&str>| Wants {
            model: model.map(String::from),
            block: block.map(String::from),
        };
        let any = wants(None, None);
        let said = |worker: &v1::WorkerStatusReply, held: &[v1::Model], asked: &[PathBuf], wants: &Wants| {
            same_model(worker, held, asked, wants).err().map(|e| (Failure::code_of(&e), e.to_string()))
        };
        let held = [row("00")];
        assert_eq!(said(&worker(""), &held, &[], &any), None, "nothing is asked for");
        assert_eq!(said(&worker(""), &held, &[a.clone(), v4.clone()], &any), None, "it is among them");
        assert_eq!(said(&worker(""), &held, std::slice::from_ref(&broken), &any), None, "the owner refuses that");
        // Without a row of its own content (an owner that is gone, or has it from another file) names decide.
        for held in [&held[..], &[], &[row("11")]] {
            let (code, text) = said(&worker(""), held, std::slice::from_ref(&v4), &any).unwrap();
            assert_eq!(code, EXIT_USAGE);
            for part in ["(pid 7) serves a", "tiny-v4.gguf", "Nothing was taken over", "ds4 ctl stop"] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
        let by_name = v1::WorkerStatusReply { model: name_of(&v4).unwrap(), ..worker("") };
        assert_eq!(said(&by_name, &[], std::slice::from_ref(&v4), &any), None);
        let (_, text) = said(&worker(""), &held, std::slice::from_ref(&a), &wants(Some("b"), None)).unwrap();
        assert!(text.contains("asks for b.") && text.contains("a.gguf`"), "{text}");
        let (_, text) = said(&worker(""), &held, std::slice::from_ref(&a), &wants(None, Some("block"))).unwrap();
        assert!(text.contains("a with no prediction block") && text.contains("the prediction block block"), "{text}");
        assert_eq!(said(&worker("block"), &held, &[a], &wants(None, Some("block"))), None);
    }
}
