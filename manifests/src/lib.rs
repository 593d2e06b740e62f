//! What a model is: the GGUF reader, the family catalog and the weight manifest that an owner publishes.

pub mod catalog;
pub mod codec;
pub mod content;
pub mod dtype;
pub mod gguf;
pub mod layout;
pub mod metadata;
pub mod weights;

pub use catalog::{Catalog, CatalogError};
pub use codec::{ManifestError, decode, encode};
pub use content::{content_hash, hash_files};
pub use dtype::GgmlType;
pub use gguf::{GgufError, GgufModel, GgufPlan, GgufWriter, TensorInfo};
pub use layout::{Layout, plan_layout};
pub use metadata::{Metadata, StringTable, Value};
pub use weights::{Backend, Chunk, LAYOUT_GGUF, LAYOUT_TILES, ModelIdentity, TensorEntry, TensorIndex, WeightManifest};
