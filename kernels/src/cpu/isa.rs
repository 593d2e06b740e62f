//! Which instruction set the kernels use, decided once at run time.

/// The instruction sets with code of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// AVX-512 F/BW/DQ/VL with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// NEON with the dot-product extension.
    #[cfg(target_arch = "aarch64")]
    NeonDot,
    /// Plain Rust, compiled for the target's baseline.
    Scalar,
}

/// An instruction set that this CPU has. Only [`Isa::detect`] and [`Isa::available`] make one, so holding it is proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Kind);

impl Isa {
    /// The best one here.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// Every one that this CPU has, best first; the last is always the scalar one.
    pub fn available() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
            {
                all.push(Self(Kind::Avx512));
            }
            if avx2 {
                all.push(Self(Kind::Avx2));
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("dotprod") {
            all.push(Self(Kind::NeonDot));
        }
        all.push(Self(Kind::Scalar));
        all
    }

    pub(crate) fn kind(self) -> Kind {
        self.0
    }

    /// Name for logs and reports.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Kind::NeonDot => "neon-dotprod",
            Kind::Scalar => "scalar",
        }
    }
}

/// Defines `$name(isa, args…)`, which runs `$generic::<L>(args…)` compiled for `isa` with its lane type `L`.
/// `$generic` must be `#[inline(always)]`, so that it takes on the features of the wrapper.
macro_rules! multiversion {
    ($(#[$m:meta])* $vis:vis fn $name:ident = $generic:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;) => {
        $(#[$m])*
        #[allow(clippy::too_many_arguments, reason = "kernels take flat arguments")]
        #[allow(unsafe_code, reason = "an `Isa` proves that the CPU has the features")]
        $vis fn $name(isa: $crate::cpu::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::cpu::{isa::Kind, lanes::{Avx2, Avx512}};

                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments, reason = "kernels take flat arguments")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { $generic::<Avx512>($($arg),*) }

                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments, reason = "kernels take flat arguments")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { $generic::<Avx2>($($arg),*) }

                match isa.kind() {
                    // SAFETY: an `Isa` of this kind exists only where the CPU has these features.
                    Kind::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Kind::Avx2 => return unsafe { avx2($($arg),*) },
                    Kind::Scalar => {}
                }
            }
            let _ = isa;
            $generic::<$crate::cpu::lanes::Portable>($($arg),*)
        }
    };
}
pub(crate) use multiversion;
