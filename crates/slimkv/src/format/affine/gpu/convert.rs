use super::super::Axis;
use crate::{DType, Result, Tensor};
#[allow(clippy::too_many_arguments)]
pub(crate) fn quantize(
    _op: &'static str,
    _x: &Tensor,
    _axis: Axis,
    _group: usize,
    _bits: u32,
    _eps: f32,
    _packed: bool,
    _param_dtype: DType,
) -> Result<(Tensor, Tensor, Tensor)> {
    todo!()
}
#[allow(clippy::too_many_arguments)]
pub(crate) fn dequantize(
    _op: &'static str,
    _codes: &Tensor,
    _scale: &Tensor,
    _zero: &Tensor,
    _axis: Axis,
    _group: usize,
    _bits: u32,
    _head_dim: usize,
) -> Result<Tensor> {
    todo!()
}
pub(crate) fn round_trip(
    _op: &'static str,
    _x: &Tensor,
    _axis: Axis,
    _group: usize,
    _levels: u32,
    _eps: f32,
) -> Result<Tensor> {
    todo!()
}
