//! Writing state rows into bank memory.

use crate::cpu::bank::BankView;
use crate::cpu::elementwise;
use crate::cpu::isa::Isa;
use crate::state::StateType;

/// Writes `x` as row `pos` of `slot`, in the slot's storage type.
pub(crate) fn write(isa: Isa, bank: &BankView, slot: usize, pos: usize, x: &[f32]) {
    let s = bank.slot(slot);
    assert_eq!(s.width, x.len(), "state row of another width");
    assert!(pos < bank.tokens(), "row {pos} of a bank committed to {}", bank.tokens());
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
    }
}
