//! Dense layers: weights stay as they are stored, and every product is an f32 product.
//!
//! Many rows of activations (a prompt) multiply a panel of decoded weights with candle's matrix product; few rows (one
//! new token) read the stored blocks directly. Activations are never rounded to 8 bits, unlike in candle's own quantised
//! product or in llama.cpp, so two caches can be compared by what they do and by nothing else.

mod blocks;
mod matvec;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::Result;
use blocks::Decoder;

/// Up to this many rows of activations, decoding each weight row once into the L1 cache beats decoded panels.
const FEW_ROWS: usize = 8;
/// Elements of a decoded panel: 16 MiB, so that the temporary stays small for any vocabulary.
const PANEL: usize = 1 << 22;

/// A weight matrix `[out, in]` as its file stores it, with an optional bias.
pub(crate) struct Linear {
    weight: QTensor,
    decoder: Decoder,
    rows: usize,
    cols: usize,
    bias: Option<Tensor>,
}

impl Linear {
    /// Wraps a matrix; `bias` has as many elements as the matrix rows.
    pub fn new(weight: QTensor, bias: Option<Tensor>) -> Result<Self> {
        let (rows, cols) = weight.shape().dims2()?;
        let decoder = Decoder::of(weight.dtype());
        Ok(Linear { weight, decoder, rows, cols, bias })
    }

    /// `x W^T + b` for `x` `[n, in]`, f32.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (n, _) = x.dims2()?;
        let y = match n <= FEW_ROWS {
            true => self.few(x, n)?,
            false => self.many(x, n)?,
        };
        Ok(match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        })
    }

    /// The rows of the matrix at the given indices, decoded: the token embedding. Indices are below the number of rows.
    pub fn gather(&self, indices: &[u32]) -> Result<Tensor> {
        let mut out = vec![0.0f32; indices.len() * self.cols];
        let rows = RowReader::new(self)?;
        for (&index, out) in indices.iter().zip(out.chunks_mut(self.cols)) {
            rows.read(index as usize, out)?;
        }
        Ok(Tensor::from_vec(out, (indices.len(), self.cols), &Device::Cpu)?)
    }

    fn few(&self, x: &Tensor, n: usize) -> Result<Tensor> {
        let x = x.flatten_all()?.to_vec1::<f32>()?;
        let reader = RowReader::new(self)?;
        // One task is a run of weight rows; its results lie row after row, n to each.
        let mut by_weight = vec![0.0f32; self.rows * n];
        let rows_per_task = (1usize << 15).div_ceil(self.cols).max(4);
        by_weight.par_chunks_mut(rows_per_task * n).enumerate().try_for_each_init(
            || vec![0.0f32; self.cols],
            |scratch, (task, out)| -> Result<()> {
                for (i, out) in out.chunks_mut(n).enumerate() {
                    reader.read(task * rows_per_task + i, scratch)?;
                    matvec::dots(scratch, &x, out);
                }
                Ok(())
            },
        )?;
        let y = Tensor::from_vec(by_weight, (self.rows, n), &Device::Cpu)?;
        Ok(if n == 1 { y.reshape((1, self.rows))? } else { y.t()?.contiguous()? })
    }

    fn many(&self, x: &Tensor, n: usize) -> Result<Tensor> {
        let panel_rows = (PANEL / self.cols).clamp(1, self.rows);
        if panel_rows == self.rows {
            return Ok(x.matmul(&self.panel(0, self.rows)?.t()?)?);
        }
        let y = Tensor::zeros((n, self.rows), candle_core::DType::F32, &Device::Cpu)?;
        for first in (0..self.rows).step_by(panel_rows) {
            let panel = self.panel(first, panel_rows.min(self.rows - first))?;
            y.slice_set(&x.matmul(&panel.t()?)?, 1, first)?;
        }
        Ok(y)
    }

    /// Rows `first..first + count`, decoded.
    fn panel(&self, first: usize, count: usize) -> Result<Tensor> {
        let reader = RowReader::new(self)?;
        let mut out = vec![0.0f32; count * self.cols];
        let rows_per_task = (1usize << 16).div_ceil(self.cols);
        out.par_chunks_mut(rows_per_task * self.cols).enumerate().try_for_each(|(task, out)| -> Result<()> {
            for (i, out) in out.chunks_mut(self.cols).enumerate() {
                reader.read(first + task * rows_per_task + i, out)?;
            }
            Ok(())
        })?;
        Ok(Tensor::from_vec(out, (count, self.cols), &Device::Cpu)?)
    }
}

