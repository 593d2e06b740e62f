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
}

impl GgmlType {
    /// Bytes of a row of `elems` elements; `None` when that is not a whole number of blocks or overflows.
    pub const fn row_bytes(self, elems: u64) -> Option<u64> {
        if !elems.is_multiple_of(self.block_elems()) {
            return None;
        }
        (elems / self.block_elems()).checked_mul(self.block_bytes())
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
