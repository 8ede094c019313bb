//! Dense layers: weights stay as they are stored, and every product is an f32 product.
//!
//! Many rows of activations (a prompt) multiply a panel of decoded weights with candle's matrix product; few rows (one
//! new token) read the stored blocks directly. Activations are never rounded to 8 bits, unlike in candle's own quantised
//! product or in llama.cpp, so two caches can be compared by what they do and by nothing else.

mod blocks;
mod matvec;
pub(crate) mod ops;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::Result;
use blocks::Decoder;

/// Up to this many rows of activations, decoding each weight row once into the L1 cache beats decoded panels.
const FEW_ROWS: usize = 8;
/// Elements of a decoded panel: 16 MiB, so that the temporary stays small for any vocabulary.
const PANEL: usize = 1 << 22;
/// Weights that one thread decodes at a time: some 10 microseconds of work.
const TASK: usize = 1 << 15;

/// Rows of f32, one for each token.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Activations {
    /// Row after row.
    pub data: Vec<f32>,
    /// Elements of a row; positive.
    pub cols: usize,
}

impl Activations {
    pub fn rows(&self) -> usize {
        self.data.len() / self.cols
    }

    /// Rows `first..first + count`.
    pub fn narrow(&self, first: usize, count: usize) -> Activations {
        Activations { data: self.data[first * self.cols..(first + count) * self.cols].to_vec(), cols: self.cols }
    }
}

/// A weight matrix `[out, in]` as its file stores it, with an optional bias.
pub(crate) struct Linear {
    weight: QTensor,
    decoder: Decoder,
    rows: usize,
    cols: usize,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Wraps a matrix; `bias` has as many elements as the matrix rows.
    pub fn new(weight: QTensor, bias: Option<Vec<f32>>) -> Result<Self> {
        let (rows, cols) = weight.shape().dims2()?;
        let decoder = Decoder::of(weight.dtype());
        Ok(Linear { weight, decoder, rows, cols, bias })
    }

    /// `x W^T + b` for `x` `[n, in]`.
    pub fn forward(&self, x: &Activations) -> Result<Activations> {
        Self::forward_all([self], x).map(|[y]| y)
    }

    /// The products of several matrices with the same activations.
    pub fn forward_all<const N: usize>(linears: [&Linear; N], x: &Activations) -> Result<[Activations; N]> {
        let n = x.rows();
        let mut products = linears.map(|l| Activations { data: vec![0.0; n * l.rows], cols: l.rows });
        if n <= FEW_ROWS {
            few(&linears, x, &mut products)?;
        } else {
            let x = Tensor::from_slice(&x.data, (n, x.cols), &Device::Cpu)?;
            for (linear, product) in linears.iter().zip(&mut products) {
                linear.many(&x, product)?;
            }
        }
        for (linear, product) in linears.iter().zip(&mut products) {
            if let Some(bias) = &linear.bias {
                product.data.chunks_mut(linear.rows).for_each(|row| ops::add(row, bias));
            }
        }
        Ok(products)
    }

    /// The rows of the matrix at the given indices, decoded: the token embedding. Indices are below the number of rows.
    pub fn gather(&self, indices: &[u32]) -> Result<Activations> {
        let mut data = vec![0.0f32; indices.len() * self.cols];
        let rows = RowReader::new(self)?;
        for (&index, out) in indices.iter().zip(data.chunks_mut(self.cols)) {
            rows.read(index as usize, out)?;
        }
        Ok(Activations { data, cols: self.cols })
    }

    /// Writes the product with `x` `[n, in]` panel by panel.
    fn many(&self, x: &Tensor, product: &mut Activations) -> Result<()> {
        let panel_rows = (PANEL / self.cols).clamp(1, self.rows);
        for first in (0..self.rows).step_by(panel_rows) {
            let count = panel_rows.min(self.rows - first);
            let y = x.matmul(&self.panel(first, count)?.t()?)?.flatten_all()?.to_vec1::<f32>()?;
            for (row, y) in product.data.chunks_mut(self.rows).zip(y.chunks(count)) {
                row[first..first + count].copy_from_slice(y);
            }
        }
        Ok(())
    }

