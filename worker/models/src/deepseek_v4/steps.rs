//! A step, and the parts in which attention computes it.
//!
//! Attention's activations are the largest of a long step: queries of 64 heads of 512 elements for 2,048 rows are 268 MB, and more than
//! twice as much lies between them and the sublayer's output. So attention takes a long step's rows in parts, as if they were steps that
//! follow each other: results have the same bits (see [`ds4_kernels::device`]), and the memory is that of one part. What is small is
//! computed for the whole step at once, because products of few rows take longer.

use std::ops::Range;

use ds4_kernels::{BatchPlan, Device, DeviceError};

/// Most rows that attention takes at once: a quarter of 2,048, and as many sequences' tokens beside as there may be. On an H200, parts of 512
/// rows make a chunk of 2,048 take 2.7 % longer and save 640 MiB; parts of 256 save 40 more and take 10 %, parts of 1,024 1.1 % for 220.
pub const ATTENTION_ROWS: usize = 576;

/// Rows of a step that attention computes before the others.
pub struct Part<D: Device> {
    /// These rows, as a step of their own.
    pub step: D::Step,
    /// Which they are of the whole step's.
    pub rows: Range<usize>,
}

/// A plan made ready for a model.
pub struct Steps<D: Device> {
    /// All of it.
    pub whole: D::Step,
    /// Number of its rows.
    pub rows: usize,
    /// None when attention takes all rows at once.
    pub parts: Vec<Part<D>>,
}

impl<D: Device> Steps<D> {
    /// Makes `plan` ready, with parts of at most `most` rows.
    ///
    /// # Errors
    /// As [`Device::step`].
    pub fn new(device: &D, plan: &BatchPlan, banks: &mut [D::Bank], most: usize) -> Result<Self, DeviceError> {
        let whole = device.step(plan, banks)?;
        let mut part = |(rows, plan): (Range<usize>, BatchPlan)| Ok(Part { step: device.step(&plan, banks)?, rows });
        let parts = if plan.rows() > most { plan.parts(most) } else { Vec::new() };
        let parts = parts.into_iter().map(&mut part).collect::<Result<_, DeviceError>>()?;
        Ok(Self { whole, rows: plan.rows(), parts })
    }
}
