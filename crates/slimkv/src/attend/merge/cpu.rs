//! Merging on the CPU.

use crate::attend::Attended;
use crate::dtype::with_float;
use crate::{Device, FloatElement, Result, Tensor};

/// Merges two partial results; shapes and dtypes are checked.
pub(crate) fn merge(out_a: &Tensor, lse_a: &Tensor, out_b: &Tensor, lse_b: &Tensor) -> Result<Attended> {
    let mut out = Tensor::zeros(out_a.dtype(), out_a.shape(), &Device::cpu())?;
    let mut lse = Tensor::zeros(lse_a.dtype(), lse_a.shape(), &Device::cpu())?;
    let (la, lb) = (lse_a.as_slice::<f32>()?, lse_b.as_slice::<f32>()?);
    let d = out_a.shape().last().copied().unwrap_or(0);
    for (l, (&a, &b)) in lse.as_mut_slice::<f32>()?.iter_mut().zip(la.iter().zip(lb)) {
        *l = match (a == f32::NEG_INFINITY, b == f32::NEG_INFINITY) {
            (true, _) => b,
            (_, true) => a,
            _ => a.max(b) + ((a - a.max(b)).exp() + (b - a.max(b)).exp()).ln(),
        };
    }
    if d == 0 {
        return Ok(Attended { out, lse });
    }
    with_float!(out_a.dtype(), T => {
        let (a, b) = (out_a.as_slice::<T>()?, out_b.as_slice::<T>()?);
        let rows = out.as_mut_slice::<T>()?.chunks_mut(d).zip(a.chunks(d).zip(b.chunks(d)));
        for ((out, (a, b)), (&la, &lb)) in rows.zip(la.iter().zip(lb)) {
            match (la == f32::NEG_INFINITY, lb == f32::NEG_INFINITY) {
                (true, true) => {}
                (true, false) => out.copy_from_slice(b),
                (false, true) => out.copy_from_slice(a),
                (false, false) => {
                    let m = la.max(lb);
                    let (wa, wb) = ((la - m).exp(), (lb - m).exp());
                    let sum = wa + wb;
                    for (o, (&a, &b)) in out.iter_mut().zip(a.iter().zip(b)) {
                        *o = T::from_f32((wa * a.to_f32() + wb * b.to_f32()) / sum);
                    }
                }
            }
        }
        Ok(Attended { out, lse })
    }, else unreachable!("merge checks the dtype"))
}
