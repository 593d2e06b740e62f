//! From nothing to a probed, running engine: attach → map → bind → build → probe.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ds4_attach::{AttachError, Claim, Lease, Tensors};
use ds4_engine::{Engine, EngineHandle};
use ds4_kernels::ops::{HyperOps, MoeOps, SparseOps};
use ds4_kernels::{CpuDevice, StateSpec};
use ds4_manifests::{Backend, Catalog, WeightManifest};
use ds4_os::memory::Available;
use ds4_settings::BROKER_SOCKET;
use ds4_text::{ChatTemplate, TextError, Tokenizer};

use crate::config::{Mtp, Options};
use crate::device;
use crate::failure::Failure;
use crate::late::LateVocabulary;

/// A worker's inside, ready to serve.
pub struct Booted {
    pub attached: Attached,
    /// The prediction block, when one was asked for.
    pub drafter: Option<Attached>,
    pub engine: EngineHandle,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    pub context_train: usize,
    pub device: String,
    pub phases: Phases,
}

/// Weights that are mapped, wherever they are, and the lease on them.
pub struct Attached {
    pub weights: Box<dyn Tensors + Send + Sync>,
    pub lease: Lease,
}

/// What a model computes on, and how it gets at its weights.
pub struct Ground<D, M> {
    pub device: D,
    /// Maps what an owner passed on.
    pub map: M,
    /// Memory that banks can have, by whose estimate.
    pub available: fn(&D) -> Option<Available>,
}

/// How long each phase of a start took.
#[derive(Debug, Default)]
pub struct Phases(Vec<(&'static str, Duration, &'static str)>);

impl Phases {
    /// Adds the time since `since`, and starts the next phase.
    pub fn lap(&mut self, name: &'static str, since: &mut Instant) {
        let now = Instant::now();
        self.0.push((name, now - *since, ""));
        *since = now;
    }

    /// Adds something that went on at the same time as other phases.
    fn beside(&mut self, name: &'static str, took: Duration) {
        self.0.push((name, took, " beside"));
    }
}

impl std::fmt::Display for Phases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, (name, took, how)) in self.0.iter().enumerate() {
            let gap = if i == 0 { "" } else { ", " };
            write!(f, "{gap}{name} {:.1} ms{how}", took.as_secs_f64() * 1e3)?;
        }
        Ok(())
    }
}

/// The text side of a model.
struct Text {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    template_took: Duration,
    tokenizer_took: Duration,
}

/// Brings an engine up.
///
/// # Errors
/// The first thing that is wrong, with its exit code.
pub fn boot(options: &Options) -> Result<Booted, Failure> {
    let mut phases = Phases::default();
    let mut since = Instant::now();
    let claim = ds4_attach::claim(&ds4_attach::Options {
        expected: options.expected,
        ..attaching(options, options.model.clone())
    })?;
    let block = options.mtp.as_ref().map(|mtp| claim_drafter(options, mtp, &claim.manifest)).transpose()?;
    phases.lap("attach", &mut since);
    if claim.manifest.metadata.is_synthetic() {
        tracing::warn!(model = %claim.manifest.model.name, "the weights are synthetic: speeds are real, answers are nonsense");
    }
    match &claim.manifest.backend {
        Backend::Memfd { .. } => {
            let map = |claim: Claim| {
                let ds4_attach::Attached { weights, lease } = claim.map()?;
                Ok(Attached { weights: Box::new(weights), lease })
            };
            let available = |_: &CpuDevice| ds4_os::memory::available();
            start(
                options,
                claim,
                block,
                Ground { device: CpuDevice::new(options.threads), map, available },
                phases,
                since,
            )
        }
        Backend::CudaVmm { .. } => device::start(options, claim, block, phases, since),
    }
}

fn attaching(options: &Options, model: Option<String>) -> ds4_attach::Options {
    let socket = options.runtime_dir.join(BROKER_SOCKET);
    ds4_attach::Options { model, verify: options.verify, wait: options.owner_wait, ..ds4_attach::Options::new(socket) }
}

