//! Spreading packed codes to bytes: for any width and order one byte permutation, one multi-shift and one mask.

use std::arch::x86_64::*;

use crate::format::affine::bits::codes_per_word;

/// Where the codes of a row go in the registers that it is spread to, four codes (a dword) at a time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Code `64 j + i` to byte `i` of register `j`.
    Channels,
    /// Dword `i` of 128-bit lane `l` holds codes `16 i + 4 l` to `16 i + 4 l + 3`: interleaving the bytes of four such rows
    /// gives four registers of sixteen consecutive channels.
    Interleaved,
}

/// How one register is filled.
#[repr(C, align(64))]
struct Chunk {
    bytes: [u8; 64],
    shifts: [u8; 64],
    /// The first byte of the row that it needs.
    first: usize,
    /// Which of the 64 bytes from there on are the row's.
    readable: u64,
    load: Load,
}

/// How much of a register a load fills.
#[derive(Clone, Copy)]
enum Load {
    Full,
    Half,
    Quarter,
}

/// How rows of one width and head dimension are spread.
pub(super) struct Spread {
    chunks: Vec<Chunk>,
    mask: u8,
}

impl Spread {
    /// Rows of `head_dim` codes in `row_bytes` bytes.
    pub fn new(bits: u32, head_dim: usize, row_bytes: usize, order: Order) -> Self {
        let bits = bits as usize;
        let per_word = codes_per_word(bits as u32);
        let bit = |code: usize| code / per_word * 32 + code % per_word * bits;
        let chunks = (0..head_dim.div_ceil(64))
            .map(|chunk| {
                let (start, end) = (bit(64 * chunk) / 8, bit((64 * chunk + 63).min(head_dim - 1)) / 8 + 1);
                // From the line of a row that begins on one, if that holds all: a load across two lines costs two.
                let first = if end - start / 64 * 64 <= 64 { start / 64 * 64 } else { start / 4 * 4 };
                let (mut bytes, mut shifts) = ([0; 64], [0; 64]);
                for dword in 0..16 {
                    let code = 64 * chunk
                        + match order {
                            Order::Channels => 4 * dword,
                            Order::Interleaved => 16 * (dword % 4) + 4 * (dword / 4),
                        };
                    // Four codes of at most eight bits, padding between words included, lie within four bytes.
                    let byte = bit(code) / 8;
                    for i in 0..4 {
                        bytes[4 * dword + i] = ((byte + i - first) % 64) as u8;
                        shifts[4 * dword + i] = (dword % 2 * 32 + bit(code + i) - 8 * byte) as u8;
                    }
                }
                let left = row_bytes.saturating_sub(first).min(64);
                let readable = if left == 64 { u64::MAX } else { (1 << left) - 1 };
                let load = match end - first {
                    0..=16 => Load::Quarter,
                    17..=32 => Load::Half,
                    _ => Load::Full,
                };
                Chunk { bytes, shifts, first, readable, load }
            })
            .collect();
        Spread { chunks, mask: ((1u32 << bits) - 1) as u8 }
    }

    /// Registers that a row is spread to.
    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// The spreader of register `j`, with its tables in registers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
    pub fn chunk(&self, j: usize) -> Spreader {
        let chunk = &self.chunks[j];
        // SAFETY: both tables are 64 bytes.
        let (bytes, shifts) = unsafe {
            (_mm512_load_si512(chunk.bytes.as_ptr().cast()), _mm512_load_si512(chunk.shifts.as_ptr().cast()))
        };
        Spreader {
            bytes,
            shifts,
            mask: _mm512_set1_epi8(self.mask as i8),
            first: chunk.first,
            readable: chunk.readable,
            load: chunk.load,
        }
    }
}

/// A [`Chunk`] in registers.
#[derive(Clone, Copy)]
pub(super) struct Spreader {
    bytes: __m512i,
    shifts: __m512i,
    mask: __m512i,
    first: usize,
    readable: u64,
    load: Load,
}

impl Spreader {
    /// Spreads its part of the row at `row`.
    ///
    /// # Safety
    ///
    /// `row` is a row of the width that the [`Spread`] was made for.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
    pub unsafe fn spread(&self, row: *const u8) -> __m512i {
        // SAFETY: only bytes of the row are read.
        let raw = unsafe {
            let from = row.add(self.first).cast();
            match self.load {
                Load::Full => _mm512_maskz_loadu_epi8(self.readable, from),
                Load::Half => _mm512_zextsi256_si512(_mm256_maskz_loadu_epi8(self.readable as u32, from.cast())),
                Load::Quarter => _mm512_zextsi128_si512(_mm_maskz_loadu_epi8(self.readable as u16, from.cast())),
            }
        };
        let codes = _mm512_multishift_epi64_epi8(self.shifts, _mm512_permutexvar_epi8(self.bytes, raw));
        _mm512_and_si512(codes, self.mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::format::affine::bits::{WIDTHS, pack_row, words_per_row};

    #[test]
    fn both_orders_of_every_width() {
        if Isa::Avx512.available().is_err() {
            return;
        }
        for bits in WIDTHS {
            for d in [1, 16, 63, 64, 80, 128, 200, 256] {
                let codes: Vec<u8> = (0..d).map(|i| ((i * 7 + i / 13) % (1 << bits)) as u8).collect();
                let mut words = vec![0; words_per_row(d, bits)];
                pack_row(&codes, bits, &mut words);
                for order in [Order::Channels, Order::Interleaved] {
                    let spread = Spread::new(bits, d, 4 * words.len(), order);
                    for j in 0..spread.chunks() {
                        let mut found = [0u8; 64];
                        // SAFETY: the machine has AVX-512 with VBMI, and `words` is a row of that width.
                        unsafe {
                            let x = spread.chunk(j).spread(words.as_ptr().cast());
                            _mm512_storeu_si512(found.as_mut_ptr().cast(), x);
                        }
                        for (byte, &found) in found.iter().enumerate() {
                            let code = 64 * j
                                + match order {
                                    Order::Channels => byte,
                                    Order::Interleaved => 16 * (byte / 4 % 4) + 4 * (byte / 16) + byte % 4,
                                };
                            if let Some(&expected) = codes.get(code) {
                                assert_eq!(found, expected, "{bits} bits, D {d}, code {code}");
                            }
                        }
                    }
                }
            }
        }
    }
}
