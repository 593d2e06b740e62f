//! What a worker needs before a start is worth it: an owner that is up, and in it what the worker serves.
//!
//! A start without them could only fail, and a row of failed starts ends the supervisor. So a model that is unloaded, or
//! that an owner lost in a crash, makes the worker wait; connections queue in the listening socket meanwhile.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ds4_manifests::Catalog;
use ds4_proto::v1::{Model, ModelState};
use tokio::sync::watch;

use super::keep::Health;
use crate::client::control;

/// How often the owner is asked while something is missing.
const POLL: Duration = Duration::from_millis(200);
/// An owner that is alive and does not answer for this long is reported.
const SILENCE: Duration = Duration::from_secs(3);

/// True for models that are served by themselves; prediction blocks only go with one.
pub fn servable(model: &Model) -> bool {
    Catalog::builtin().drafter(&model.family).is_none()
}

/// Models that are READY or on their way to it.
pub fn alive(model: &Model) -> bool {
    matches!(model.state(), ModelState::Ready | ModelState::Loading)
}

/// Why nothing that `models` lists can be served although something is held: blocks alone.
pub fn only_blocks(models: &[Model]) -> Option<String> {
    let held: Vec<&Model> = models.iter().filter(|m| alive(m)).collect();
    let block = held.first().filter(|_| !held.iter().any(|m| servable(m)))?;
    Some(format!(
        "{} is a prediction block and not a model: it only guesses ahead for one; give the model with --model and this \
         file ({}) with --mtp",
        block.name, block.path
    ))
}

/// Names that the worker's configuration asks for.
#[derive(Clone, Debug, Default)]
pub struct Wants {
    /// `worker.model`.
    pub model: Option<String>,
    /// `worker.mtp`.
    pub block: Option<String>,
}

impl Wants {
    /// Of section `[worker]`.
    pub fn of(config: &toml::Table) -> Self {
        let name = |key: &str| config.get(key).and_then(toml::Value::as_str).map(String::from);
        Self { model: name("model"), block: name("mtp") }
    }

    /// What a worker is to be told beyond its arguments, or what is missing. `served` is what its predecessor served.
    ///
    /// Without a configured name a successor goes on with the same model, also when others were loaded beside it; if that one
    /// is gone, it takes the newest.
    fn choose(&self, models: &[Model], served: Option<&str>) -> Result<Option<String>, String> {
        let ready = |name: &str| models.iter().any(|m| m.state() == ModelState::Ready && m.name == name);
        if let Some(name) = self.model.iter().chain(&self.block).find(|name| !ready(name)) {
            return Err(format!("{name:?}"));
        }
        if self.model.is_some() {
            return Ok(None);
        }
        let held: Vec<&Model> = models.iter().filter(|m| m.state() == ModelState::Ready && servable(m)).collect();
        let newest = held.iter().max_by_key(|m| m.epoch).ok_or("a model")?;
        // One name, perhaps in two epochs, needs no choice: the owner lends the newest.
        if held.iter().all(|m| m.name == newest.name) {
            return Ok(None);
        }
        let same = held.iter().find(|m| Some(m.name.as_str()) == served);
        Ok(Some(same.unwrap_or(newest).name.clone()))
    }
}

/// Watches over what a worker needs.
pub struct Needs {
    owner: watch::Receiver<Health>,
    dir: PathBuf,
    wants: Wants,
    served: Option<String>,
    /// A worker was ready once: from then on what is missing was taken away, and may come back.
    proven: bool,
}

impl Needs {
    /// Of a worker in runtime directory `dir`, under the owner whose health is given. A first worker serves `first` when
    /// others are held beside it.
    pub fn new(owner: watch::Receiver<Health>, dir: PathBuf, wants: Wants, first: Option<String>) -> Self {
        Self { owner, dir, wants, served: first, proven: false }
    }

    /// A worker is ready.
    pub fn proven(&mut self) {
        self.proven = true;
    }

    /// Asks the ready worker what it serves.
    pub async fn learn(&mut self) {
        if let Ok(status) = control::worker_status(&self.dir).await {
            self.served = Some(status.model);
        }
    }