/// Maps, binds, builds and probes on `ground`.
///
/// # Errors
/// As [`boot`].
pub fn start<D, M>(
    options: &Options,
    claim: Claim,
    block: Option<Claim>,
    ground: Ground<D, M>,
    mut phases: Phases,
    mut since: Instant,
) -> Result<Booted, Failure>
where
    D: HyperOps + MoeOps + SparseOps,
    M: Fn(Claim) -> Result<Attached, AttachError>,
{
    let Ground { device, map, available } = ground;
    phases.lap("device", &mut since);
    let attached = map(claim)?;
    let drafter = block.map(map).transpose()?;
    phases.lap("map", &mut since);
    let weights = &*attached.weights;
    let late = Arc::new(LateVocabulary::default());
    let promise = late.promise();
    let (text, computing) = std::thread::scope(|scope| {
        let text = scope.spawn(|| text(weights.manifest()).inspect(|text| promise.keep(&text.tokenizer)));
        let block = options.mtp.as_ref().zip(drafter.as_ref()).map(|(mtp, d)| (mtp, &*d.weights as &dyn Tensors));
        let computing = compute(options, (device, available), weights, block, late, &mut phases, &mut since);
        let text = text.join().unwrap_or_else(|_| Err(Failure::other("building the tokenizer panicked")));
        (text, computing)
    });
    phases.lap("waiting for text", &mut since);
    // A tokenizer that failed is the cause of what the self-test may have met.
    let Text { tokenizer, template, template_took, tokenizer_took } = text?;
    let Computing { engine, vocab, context_train, device } = computing?;
    phases.beside("template", template_took);
    phases.beside("tokenizer", tokenizer_took);
    check_vocabulary(vocab, &tokenizer)?;
    let engine = engine.spawn().map_err(|e| Failure::other(format!("cannot start the engine thread: {e}")))?;
    Ok(Booted { attached, drafter, engine, tokenizer, template, context_train, device, phases })
}

/// Takes a lease on the prediction block as well, and holds every shape of it against the model's.
fn claim_drafter(options: &Options, mtp: &Mtp, base: &WeightManifest) -> Result<Claim, Failure> {
    let claim = ds4_attach::claim(&attaching(options, Some(mtp.name.clone())))?;
    match misfit(base, &claim.manifest) {
        None => Ok(claim),
        Some(why) => {
            let (block, model) = (&claim.manifest.model.name, &base.model.name);
            Err(Failure::model(format!(
                "{block} is no prediction block for {model}: {why}; give --mtp another, or none"
            )))
        }
    }
}

/// Why `block` does not go with `base`.
fn misfit(base: &WeightManifest, block: &WeightManifest) -> Option<String> {
    let catalog = Catalog::builtin();
    let (family, of) = (&block.model.family, &base.model.family);
    let Some(drafter) = catalog.drafter(family) else { return Some(format!("it is a model of family {family}")) };
    let entry = catalog.entry(&base.model.artifact).and_then(|e| catalog.expand(e, &base.metadata).ok());
    let Some(base) = entry else { return Some(format!("a model of family {of} without a catalog entry takes none")) };
    drafter.difference(&base, &block.tensors)
}

/// The side of a start that computes.
struct Computing<D: ds4_kernels::Device> {
    engine: Engine<D>,
    vocab: usize,
    context_train: usize,
    device: String,
}

fn compute<D: HyperOps + MoeOps + SparseOps>(
    options: &Options,
    (device, available): (D, fn(&D) -> Option<Available>),
    weights: &dyn Tensors,
    drafter: Option<(&Mtp, &dyn Tensors)>,
    late: Arc<LateVocabulary>,
    phases: &mut Phases,
    since: &mut Instant,
) -> Result<Computing<D>, Failure> {
    let mut model = ds4_models::build(&device, weights)?;
    if let Some((mtp, weights)) = drafter {
        model.attach_drafter(&device, weights, mtp.settings)?;
    }
    phases.lap("bind", since);
    judge_memory(model.state(), options, model.shape().context, available(&device))?;
    let (vocab, context_train) = (model.shape().vocab, model.shape().context);
    let name = ds4_kernels::Device::describe(&device);
    let mut engine = Engine::new(device, model, Arc::clone(&late) as _, options.engine.clone())?;
    phases.lap("engine", since);
    let report = engine.probe(&late.probe_prompt(&weights.manifest().metadata))?;
    tracing::debug!(tokens = ?report.tokens, took_ms = report.took.as_secs_f64() * 1e3, "self-test passed");
    phases.lap("probe", since);
    Ok(Computing { engine, vocab, context_train, device: name })
}

