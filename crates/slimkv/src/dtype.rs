//! Element types.

use half::{bf16, f16};

/// The element type of a [`Tensor`](crate::Tensor).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DType {
    F16,
    BF16,
    F32,
    U8,
    U16,
    U32,
    I32,
}

impl DType {
    /// Every dtype, in the order of the documentation.
    pub const ALL: [DType; 7] = [DType::F16, DType::BF16, DType::F32, DType::U8, DType::U16, DType::U32, DType::I32];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::BF16 | DType::U16 => 2,
            DType::F32 | DType::U32 | DType::I32 => 4,
        }
    }

    /// Whether this is one of the three float types.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32)
    }

    /// The name that the command line and the documentation use.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::I32 => "i32",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = crate::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        DType::ALL.into_iter().find(|d| d.name() == text).ok_or_else(|| crate::Error::Parse {
            what: "dtype",
            text: text.into(),
            expected: DType::ALL.map(DType::name).join(", "),
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is an element of a tensor.
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// Its dtype.
    const DTYPE: DType;
}

/// A float element: everything computes in f32, and converts once on the way in and once on the way out.
pub trait FloatElement: Element {
    /// The exact f32 value.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
}

macro_rules! elements {
    ($($t:ty => $d:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
    )*};
}
elements!(f16 => F16, bf16 => BF16, f32 => F32, u8 => U8, u16 => U16, u32 => U32, i32 => I32);

macro_rules! half_floats {
    ($($t:ty),*) => {$(
        impl FloatElement for $t {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                <$t>::to_f32(self)
            }
            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                <$t>::from_f32(value)
            }
        }
    )*};
}
half_floats!(f16, bf16);

impl FloatElement for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

/// Runs `$body` with `$t` bound to the Rust type of a float dtype; any other dtype evaluates `$otherwise`.
macro_rules! with_float {
    ($dtype:expr, $t:ident => $body:expr, else $otherwise:expr) => {
        match $dtype {
            $crate::DType::F16 => {
                type $t = half::f16;
                $body
            }
            $crate::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            $crate::DType::F32 => {
                type $t = f32;
                $body
            }
            _ => $otherwise,
        }
    };
}
pub(crate) use with_float;
