//! The ggml tensor types: ids, names and block geometry.
//!
//! Source: the GGUF specification's `ggml_type` table. A row of a quantised tensor is a whole number of blocks.

use std::fmt;

macro_rules! ggml_types {
    ($($name:ident = $id:literal, $elems:literal, $bytes:literal;)*) => {
        /// A ggml tensor type, as numbered in a GGUF file.
        #[allow(non_camel_case_types, reason = "these are the format's own names")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum GgmlType { $(
            #[doc = concat!("ggml type ", stringify!($id), ": ", stringify!($elems), " elements in ", stringify!($bytes), " bytes.")]
            $name = $id,
        )* }

        impl GgmlType {
            /// Every known type, in order of its id.
            pub const ALL: &'static [GgmlType] = &[$(GgmlType::$name),*];

            /// The type with this id, or `None` for an id that ggml removed or never had.
            pub const fn from_id(id: u32) -> Option<Self> {
                match id { $($id => Some(GgmlType::$name),)* _ => None }
            }

            /// The id used in GGUF files.
            pub const fn id(self) -> u32 { self as u32 }

            /// The upper-case name, as in `Q4_1`.
            pub const fn name(self) -> &'static str {
                match self { $(GgmlType::$name => stringify!($name),)* }
            }

            /// Elements per block.
            pub const fn block_elems(self) -> u64 { match self { $(GgmlType::$name => $elems,)* } }

            /// Bytes per block.
            pub const fn block_bytes(self) -> u64 { match self { $(GgmlType::$name => $bytes,)* } }
        }
    };
}

ggml_types! {
    F32 = 0, 1, 4;
    F16 = 1, 1, 2;
    Q4_0 = 2, 32, 18;
    Q4_1 = 3, 32, 20;
    Q5_0 = 6, 32, 22;
    Q5_1 = 7, 32, 24;
    Q8_0 = 8, 32, 34;
    Q8_1 = 9, 32, 36;
    Q2_K = 10, 256, 84;
    Q3_K = 11, 256, 110;
    Q4_K = 12, 256, 144;
    Q5_K = 13, 256, 176;
    Q6_K = 14, 256, 210;
    Q8_K = 15, 256, 292;
    IQ2_XXS = 16, 256, 66;
    IQ2_XS = 17, 256, 74;
    IQ3_XXS = 18, 256, 98;
    IQ1_S = 19, 256, 50;
    IQ4_NL = 20, 32, 18;
    IQ3_S = 21, 256, 110;
    IQ2_S = 22, 256, 82;
    IQ4_XS = 23, 256, 136;
    I8 = 24, 1, 1;
    I16 = 25, 1, 2;
    I32 = 26, 1, 4;
    I64 = 27, 1, 8;
    F64 = 28, 1, 8;
    IQ1_M = 29, 256, 56;
    BF16 = 30, 1, 2;
    TQ1_0 = 34, 256, 54;
    TQ2_0 = 35, 256, 66;
    MXFP4 = 39, 32, 17;
    NVFP4 = 40, 64, 36;
    Q1_0 = 41, 128, 18;
}

impl GgmlType {
    /// Bytes of a row of `elems` elements; `None` when that is not a whole number of blocks or overflows.
    pub const fn row_bytes(self, elems: u64) -> Option<u64> {
        if !elems.is_multiple_of(self.block_elems()) {
            return None;
        }
        (elems / self.block_elems()).checked_mul(self.block_bytes())
    }

    /// Bytes of a tensor of `shape` (`shape[0]` contiguous); `None` when it has no or an empty dimension, when a row is
    /// not a whole number of blocks, or when the size overflows u64.
    pub fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        let (&cols, rows) = shape.split_first()?;
        if shape.contains(&0) {
            return None;
        }
        rows.iter().try_fold(self.row_bytes(cols)?, |bytes, &dim| bytes.checked_mul(dim))
    }

    /// Name of a type id that ggml once had and removed, for messages; `None` for every other id.
    pub const fn removed_name(id: u32) -> Option<&'static str> {
        Some(match id {
            4 => "Q4_2",
            5 => "Q4_3",
            31 => "Q4_0_4_4",
            32 => "Q4_0_4_8",
            33 => "Q4_0_8_8",
            36 => "IQ4_NL_4_4",
            37 => "IQ4_NL_4_8",
            38 => "IQ4_NL_8_8",
            _ => return None,
        })
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for GgmlType {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL.iter().copied().find(|t| t.name() == s).ok_or_else(|| format!("unknown tensor type {s:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Block geometry against the sums of the blocks' fields (scales, mins, packed quants), as the format states them.
    #[test]
    fn block_bytes_are_the_sum_of_the_fields() {
        let k = 256;
        for (ty, elems, bytes) in [
            (GgmlType::Q4_1, 32, 2 + 2 + 16),
            (GgmlType::Q5_0, 32, 2 + 4 + 16),
            (GgmlType::Q8_0, 32, 2 + 32),
            (GgmlType::Q2_K, k, 2 + 2 + k / 16 + k / 4),
            (GgmlType::Q3_K, k, 2 + k / 4 + k / 8 + 12),
            (GgmlType::Q6_K, k, 2 + k / 2 + k / 4 + k / 16),
            (GgmlType::IQ2_XXS, k, 2 + k / 4),
            (GgmlType::IQ1_M, k, k / 8 + k / 16 + k / 32),
            (GgmlType::IQ4_XS, k, 2 + 2 + k / 2 + k / 64),
            (GgmlType::TQ1_0, k, 2 + 4 * 13),
            (GgmlType::NVFP4, 64, 4 + 32),
            (GgmlType::Q1_0, 128, 2 + 16),
        ] {
            assert_eq!((ty.block_elems(), ty.block_bytes()), (elems, bytes), "{ty}");
        }
    }

    #[test]
    fn ids_and_names_round_trip_and_removed_ids_are_not_types() {
        for &ty in GgmlType::ALL {
            assert_eq!(GgmlType::from_id(ty.id()), Some(ty));
            assert_eq!(ty.name().parse(), Ok(ty));
            assert_eq!(GgmlType::removed_name(ty.id()), None);
        }
        assert_eq!(GgmlType::from_id(4), None);
        assert_eq!(GgmlType::removed_name(31), Some("Q4_0_4_4"));
        assert_eq!(GgmlType::from_id(1000), None);
    }

    #[test]
    fn tensor_bytes_refuses_partial_blocks_empty_and_overflow() {
        assert_eq!(GgmlType::Q4_1.tensor_bytes(&[64, 3]), Some(2 * 20 * 3));
        assert_eq!(GgmlType::Q4_1.tensor_bytes(&[48, 3]), None);
        assert_eq!(GgmlType::F32.tensor_bytes(&[]), None);
        assert_eq!(GgmlType::F32.tensor_bytes(&[4, 0]), None);
        assert_eq!(GgmlType::F32.tensor_bytes(&[1 << 40, 1 << 40]), None);
    }
}
