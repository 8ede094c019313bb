//! The definition of group-affine quantisation, in plain loops.

use half::f16;

use super::{Affine, Axis, bits};
use crate::{DType, Result};

/// The scale and zero point of one group, and the code of each of its elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Params {
    /// The step between two codes.
    pub scale: f32,
    /// The value of code 0.
    pub zero: f32,
}

impl Params {
    /// The parameters of a group from the extremes of its *finite* elements (`None`: there is none, and the group decodes
    /// to zeros). Division is the correctly rounded one.
    pub fn of(extremes: Option<(f32, f32)>, levels: u32, eps: f32) -> Self {
        match extremes {
            None => Params { scale: 0.0, zero: 0.0 },
            Some((min, max)) => Params { scale: ((max - min) / levels as f32).max(eps), zero: min },
        }
    }

    /// The parameters as `dtype` stores them; f16 saturates at its largest value.
    pub fn stored(self, dtype: DType) -> Self {
        let store = |x: f32| match dtype {
            DType::F16 => f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32(),
            _ => x,
        };
        Params { scale: store(self.scale), zero: store(self.zero) }
    }

    /// The code of one element: round half to even; NaN and -inf take 0, +inf takes `levels`, a scale of 0 gives 0.
    pub fn code(self, value: f32, levels: u32) -> u8 {
        if self.scale == 0.0 || value.is_nan() {
            return 0;
        }
        ((value - self.zero) / self.scale).round_ties_even().clamp(0.0, levels as f32) as u8
    }

    /// The value of one code; product and sum are rounded separately.
    pub fn decode(self, code: u8) -> f32 {
        f32::from(code) * self.scale + self.zero
    }
}

/// The extremes of the finite elements.
pub fn extremes(values: impl Iterator<Item = f32>) -> Option<(f32, f32)> {
    values.filter(|v| v.is_finite()).fold(None, |acc, v| match acc {
        None => Some((v, v)),
        Some((lo, hi)) => Some((lo.min(v), hi.max(v))),
    })
}

/// Codes and parameters of a matrix of `tokens` x `channels` values.
pub struct Quantized {
    /// One code an element, row-major.
    pub codes: Vec<u8>,
    /// One entry a group, in the shape of [`Axis::param_shape`].
    pub params: Vec<Params>,
}

/// Quantises one matrix. The codes are computed against the parameters *as stored*.
#[allow(clippy::too_many_arguments)]
pub fn quantize(
    x: &[f32],
    tokens: usize,
    channels: usize,
    axis: Axis,
    group: usize,
    levels: u32,
    eps: f32,
    stored_as: DType,
) -> Quantized {
    let [rows, columns] = axis.param_shape(tokens, channels, group);
    let mut codes = vec![0; x.len()];
    let mut params = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let members: Vec<usize> = match axis {
                Axis::Tokens => (row * group..((row + 1) * group).min(tokens)).map(|t| t * channels + column).collect(),
                Axis::Channels => {
                    (column * group..((column + 1) * group).min(channels)).map(|c| row * channels + c).collect()
                }
            };
            let p = Params::of(extremes(members.iter().map(|&i| x[i])), levels, eps).stored(stored_as);
            for i in members {
                codes[i] = p.code(x[i], levels);
            }
            params.push(p);
        }
    }
    Quantized { codes, params }
}

/// Every row of `rows` as f32, by the definition.
pub fn decode(rows: &Affine) -> Result<Vec<f32>> {
    let shape = rows.shape();
    let scale = rows.scale.to_f32_vec()?;
    let zero = rows.zero.to_f32_vec()?;
    let (words, bytes) = match rows.codes.dtype() {
        DType::U32 => (rows.codes.to_vec::<u32>()?, Vec::new()),
        _ => (Vec::new(), rows.codes.to_vec::<u8>()?),
    };
    let d = rows.head_dim;
    let [param_rows, param_columns] = rows.axis.param_shape(shape.capacity, d, rows.group);
    let width = rows.codes.shape()[3];
    let mut out = Vec::with_capacity(shape.batch * shape.heads * shape.capacity * d);
    let mut codes = vec![0u8; d];
    for matrix in 0..shape.batch * shape.heads {
        for t in 0..shape.capacity {
            let at = (matrix * shape.capacity + t) * width;
            if rows.is_packed() {
                bits::unpack_row(&words[at..at + width], rows.bits, &mut codes);
            } else {
                codes.copy_from_slice(&bytes[at..at + width]);
            }
            for (c, &code) in codes.iter().enumerate() {
                let (row, column) = match rows.axis {
                    Axis::Tokens => (t / rows.group, c),
                    Axis::Channels => (t, c / rows.group),
                };
                let i = (matrix * param_rows + row) * param_columns + column;
                out.push(Params { scale: scale[i], zero: zero[i] }.decode(code));
            }
        }
    }
    Ok(out)
}