    /// Rows `first..first + count`, decoded.
    fn panel(&self, first: usize, count: usize) -> Result<Tensor> {
        let reader = RowReader::new(self)?;
        let mut panel = vec![0.0f32; count * self.cols];
        let rows_per_task = TASK.div_ceil(self.cols);
        panel.par_chunks_mut(rows_per_task * self.cols).enumerate().try_for_each(|(task, out)| {
            let first = first + task * rows_per_task;
            out.chunks_mut(self.cols).enumerate().try_for_each(|(i, out)| reader.read(first + i, out))
        })?;
        Ok(Tensor::from_vec(panel, (count, self.cols), &Device::Cpu)?)
    }
}

/// Products with few rows: a task decodes some weight rows, one at a time, and multiplies each with all of `x`.
fn few(linears: &[&Linear], x: &Activations, products: &mut [Activations]) -> Result<()> {
    let n = x.rows();
    // The results of a task lie together: n of them for each weight row.
    let mut by_weight: Vec<Vec<f32>> = linears.iter().map(|l| vec![0.0; l.rows * n]).collect();
    let mut tasks = Vec::new();
    for (linear, out) in linears.iter().zip(&mut by_weight) {
        let (reader, rows) = (RowReader::new(linear)?, TASK.div_ceil(linear.cols));
        tasks.extend(out.chunks_mut(rows * n).enumerate().map(|(i, out)| (reader.clone(), i * rows, out)));
    }
    tasks.into_par_iter().try_for_each_init(
        || vec![0.0f32; x.cols],
        |weight, (reader, first, out)| -> Result<()> {
            for (i, out) in out.chunks_mut(n).enumerate() {
                reader.read(first + i, weight)?;
                matvec::dots(weight, &x.data, out);
            }
            Ok(())
        },
    )?;
    for (product, by_weight) in products.iter_mut().zip(by_weight) {
        if n == 1 {
            product.data = by_weight;
            continue;
        }
        for (i, row) in product.data.chunks_mut(product.cols).enumerate() {
            row.iter_mut().zip(by_weight[i..].iter().step_by(n)).for_each(|(y, &v)| *y = v);
        }
    }
    Ok(())
}

/// Decodes single rows of a matrix.
#[derive(Clone)]
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
            assert_eq!(linear.gather(&[0, 1, 2, 3, 4]).unwrap().data, expected, "{dtype:?}");
            assert_eq!(linear.gather(&[3]).unwrap().data, expected[3 * 512..4 * 512], "{dtype:?}");
        }
    }

    #[test]
    fn few_and_many_rows_give_the_f32_product() {
        for dtype in DTYPES {
            let weight = QTensor::quantize(&random(70, 256, 5), dtype).unwrap();
            let dense = weight.dequantize(&Device::Cpu).unwrap();
            let bias = random(1, 70, 9).reshape(70).unwrap();
            let linear = Linear::new(weight, Some(flat(&bias))).unwrap();
            for n in [1, 2, 7, 8, 9, 33] {
                let x = random(n, 256, 7 + n as u32);
                let expected = flat(&x.matmul(&dense.t().unwrap()).unwrap().broadcast_add(&bias).unwrap());
                let found = linear.forward(&Activations { data: flat(&x), cols: 256 }).unwrap();
                assert_eq!((found.rows(), found.cols), (n, 70));
                let worst = expected.iter().zip(&found.data).map(|(e, f)| (e - f).abs()).fold(0.0, f32::max);
                assert!(worst < 2e-5, "{dtype:?} {n}: {worst}");
            }
        }
    }

    #[test]
    fn panels_cover_a_matrix_that_is_larger_than_one() {
        let (rows, cols) = (PANEL / 256 + 3, 256);
        let linear = Linear::new(QTensor::quantize(&random(rows, cols, 1), GgmlDType::Q8_0).unwrap(), None).unwrap();
        let x = Activations { data: flat(&random(FEW_ROWS + 1, cols, 2)), cols };
        let many = linear.forward(&x).unwrap();
        let few = linear.forward(&x.narrow(1, 1)).unwrap();
        let worst = many.narrow(1, 1).data.iter().zip(&few.data).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 2e-5, "{worst}");
    }
}
