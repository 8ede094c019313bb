//! What stands between the products: norms, activations, sums.

use rayon::prelude::*;

use super::{Activations, matvec};

/// Fewer elements than this are not worth a second thread.
const PARALLEL: usize = 1 << 15;

/// Calls `f(i, row)` for every row of `data`, on several threads if there is enough to do.
pub(crate) fn each_row(data: &mut [f32], cols: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    match data.len() < PARALLEL {
        true => data.chunks_mut(cols).enumerate().for_each(|(i, row)| f(i, row)),
        false => data.par_chunks_mut(cols).enumerate().for_each(|(i, row)| f(i, row)),
    }
}

/// Divides a row by its root mean square and multiplies it with `weight` (arXiv 1910.07467).
pub(crate) fn rms_norm_row(row: &mut [f32], weight: &[f32], eps: f32) {
    let mean = matvec::one_dot(row, row) / row.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    row.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * w);
}

/// [`rms_norm_row`] of every row.
pub(crate) fn rms_norm(x: &Activations, weight: &[f32], eps: f32) -> Activations {
    let mut y = x.clone();
    each_row(&mut y.data, y.cols, |_, row| rms_norm_row(row, weight, eps));
    y
}

/// `gate` becomes `silu(gate) * up` (SwiGLU, arXiv 2002.05202).
pub(crate) fn swiglu(gate: &mut Activations, up: &Activations) {
    let cols = gate.cols;
    each_row(&mut gate.data, cols, |i, row| {
        let up = &up.data[i * cols..][..cols];
        row.iter_mut().zip(up).for_each(|(g, u)| *g = *g / (1.0 + (-*g).exp()) * u);
    });
}

/// `x` becomes `x + y`.
pub(crate) fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(data: &[f32]) -> Activations {
        Activations { data: data.to_vec(), cols: data.len() }
    }

    #[test]
    fn the_norm_of_a_row() {
        let y = rms_norm(&row(&[3.0, -4.0]), &[1.0, 2.0], 0.0);
        let rms = 12.5f32.sqrt();
        assert!((y.data[0] - 3.0 / rms).abs() < 1e-6 && (y.data[1] + 8.0 / rms).abs() < 1e-6);
        assert_eq!(rms_norm(&row(&[0.0; 5]), &[1.0; 5], 1e-5).data, [0.0; 5]);
    }

    #[test]
    fn the_gate() {
        let mut gate = row(&[0.0, 2.0, -100.0]);
        swiglu(&mut gate, &row(&[5.0, 3.0, 1.0]));
        let expected = [0.0, 6.0 / (1.0 + (-2.0f32).exp()), 0.0];
        assert!(gate.data.iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-6), "{gate:?}");
    }

    #[test]
    fn many_rows_are_done_like_one() {
        let cols = 96;
        let data: Vec<f32> = (0..cols * 400).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
        let weight: Vec<f32> = (0..cols).map(|i| i as f32).collect();
        let all = rms_norm(&Activations { data: data.clone(), cols }, &weight, 1e-5);
        for (found, input) in all.data.chunks(cols).zip(data.chunks(cols)) {
            assert_eq!(found, rms_norm(&row(input), &weight, 1e-5).data);
        }
    }
}
