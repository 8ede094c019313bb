//! Between candle's tensors, which the dense layers use, and slimkv's, which live on any device.

use candle_core::{Device, Tensor};

use crate::Result;

/// A contiguous f32 tensor, on `device`.
pub(crate) fn to_slimkv(t: &Tensor, device: &slimkv::Device) -> Result<slimkv::Tensor> {
    let host = slimkv::Tensor::from_vec(t.flatten_all()?.to_vec1::<f32>()?, t.dims())?;
    Ok(host.to_device(device)?)
}

/// An f32 tensor, from wherever it is.
pub(crate) fn from_slimkv(t: &slimkv::Tensor) -> Result<Tensor> {
    Ok(Tensor::from_vec(t.to_vec::<f32>()?, t.shape(), &Device::Cpu)?)
}
