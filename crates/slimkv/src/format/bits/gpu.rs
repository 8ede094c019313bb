use crate::{Result, Tensor};
pub(crate) fn pack(_op: &'static str, _i: &Tensor, _bits: u32) -> Result<Tensor> {
    todo!()
}
pub(crate) fn unpack(_op: &'static str, _p: &Tensor, _bits: u32, _n: usize) -> Result<Tensor> {
    todo!()
}
