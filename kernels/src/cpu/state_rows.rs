//! Reading and writing state rows in bank memory.

use crate::cpu::bank::BankView;
use crate::cpu::elementwise;
use crate::cpu::isa::Isa;
use crate::cpu::widen;
use crate::math::packed;
use crate::state::{StateKind, StateType};

/// Row index of the storage that holds `row`: a ring wraps around.
fn place(bank: &BankView, slot: usize, row: usize) -> usize {
    let kind = bank.slot(slot).kind;
    let at = match kind {
        StateKind::Ring { rows, .. } => row % rows,
        _ => row,
    };
    assert!(at < kind.rows(bank.tokens()), "row {row} of slot {slot} in a bank committed to {}", bank.tokens());
    at
}

/// The block of a [`StateKind::Fixed`] slot. Its pages read as zeros until written.
///
/// The caller is the only one that touches this bank's slot during its call: one operation runs at a time, and it gives each
/// bank to one unit of work.
#[allow(clippy::mut_from_ref, reason = "bank memory is raw; exclusivity is the caller's promise, as for rows")]
pub(crate) fn fixed(bank: &BankView, slot: usize) -> &mut [f32] {
    let kind = bank.slot(slot).kind;
    assert!(matches!(kind, StateKind::Fixed { .. }) && bank.tokens() > 0, "a committed block");
    // SAFETY: the block is inside the mapping, committed and page-aligned; exclusive as said above.
    unsafe { std::slice::from_raw_parts_mut(bank.rows(slot).cast::<f32>(), kind.width()) }
}

/// The block of a [`StateKind::Fixed`] slot, to read: nobody writes it during the caller's pass over it.
pub(crate) fn fixed_read(bank: &BankView, slot: usize) -> &[f32] {
    let kind = bank.slot(slot).kind;
    assert!(matches!(kind, StateKind::Fixed { .. }) && bank.tokens() > 0, "a committed block");
    // SAFETY: the block is inside the mapping, committed and page-aligned; not written meanwhile, as said above.
    unsafe { std::slice::from_raw_parts(bank.rows(slot).cast::<f32>(), kind.width()) }
}

/// The bytes of a packed row; `row` was checked by [`place`].
#[allow(clippy::mut_from_ref, reason = "bank memory is raw; who reads and writes when is said at `fixed`")]
fn packed_row(bank: &BankView, slot: usize, row: usize) -> &mut [u8] {
    let s = bank.slot(slot);
    let len = s.ty.row_bytes(s.width);
    // SAFETY: the row is inside the slot; during a step only one operation at a time touches the bank, and it writes each row
    // from one unit of work.
    unsafe { std::slice::from_raw_parts_mut(bank.rows(slot).add(row * len), len) }
}

/// The stored bytes of row `row` of a packed slot.
pub(crate) fn packed(bank: &BankView, slot: usize, row: usize) -> &[u8] {
    packed_row(bank, slot, place(bank, slot, row))
}

/// Reads row `row` of `slot` as f32.
pub(crate) fn read(isa: Isa, bank: &BankView, slot: usize, row: usize, out: &mut [f32]) {
    let s = bank.slot(slot);
    assert_eq!(s.width, out.len(), "state row of another width");
    let at = place(bank, slot, row) * s.width;
    let base = bank.rows(slot);
    match s.ty {
        StateType::F16 => {
            // SAFETY: the row is inside the slot (checked) and aligned; nobody writes it while an operation reads.
            widen::f16(isa, unsafe { std::slice::from_raw_parts(base.cast::<u16>().add(at), s.width) }, out);
        }
        StateType::F32 => {
            // SAFETY: as above.
            out.copy_from_slice(unsafe { std::slice::from_raw_parts(base.cast::<f32>().add(at), s.width) });
        }
        StateType::Fp8 { rotary } => widen::fp8(isa, packed_row(bank, slot, at / s.width), rotary, out),
        StateType::Fp4 => widen::fp4(isa, packed_row(bank, slot, at / s.width), out),
    }
}

/// Writes `x` as row `pos` of `slot`, in the slot's storage type.
pub(crate) fn write(isa: Isa, bank: &BankView, slot: usize, pos: usize, x: &[f32]) {
    let s = bank.slot(slot);
    assert_eq!(s.width, x.len(), "state row of another width");
    let pos = place(bank, slot, pos);
    let base = bank.rows(slot);
    match s.ty {
        StateType::F16 => {
            // SAFETY: row `pos` is inside the slot (checked), aligned (slots start on pages), and during a step only
            // the step's own calls, one at a time, touch the bank.
            let row = unsafe { std::slice::from_raw_parts_mut(base.cast::<u16>().add(pos * s.width), s.width) };
            elementwise::to_f16(isa, x, row);
        }
        StateType::F32 => {
            // SAFETY: as above.
            let row = unsafe { std::slice::from_raw_parts_mut(base.cast::<f32>().add(pos * s.width), s.width) };
            row.copy_from_slice(x);
        }
        StateType::Fp8 { rotary } => packed::store_fp8(x, rotary, packed_row(bank, slot, pos)),
        StateType::Fp4 => packed::store_fp4(x, packed_row(bank, slot, pos)),
    }
}
