//! The rotary position embedding (RoPE, arXiv 2104.09864) and the ways in which models stretch it.

/// Which two channels of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RopePairs {
    /// Channels `2i` and `2i + 1`: llama models in GGUF, whose query and key weights are permuted for it.
    Interleaved,
    /// Channels `i` and `i + D/2`: all others.
    HalfSplit,
}

/// How the frequencies are changed for a longer context than the one that the model was first trained on.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every position is divided by a factor.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Llama 3.1: long wavelengths are divided by a factor, short ones stay, and those between are blended.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f32,
        /// Wavelengths longer than `original_context / low_freq_factor` are divided.
        low_freq_factor: f32,
        /// Wavelengths shorter than `original_context / high_freq_factor` stay.
        high_freq_factor: f32,
        /// The context of the first training.
        original_context: usize,
    },
    /// One divisor for each frequency, from the tensor `rope_freqs.weight` of a GGUF file.
    Factors(Vec<f32>),
}

/// A rotary embedding over all channels of a head.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Rope {
    /// Pair `i` of `D/2` turns by `base^(-2i/D)` radians a token.
    pub base: f32,
    /// Which channels form a pair.
    pub pairs: RopePairs,
    /// The stretching.
    pub scaling: RopeScaling,
}

impl Rope {
    /// Radians that each of the `head_dim / 2` pairs turns per token.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let plain = (0..head_dim / 2).map(|i| (self.base as f64).powf(-2.0 * i as f64 / head_dim as f64));
        let stretched: Vec<f64> = match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|f| f / *factor as f64).collect(),
            RopeScaling::Factors(factors) => plain.zip(factors).map(|(f, &d)| f / d as f64).collect(),
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let (low, high) = (low_freq_factor as f64, high_freq_factor as f64);
                plain
                    .map(|f| {
                        let turns = original_context as f64 * f / std::f64::consts::TAU;
                        let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                        (1.0 - keep) * f / factor as f64 + keep * f
                    })
                    .collect()
            }
        };
        stretched.into_iter().map(|f| f as f32).collect()
    }
}

/// The rotations of a run of positions, shared by all layers.
pub(crate) struct Rotation {
    /// Cosine and sine, `[position, pair]`.
    turns: Vec<(f32, f32)>,
    pairs: RopePairs,
}

impl Rotation {
    /// Rotations for `count` tokens from position `first` on.
    pub fn new(frequencies: &[f32], pairs: RopePairs, first: usize, count: usize) -> Self {
        // The angle is formed in f64: at position 100000 an f32 product is off by up to 0.004 radians.
        let angles = (first..first + count).flat_map(|p| frequencies.iter().map(move |&f| p as f64 * f as f64));
        Rotation { turns: angles.map(|a| (a.cos() as f32, a.sin() as f32)).collect(), pairs }
    }

    /// Rotates a head of the `i`-th token of the run.
    pub fn apply(&self, i: usize, head: &mut [f32]) {
        let half = head.len() / 2;
        let turns = &self.turns[i * half..(i + 1) * half];
        match self.pairs {
            RopePairs::Interleaved => {
                for (pair, &(cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(turns) {
                    *pair = [pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos];
                }
            }
            RopePairs::HalfSplit => {
                let (low, high) = head.split_at_mut(half);
                for ((x, y), &(cos, sin)) in low.iter_mut().zip(high).zip(turns) {
                    (*x, *y) = (*x * cos - *y * sin, *x * sin + *y * cos);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Rope {
        Rope { base: 500000.0, pairs: RopePairs::HalfSplit, scaling }
    }

    #[test]
    fn plain_frequencies_fall_from_one() {
        let f = rope(RopeScaling::None).frequencies(128);
        assert_eq!(f.len(), 64);
        assert_eq!(f[0], 1.0);
        assert!((f[63] - 500000f32.powf(-126.0 / 128.0)).abs() < 1e-11);
    }

    #[test]
    fn llama3_keeps_short_wavelengths_and_divides_long_ones() {
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
        let (plain, scaled) = (rope(RopeScaling::None).frequencies(128), rope(scaling).frequencies(128));
        assert_eq!(plain[..20], scaled[..20]);
        assert!(scaled[40..].iter().zip(&plain[40..]).all(|(s, p)| (s * 8.0 / p - 1.0).abs() < 1e-6));
        // Frequency 32 of Llama 3.1, worked out by hand from the formula: 8192 tokens are 1.8437 turns.
        let turns = 8192.0 * plain[32] as f64 / std::f64::consts::TAU;
        let keep = (turns - 1.0) / 3.0;
        let expected = (1.0 - keep) * plain[32] as f64 / 8.0 + keep * plain[32] as f64;
        assert!((scaled[32] as f64 / expected - 1.0).abs() < 1e-6);
    }

    #[test]
    fn pairs_turn_by_position_times_frequency() {
        let frequencies = [1.0, 0.5];
        let turned = |pairs, i, mut head: [f32; 4]| {
            Rotation::new(&frequencies, pairs, 0, 3).apply(i, &mut head);
            head
        };
        assert_eq!(turned(RopePairs::HalfSplit, 0, [1.0, 2.0, 3.0, 4.0]), [1.0, 2.0, 3.0, 4.0]);
        let (c, s) = (2f32.cos(), 2f32.sin());
        let expected = |x: [f32; 4], y: [f32; 4]| x.iter().zip(y).all(|(x, y)| (x - y).abs() < 1e-6);
        assert!(expected(turned(RopePairs::HalfSplit, 2, [1.0, 0.0, 0.0, 0.0]), [c, 0.0, s, 0.0]));
        assert!(expected(turned(RopePairs::Interleaved, 2, [1.0, 0.0, 0.0, 0.0]), [c, s, 0.0, 0.0]));
        assert!(expected(turned(RopePairs::Interleaved, 2, [0.0, 0.0, 0.0, 1.0]), [0.0, 0.0, -1f32.sin(), 1f32.cos()]));
    }
}
