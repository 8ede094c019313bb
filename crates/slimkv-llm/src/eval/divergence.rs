//! Scores of next-token distributions, row by row.

use rayon::prelude::*;

use crate::model::Logits;
use crate::sample::argmax;

/// Rows of reference logits, with what every comparison needs of them.
pub(super) struct Reference {
    logits: Logits,
    rows: Vec<ReferenceRow>,
}

struct ReferenceRow {
    log_sum_exp: f64,
    probabilities: Vec<f32>,
    top: usize,
}

impl Reference {
    pub fn new(logits: Logits) -> Self {
        let row = |i: usize| {
            let row = logits.row(i);
            let log_sum_exp = log_sum_exp(row);
            let probabilities = row.iter().map(|&l| (l as f64 - log_sum_exp).exp() as f32).collect();
            ReferenceRow { log_sum_exp, probabilities, top: argmax(row) }
        };
        let rows = (0..logits.rows()).into_par_iter().map(row).collect();
        Reference { logits, rows }
    }
}

/// The scores of the tokens of a text, in order.
#[derive(Debug, Default)]
pub(super) struct Score {
    nll: Vec<f64>,
    kl: Vec<f64>,
    agreed: usize,
}

impl Score {
    /// Scores the reference itself: no divergence.
    pub fn add_reference(&mut self, reference: &Reference, targets: &[u32]) {
        for ((i, row), &target) in reference.rows.iter().enumerate().zip(targets) {
            self.nll.push(row.log_sum_exp - reference.logits.row(i)[target as usize] as f64);
            self.kl.push(0.0);
            self.agreed += 1;
        }
    }

    /// Scores rows of logits against the same rows of the reference.
    pub fn add(&mut self, reference: &Reference, logits: &Logits, targets: &[u32]) {
        let score = |(i, &target): (usize, &u32)| {
            let (row, expected, found) = (&reference.rows[i], reference.logits.row(i), logits.row(i));
            let log_sum_exp = log_sum_exp(found);
            // KL(P || Q) = sum p (log p - log q), with the two normalisers taken out of the sum.
            let terms = row.probabilities.iter().zip(expected.iter().zip(found));
            let cross: f64 = terms.map(|(&p, (&e, &f))| p as f64 * (e as f64 - f as f64)).sum();
            let kl = cross - row.log_sum_exp + log_sum_exp;
            (log_sum_exp - found[target as usize] as f64, kl.max(0.0), row.top == argmax(found))
        };
        let scores: Vec<_> = targets.par_iter().enumerate().map(|(i, t)| score((i, t))).collect();
        for (nll, kl, agreed) in scores {
            self.nll.push(nll);
            self.kl.push(kl);
            self.agreed += agreed as usize;
        }
    }

    pub fn nll(&self) -> f64 {
        mean(&self.nll)
    }

    pub fn kl_mean(&self) -> f64 {
        mean(&self.kl)
    }

    /// The quantile `q` of `[0, 1]`, linear between neighbours.
    pub fn kl_quantile(&self, q: f64) -> f64 {
        let mut sorted = self.kl.clone();
        sorted.sort_by(f64::total_cmp);
        let at = q * (sorted.len() - 1) as f64;
        let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
        below + (above - below) * at.fract()
    }

    pub fn top1(&self) -> f64 {
        self.agreed as f64 / self.nll.len() as f64
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    top + row.iter().map(|&l| (l as f64 - top).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(rows: &[[f32; 3]]) -> Logits {
        Logits::new(rows.concat(), 3)
    }

    #[test]
    fn scores_are_those_of_the_definitions() {
        // P = (1/2, 1/4, 1/4), Q = (1/4, 1/2, 1/4): KL = 1/2 ln 2 - 1/4 ln 2.
        let ln = |p: [f32; 3]| p.map(|p| p.ln() + 5.0);
        let (p, q) = (ln([0.5, 0.25, 0.25]), ln([0.25, 0.5, 0.25]));
        let reference = Reference::new(logits(&[p, p]));
        let mut score = Score::default();
        score.add(&reference, &logits(&[q, p]), &[0, 2]);
        let quarter = 2f64.ln() / 4.0;
        assert!((score.kl_mean() - quarter / 2.0).abs() < 1e-6);
        assert!((score.kl_quantile(0.99) - 0.99 * quarter).abs() < 1e-6);
        assert!((score.nll() - 4f64.ln()).abs() < 1e-6);
        assert_eq!(score.top1(), 0.5);
        let mut itself = Score::default();
        itself.add_reference(&reference, &[0, 1]);
        assert!((itself.nll() - (2f64.ln() + 4f64.ln()) / 2.0).abs() < 1e-6);
        assert_eq!((itself.kl_mean(), itself.top1()), (0.0, 1.0));
    }
}
