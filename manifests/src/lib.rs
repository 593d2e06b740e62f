//! What a model is: the GGUF reader, the family catalog and the weight manifest that an owner publishes.

pub mod dtype;
pub mod metadata;
pub mod weights;

pub use dtype::GgmlType;
pub use metadata::{Metadata, StringTable, Value};
pub use weights::{Backend, Chunk, ModelIdentity, TensorEntry, WeightManifest};
