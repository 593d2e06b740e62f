//! Binding weights by name, with their shapes checked, and an account of what was bound.

use std::collections::{HashMap, HashSet};

use ds4_attach::{Place, Tensors};
use ds4_kernels::{Device, DeviceTensor, TensorSource};
use ds4_manifests::TensorEntry;

use crate::ModelError;

/// Binds tensors of one model to one device.
pub struct Binder<'a, D: Device> {
    device: &'a D,
    weights: &'a dyn Tensors,
    entries: HashMap<&'a str, &'a TensorEntry>,
    bound: HashSet<&'a str>,
}

impl<'a, D: Device> Binder<'a, D> {
    /// A binder that has bound nothing yet.
    pub fn new(device: &'a D, weights: &'a dyn Tensors) -> Self {
        let entries = weights.manifest().tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        Self { device, weights, entries, bound: HashSet::new() }
    }

    /// The shape of `name`, if the model has it.
    pub fn shape(&self, name: &str) -> Option<&'a [u64]> {
        self.entries.get(name).map(|t| t.shape.as_slice())
    }

    /// Binds the matrix `name` of `rows` outputs by `cols` inputs.
    ///
    /// # Errors
    /// [`ModelError`] when it is missing, of another shape, outside its chunk or of a type that the device refuses.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<D::Weight, ModelError> {
        self.bind(name, &[cols, rows])
    }

    /// Binds the vector `name` of `len` elements.
    ///
    /// # Errors
    /// As for [`Binder::matrix`].
    pub fn vector(&mut self, name: &str, len: usize) -> Result<D::Weight, ModelError> {
        self.bind(name, &[len])
    }

    /// Binds `count` matrices stacked in one tensor, as `count · rows` outputs by `cols` inputs.
    ///
    /// # Errors
    /// As for [`Binder::matrix`].
    pub fn stacked(&mut self, name: &str, count: usize, rows: usize, cols: usize) -> Result<D::Weight, ModelError> {
        self.bind(name, &[cols, rows, count])
    }

    fn bind(&mut self, name: &str, shape: &[usize]) -> Result<D::Weight, ModelError> {
        let Some((&key, &entry)) = self.entries.get_key_value(name) else {
            return Err(ModelError::Bind(format!("tensor {name} is missing from the manifest")));
        };
        let same = entry.shape.len() == shape.len()
            && entry.shape.iter().zip(shape).all(|(&a, &b)| usize::try_from(a) == Ok(b));
        if !same {
            return Err(ModelError::Bind(format!("tensor {name} has shape {:?}, not {shape:?}", entry.shape)));
        }
        let place = self.weights.place(entry);
        let place =
            place.ok_or_else(|| ModelError::Bind(format!("tensor {name} lies outside chunk {}", entry.chunk)))?;
        let (cols, rows) = (shape[0], shape[1..].iter().product::<usize>());
        let want = entry.ty.row_bytes(cols as u64).and_then(|b| b.checked_mul(rows as u64));
        if want != Some(entry.len) {
            return Err(ModelError::Bind(format!(
                "tensor {name} has {} bytes; {rows} rows of {cols} {} elements have {want:?}",
                entry.len, entry.ty
            )));
        }
        self.bound.insert(key);
        let (name, ty) = (name.to_owned(), entry.ty);
        Ok(match place {
            Place::Host(bytes) => self.device.bind(&TensorSource { name, ty, cols, rows, bytes })?,
            Place::Device { address, tiled, keep } => {
                self.device.bind_device(&DeviceTensor { name, ty, cols, rows, address, len: entry.len, tiled, keep })?
            }
        })
    }

    /// Ends the binding. A tensor that nothing was done with is an error: a weight that is silently left out (a bias, a RoPE
    /// correction) gives fluent but wrong output.
    ///
    /// # Errors
    /// [`ModelError::Bind`] naming the first such tensor.
    pub fn finish(self) -> Result<(), ModelError> {
        match self.weights.manifest().tensors.iter().find(|t| !self.bound.contains(t.name.as_str())) {
            None => Ok(()),
            Some(t) => Err(ModelError::Bind(format!(
                "tensor {} is not one that family {} computes with",
                t.name,
                self.weights.manifest().model.family
            ))),
        }
    }
}