fn text(manifest: &WeightManifest) -> Result<Text, Failure> {
    let metadata = &manifest.metadata;
    let started = Instant::now();
    let template = match ChatTemplate::compile(metadata) {
        Ok(template) => Some(template),
        Err(e @ TextError::NoChatTemplate) => {
            tracing::warn!("chat is not available: {e}");
            None
        }
        Err(e) => return Err(e.into()),
    };
    let template_took = started.elapsed();
    let tokenizer = Arc::new(Tokenizer::from_metadata(metadata)?);
    Ok(Text { tokenizer, template, template_took, tokenizer_took: started.elapsed() - template_took })
}

/// Token ids index logits rows, so a tokenizer larger than the model's output would be a panic in waiting.
fn check_vocabulary(logits: usize, tokenizer: &Tokenizer) -> Result<(), Failure> {
    if tokenizer.vocab_size() > logits {
        return Err(Failure::from(TextError::Damaged {
            what: format!("it has {} tokens and the model's output {logits}", tokenizer.vocab_size()),
        }));
    }
    Ok(())
}

/// Weighs the banks' appetite against what is free, before anything is allocated: one full sequence must fit, or no
/// long request could ever be served.
fn judge_memory(
    state: &StateSpec,
    options: &Options,
    context_train: usize,
    available: Option<Available>,
) -> Result<(), Failure> {
    let context = options.engine.context.min(context_train);
    let one = state.bytes(context) as u64;
    let checkpoints = options.engine.checkpoint_limit(state) as u64;
    let all = one.saturating_mul(options.engine.max_batch as u64).saturating_add(checkpoints);
    let Some(available) = available else { return Ok(()) };
    let mib = |bytes: u64| bytes >> 20;
    tracing::info!(
        context,
        bank_mib = mib(one),
        banks = options.engine.max_batch,
        checkpoints_mib = mib(checkpoints),
        all_banks_mib = mib(all),
        available_mib = mib(available.bytes),
        source = %available.source,
        "memory plan (banks grow as they fill)"
    );
    verdict(one, all, available.bytes, &available.source, context)?.into_iter().for_each(|w| tracing::warn!("{w}"));
    Ok(())
}

/// A refusal, a warning, or nothing.
fn verdict(one: u64, all: u64, available: u64, source: &str, context: usize) -> Result<Option<String>, Failure> {
    let mib = |bytes: u64| bytes >> 20;
    if one > available {
        return Err(Failure::memory(format!(
            "one sequence of {context} tokens needs {} MiB and {} MiB are available ({source}), {} MiB too few; lower --ctx",
            mib(one),
            mib(available),
            mib(one - available) + 1,
        )));
    }
    Ok((all > available).then(|| {
        format!(
            "all banks full would take {} MiB and {} MiB are available ({source}); lower --max-batch or --ctx if long \
             requests are to run side by side",
            mib(all),
            mib(available)
        )
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ds4_engine::ProbeError;

    #[test]
    fn m2_m8_memory_is_judged_before_it_is_taken() {
        let mib = |n: u64| n << 20;
        assert_eq!(verdict(mib(10), mib(100), mib(200), "MemAvailable", 8192), Ok(None));
        let warning = verdict(mib(10), mib(100), mib(50), "MemAvailable", 8192).unwrap().unwrap();
        assert!(warning.contains("100 MiB") && warning.contains("--max-batch"), "{warning}");
        let failure = verdict(mib(100), mib(1000), mib(50), "MemAvailable", 8192).unwrap_err();
        assert_eq!(failure.exit, 5);
        for part in ["8192 tokens", "100 MiB", "50 MiB", "MemAvailable", "--ctx"] {
            assert!(failure.message.contains(part), "{part} in {failure}");
        }
    }

    #[test]
    fn phases_read_as_a_line() {
        let mut phases = Phases(vec![("a", Duration::from_micros(1500), "")]);
        phases.beside("b", Duration::from_millis(2));
        assert_eq!(phases.to_string(), "a 1.5 ms, b 2.0 ms beside");
    }

    #[test]
    fn g8_a_failed_self_test_has_its_own_exit_code() {
        assert_eq!(Failure::from(ProbeError::NotFinite { bad: 3, vocab: 10 }).exit, 6);
    }
}