    /// Returns once a start makes sense, with the arguments that the start needs. A first start does not wait for a model
    /// that nobody is loading: it fails and says what is wrong.
    pub async fn met(&mut self) -> Vec<OsString> {
        let (mut said, mut silent) = (None, None);
        loop {
            // An error means that the owner was given up; the start then fails with the true cause.
            if self.owner.wait_for(|health| health.up).await.is_err() {
                return Vec::new();
            }
            let answer = control::models(&self.dir).await;
            // Mostly it has just died, which its health is about to say.
            if let Err(error) = &answer {
                let since = *silent.get_or_insert_with(Instant::now);
                let text = format!("an answer of the weight owner ({error:#})");
                if since.elapsed() >= SILENCE && said.as_ref() != Some(&text) {
                    ds4_os::say!(
                        "ds4 serve: the worker waits for {text}; if it stays silent: `ds4 ctl stop`, then this command again"
                    );
                    said = Some(text);
                }
            }
            if let Ok(models) = answer {
                silent = None;
                let loading = models.iter().any(|m| m.state() == ModelState::Loading);
                match self.wants.choose(&models, self.served.as_deref()) {
                    Ok(None) => return Vec::new(),
                    Ok(Some(name)) if self.proven || self.served.is_some() => {
                        return vec!["--model".into(), name.into()];
                    }
                    Err(missing) if self.proven || loading => {
                        if said.as_ref() != Some(&missing) {
                            let way = if loading {
                                "which the owner is loading"
                            } else {
                                "which the owner does not hold; `ds4 ctl load FILE.gguf` gives it one"
                            };
                            ds4_os::say!("ds4 serve: the worker waits for {missing}, {way}");
                            said = Some(missing);
                        }
                    }
                    Ok(Some(_)) | Err(_) => return Vec::new(),
                }
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, epoch: u64, state: ModelState) -> Model {
        let family = if name.starts_with("block") { "deepseek4-mtp" } else { "llama" };
        Model { name: name.into(), family: family.into(), epoch, state: state.into(), ..Model::default() }
    }

    fn wants(model: Option<&str>, block: Option<&str>) -> Wants {
        Wants { model: model.map(String::from), block: block.map(String::from) }
    }

    #[test]
    fn a_worker_waits_for_what_it_serves_and_stays_with_it() {
        use ModelState::{Draining, Failed, Loading, Ready};
        let any = wants(None, None);
        for state in [Loading, Failed, Draining] {
            assert_eq!(any.choose(&[model("a", 1, state)], None), Err("a model".into()), "{state:?}");
        }
        assert_eq!(any.choose(&[], Some("a")), Err("a model".into()));
        assert_eq!(any.choose(&[model("block", 1, Ready)], None), Err("a model".into()));
        assert_eq!(any.choose(&[model("a", 1, Ready), model("block", 2, Ready)], None), Ok(None));
        assert_eq!(any.choose(&[model("a", 1, Draining), model("a", 2, Ready)], None), Ok(None));
        // A second model beside the served one must not make successors ambiguous.
        let two = [model("a", 1, Ready), model("b", 2, Ready)];
        assert_eq!(any.choose(&two, Some("a")), Ok(Some("a".into())));
        assert_eq!(any.choose(&two, Some("gone")), Ok(Some("b".into())));
        assert_eq!(wants(Some("a"), None).choose(&two, Some("b")), Ok(None));
        assert_eq!(wants(Some("c"), None).choose(&two, Some("b")), Err("\"c\"".into()));
        assert_eq!(wants(None, Some("block")).choose(&two[..1], None), Err("\"block\"".into()));
    }

    #[test]
    fn blocks_alone_are_told_from_an_empty_owner() {
        let block = model("block", 1, ModelState::Ready);
        assert!(only_blocks(std::slice::from_ref(&block)).unwrap().contains("prediction block"));
        assert_eq!(only_blocks(&[block.clone(), model("a", 2, ModelState::Loading)]), None);
        assert!(only_blocks(&[block, model("a", 2, ModelState::Failed)]).is_some());
        assert_eq!(only_blocks(&[]), None);
    }
}