/// Decodes single rows of a matrix.
struct RowReader<'a> {
    weight: &'a QTensor,
    decoder: Decoder,
    bytes: std::borrow::Cow<'a, [u8]>,
    row_bytes: usize,
}

impl<'a> RowReader<'a> {
    fn new(linear: &'a Linear) -> Result<Self> {
        let dtype: GgmlDType = linear.weight.dtype();
        let row_bytes = linear.cols / dtype.block_size() * dtype.type_size();
        let bytes = linear.weight.data()?;
        Ok(RowReader { weight: &linear.weight, decoder: linear.decoder, bytes, row_bytes })
    }

    fn read(&self, row: usize, out: &mut [f32]) -> Result<()> {
        let bytes = &self.bytes[row * self.row_bytes..(row + 1) * self.row_bytes];
        if !blocks::decode(self.decoder, bytes, out) {
            let index = Tensor::from_vec(vec![row as u32], 1, &Device::Cpu)?;
            out.copy_from_slice(&self.weight.embedding(&index)?.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(rows: usize, cols: usize, seed: u32) -> Tensor {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        Tensor::from_vec((0..rows * cols).map(|_| next()).collect(), (rows, cols), &Device::Cpu).unwrap()
    }

    fn flat(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1().unwrap()
    }

    const DTYPES: [GgmlDType; 13] = [
        GgmlDType::F32,
        GgmlDType::F16,
        GgmlDType::BF16,
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ];

    #[test]
    fn rows_decode_as_candle_decodes_them() {
        for dtype in DTYPES {
            let weight = QTensor::quantize(&random(5, 512, 3), dtype).unwrap();
            let expected = flat(&weight.dequantize(&Device::Cpu).unwrap());
            let linear = Linear::new(weight, None).unwrap();
            assert_eq!(flat(&linear.gather(&[0, 1, 2, 3, 4]).unwrap()), expected, "{dtype:?}");
            assert_eq!(flat(&linear.gather(&[3]).unwrap()), expected[3 * 512..4 * 512], "{dtype:?}");
        }
    }

    #[test]
    fn few_and_many_rows_give_the_f32_product() {
        for dtype in DTYPES {
            let weight = QTensor::quantize(&random(70, 256, 5), dtype).unwrap();
            let dense = weight.dequantize(&Device::Cpu).unwrap();
            let bias = random(1, 70, 9).reshape(70).unwrap();
            let linear = Linear::new(weight, Some(bias.clone())).unwrap();
            for n in [1, 2, 7, 8, 9, 33] {
                let x = random(n, 256, 7 + n as u32);
                let expected = flat(&x.matmul(&dense.t().unwrap()).unwrap().broadcast_add(&bias).unwrap());
                let found = flat(&linear.forward(&x).unwrap());
                let worst = expected.iter().zip(&found).map(|(e, f)| (e - f).abs()).fold(0.0, f32::max);
                assert!(worst < 2e-5, "{dtype:?} {n}: {worst}");
            }
        }
    }

    #[test]
    fn panels_cover_a_matrix_that_is_larger_than_one() {
        let (rows, cols) = (PANEL / 256 + 3, 256);
        let linear = Linear::new(QTensor::quantize(&random(rows, cols, 1), GgmlDType::Q8_0).unwrap(), None).unwrap();
        let x = random(FEW_ROWS + 1, cols, 2);
        let many = linear.forward(&x).unwrap();
        let few = linear.forward(&x.narrow(0, 0, 1).unwrap()).unwrap();
        let worst = flat(&many).iter().zip(&flat(&few)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 2e-5, "{worst}");
    }
}
