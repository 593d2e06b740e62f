//! Model families: hyper-parameters, weight binding and forward passes, written once against the op set.

pub mod binder;
pub mod deepseek_v4;
pub mod llama;
pub mod session;
pub mod speculation;

use ds4_attach::Tensors;
use ds4_kernels::ops::{HyperOps, KvNumerics, MoeOps, SparseOps};
use ds4_kernels::{BatchPlan, Device, DeviceError, StateSpec};

/// Errors of building or running a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The device could not do it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The manifest lacks something that the family needs, or has it in another shape.
    #[error("{0}")]
    Bind(String),
}

/// Sizes that the engine and the API need to know.
#[derive(Clone, Debug)]
pub struct ModelShape {
    /// Vocabulary size: width of a logits row.
    pub vocab: usize,
    /// Longest context that the model was trained for, in tokens.
    pub context: usize,
}

/// A bound model, ready to run steps on device `D`.
pub trait Model<D: Device>: Send {
    /// Sizes.
    fn shape(&self) -> &ModelShape;

    /// What one sequence keeps.
    fn state(&self) -> &StateSpec;

    /// Runs one step: writes the state rows of every span and computes the logits of the wanted rows.
    /// Banks must be committed to the end of every span.
    fn forward(&mut self, device: &D, plan: &BatchPlan, banks: &mut [D::Bank]) -> Result<(), ModelError>;

    /// Logits `[wanted rows, vocab]` of the last [`Model::forward`].
    fn logits(&self) -> &D::Buffer;

    /// How this family's banks are saved and restored, if they are.
    fn sessions(&self) -> Option<&dyn session::SessionFormat<D>> {
        None
    }

    /// Gives the model a part that guesses tokens ahead: a prediction block from a manifest of its own.
    ///
    /// # Errors
    /// [`ModelError::Bind`] when the family takes none, or this one does not fit the model.
    fn attach_drafter(
        &mut self,
        _device: &D,
        weights: &dyn Tensors,
        _settings: deepseek_v4::MtpSettings,
    ) -> Result<(), ModelError> {
        let name = &weights.manifest().model.name;
        Err(ModelError::Bind(format!(
            "models of this family take no prediction block, but {name:?} was given; drop --mtp"
        )))
    }

    /// What guesses tokens ahead from the last step's activations, if the model was given such a part.
    fn drafter(&mut self) -> Option<&mut dyn speculation::Drafter<D>> {
        None
    }
}

/// Builds the model that the manifest describes.
///
/// # Errors
/// [`ModelError`] for a family that this build does not have, or when something does not fit it.
pub fn build<D: HyperOps + MoeOps + SparseOps>(
    device: &D,
    weights: &dyn Tensors,
) -> Result<Box<dyn Model<D>>, ModelError> {
    match weights.manifest().model.family.as_str() {
        "llama" => Ok(Box::new(llama::Llama::build(device, weights)?)),
        "deepseek4" => Ok(Box::new(deepseek_v4::DeepseekV4::build(device, weights, KvNumerics::Official)?)),
        other => {
            Err(ModelError::Bind(format!("family {other:?} is unknown to this worker; it has llama and deepseek4")))
        }
    }
}
