//! Disjoint parts of one output, written by several threads.

#![allow(unsafe_code, reason = "the split of an output among pool items is known to the kernels, not to the compiler")]

use std::marker::PhantomData;

/// A `[rows, width]` matrix (of f32 unless said otherwise) whose parts are handed to different threads.
pub(crate) struct RawRows<'a, T = f32> {
    base: *mut T,
    len: usize,
    width: usize,
    life: PhantomData<&'a mut [T]>,
}

impl<T> Clone for RawRows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for RawRows<'_, T> {}

// SAFETY: the exclusive borrow is held for 'a; parts are only made through the unsafe methods, whose callers promise
// that no two live parts overlap.
unsafe impl<T: Send> Send for RawRows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for RawRows<'_, T> {}

impl<'a, T> RawRows<'a, T> {
    pub(crate) fn new(data: &'a mut [T], width: usize) -> Self {
        Self { base: data.as_mut_ptr(), len: data.len(), width, life: PhantomData }
    }

    /// Elements `col..col + n` of `row`.
    ///
    /// # Safety
    /// No other live part may overlap it.
    #[allow(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(crate) unsafe fn part(&self, row: usize, col: usize, n: usize) -> &'a mut [T] {
        let at = row * self.width + col;
        assert!(col + n <= self.width && at + n <= self.len, "part of a row out of range");
        // SAFETY: inside the borrowed slice (checked); exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), n) }
    }

    /// `n` whole rows from `row`.
    ///
    /// # Safety
    /// No other live part may overlap them.
    #[allow(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(crate) unsafe fn rows(&self, row: usize, n: usize) -> &'a mut [T] {
        let (at, n) = (row * self.width, n * self.width);
        assert!(at + n <= self.len, "rows out of range");
        // SAFETY: inside the borrowed slice (checked); exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), n) }
    }
}
