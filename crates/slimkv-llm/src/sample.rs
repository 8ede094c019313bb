//! Choosing the next token.

/// How the next token is chosen from the logits. The default is greedy: the most probable one.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Sampling {
    /// Divides the logits; 0 chooses the most probable token.
    pub temperature: f32,
    /// Only the `top_k` most probable tokens are drawn from; 0 is all.
    pub top_k: usize,
    /// Only the most probable tokens that together have this probability are drawn from; 1 is all.
    pub top_p: f32,
    /// Divides positive and multiplies negative logits of recent tokens (arXiv 1909.05858); 1 is off.
    pub repetition_penalty: f32,
    /// How many recent tokens are penalised.
    pub repetition_window: usize,
    /// The seed: the same seed gives the same text.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, repetition_penalty: 1.0, repetition_window: 64, seed: 0 }
    }
}

/// A [`Sampling`] in progress.
pub(crate) struct Sampler {
    sampling: Sampling,
    state: u64,
}

impl Sampler {
    pub fn new(sampling: &Sampling) -> Self {
        Sampler { sampling: sampling.clone(), state: sampling.seed }
    }

    /// Chooses a token; `recent` are the tokens so far.
    pub fn sample(&mut self, logits: &[f32], recent: &[u32]) -> u32 {
        let mut logits = logits.to_vec();
        self.penalise(&mut logits, recent);
        if self.sampling.temperature <= 0.0 {
            return argmax(&logits) as u32;
        }
        // By falling logit; equal logits by token, so that the order is total.
        let mut order: Vec<u32> = (0..logits.len() as u32).filter(|&i| !logits[i as usize].is_nan()).collect();
        let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let keep = if self.sampling.top_k == 0 { order.len() } else { self.sampling.top_k.min(order.len()) };
        if keep == 0 {
            return 0;
        }
        if keep < order.len() {
            order.select_nth_unstable_by(keep - 1, by_logit);
            order.truncate(keep);
        }
        order.sort_unstable_by(by_logit);
        let top = logits[order[0] as usize];
        let weight = |i: &u32| (((logits[*i as usize] - top) / self.sampling.temperature) as f64).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        let mut mass = 0.0;
        let nucleus = weights.iter().position(|w| {
            mass += w / total;
            mass >= self.sampling.top_p as f64
        });
        weights.truncate(nucleus.map_or(weights.len(), |last| last + 1));
        let mut point = self.uniform() * weights.iter().sum::<f64>();
        let chosen = weights.iter().position(|w| {
            point -= w;
            point < 0.0
        });
        order[chosen.unwrap_or(weights.len() - 1)]
    }

    fn penalise(&self, logits: &mut [f32], recent: &[u32]) {
        let penalty = self.sampling.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        let window = &recent[recent.len().saturating_sub(self.sampling.repetition_window)..];
        let distinct: std::collections::BTreeSet<u32> = window.iter().copied().collect();
        for token in distinct {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
    }

    /// SplitMix64: a number of `[0, 1)` with 53 random bits.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The first index of the largest value; NaN is smaller than anything.
pub(crate) fn argmax(values: &[f32]) -> usize {
    let mut best = (0, f32::NEG_INFINITY);
    for (i, &value) in values.iter().enumerate() {
        if value > best.1 {
            best = (i, value);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 3.0, 1.0, 2.9, f32::NAN];

    fn draws(sampling: Sampling) -> Vec<u32> {
        let mut sampler = Sampler::new(&sampling);
        (0..200).map(|_| sampler.sample(&LOGITS, &[])).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert!(draws(Sampling::default()).iter().all(|&t| t == 1));
        assert_eq!(argmax(&[1.0, 2.0, 2.0]), 1);
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), 0);
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens() {
        let hot = |seed| Sampling { temperature: 1.0, seed, ..Sampling::default() };
        assert_eq!(draws(hot(7)), draws(hot(7)));
        assert_ne!(draws(hot(7)), draws(hot(8)));
        assert!([0, 1, 2, 3].iter().all(|t| draws(hot(7)).contains(t)));
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let top_k = draws(Sampling { temperature: 5.0, top_k: 2, ..Sampling::default() });
        assert!(top_k.contains(&1) && top_k.contains(&3) && !top_k.contains(&0) && !top_k.contains(&2));
        let top_p = draws(Sampling { temperature: 1.0, top_p: 0.5, ..Sampling::default() });
        assert!(top_p.contains(&1) && top_p.contains(&3) && !top_p.contains(&0) && !top_p.contains(&2));
        assert!(draws(Sampling { temperature: 1.0, top_p: 0.0, ..Sampling::default() }).iter().all(|&t| t == 1));
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let mut sampler = Sampler::new(&Sampling { temperature: 1.0, ..Sampling::default() });
        let logits = [0.0f32, 3f32.ln()];
        let ones = (0..4000).filter(|_| sampler.sample(&logits, &[]) == 1).count();
        assert!((2850..3150).contains(&ones), "{ones}");
    }

    #[test]
    fn the_penalty_sees_only_the_window() {
        let sampling = Sampling { repetition_penalty: 2.0, repetition_window: 1, ..Sampling::default() };
        assert_eq!(Sampler::new(&sampling).sample(&LOGITS, &[3, 1]), 3);
        assert_eq!(Sampler::new(&sampling).sample(&LOGITS, &[1, 3]), 1);
    }
}
