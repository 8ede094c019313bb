//! Group-affine quantisation (KIVI, arXiv 2402.02750) and attention over it.

use crate::attend::{Attended, Options, Segment, attend};
use crate::format::affine::{self, Names};
use crate::format::{Affine, Axis, Rows, bits};
use crate::{DType, Error, Result, Tensor};

/// Rounds `x` (`[..., S, D]` of f16, bf16 or f32) to group-affine codes and back; shape and dtype stay.
///
/// A group is `group_size` consecutive tokens of a channel (`axis` -2) or channels of a token (`axis` -1); the last one
/// may be short. `scale = max((max - min) / levels, eps)`, codes round half to even, product and sum are rounded
/// separately. NaN and -inf take code 0, +inf takes `levels`.
///
/// ```
/// use slimkv::{Tensor, ops::affine::kivi_group_quant_dequant};
/// let x = Tensor::from_vec(vec![0.0f32, 0.4, 1.0, 3.0], &[1, 4])?;
/// let x_hat = kivi_group_quant_dequant(&x, -1, 4, 3, 1e-8)?;
/// assert_eq!(x_hat.to_vec::<f32>()?, [0.0, 0.0, 1.0, 3.0]);
/// # Ok::<(), slimkv::Error>(())
/// ```
pub fn kivi_group_quant_dequant(x: &Tensor, axis: i64, group_size: usize, levels: u32, eps: f32) -> Result<Tensor> {
    const OP: &str = "kivi_group_quant_dequant";
    affine::round_trip(OP, x, Axis::from_index(OP, axis)?, group_size, levels, eps)
}

/// The settings of [`kivi_group_quantize`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupQuantize {
    /// -2: groups of tokens; -1: groups of channels.
    pub axis: i64,
    /// Elements of a group.
    pub group_size: usize,
    /// Bits of a code: 1, 2, 3, 4 or 8.
    pub bits: u32,
    /// Codes in 32-bit words rather than one to a byte.
    pub packed: bool,
    /// The dtype of scale and zero point: f16 or f32.
    pub param_dtype: DType,
    /// The smallest scale.
    pub eps: f32,
}

/// Codes with their parameters.
#[derive(Debug, Clone)]
pub struct Quantized {
    /// u32 `[..., S, ceil(D / EPW)]` or u8 `[..., S, D]`.
    pub codes: Tensor,
    /// `[..., ceil(S / g), D]` for groups of tokens, `[..., S, ceil(D / g)]` for groups of channels.
    pub scale: Tensor,
    /// The shape of `scale`.
    pub zero: Tensor,
}

/// Quantises `x` (`[..., S, D]` of f16, bf16 or f32). With f16 parameters the codes are computed from the parameters as
/// stored.
pub fn kivi_group_quantize(x: &Tensor, settings: GroupQuantize) -> Result<Quantized> {
    const OP: &str = "kivi_group_quantize";
    let GroupQuantize { axis, group_size, bits, packed, param_dtype, eps } = settings;
    let axis = Axis::from_index(OP, axis)?;
    let (codes, scale, zero) = affine::quantize(OP, x, axis, group_size, bits, eps, packed, param_dtype)?;
    Ok(Quantized { codes, scale, zero })
}

/// The settings of [`kivi_group_dequantize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupDequantize {
    /// -2: groups of tokens; -1: groups of channels.
    pub axis: i64,
    /// Elements of a group.
    pub group_size: usize,
    /// Bits of a code; needed when packed.
    pub bits: Option<u32>,
    /// Channels D of a row; needed when packed.
    pub original_length: Option<usize>,
}

/// Decodes codes (u8 `[..., S, D]` or packed u32 `[..., S, ceil(D / EPW)]`) to f16 `[..., S, D]`.
pub fn kivi_group_dequantize(
    codes: &Tensor,
    scale: &Tensor,
    zero: &Tensor,
    settings: GroupDequantize,
) -> Result<Tensor> {
    const OP: &str = "kivi_group_dequantize";
    let axis = Axis::from_index(OP, settings.axis)?;
    let (bits, head_dim) = match codes.dtype() {
        DType::U32 => (
            needed(OP, "bits", settings.bits, "1, 2, 3, 4 or 8 for packed codes")?,
            needed(OP, "original_length", settings.original_length, "the number of channels, for packed codes")?,
        ),
        _ => {
            let width = codes.shape().last().copied().unwrap_or(0);
            if let Some(length) = settings.original_length.filter(|&l| l != width) {
                return Err(Error::value(OP, "original_length", format!("{width}, the codes of a row"), length));
            }
            (settings.bits.unwrap_or(8), width)
        }
    };
    affine::dequantize(OP, codes, scale, zero, axis, settings.group_size, bits, head_dim)
}

/// The arguments of [`scalar_fused_decode_attend`].
#[derive(Debug, Clone, Copy)]
pub struct ScalarFusedDecodeAttend<'a> {
    /// Queries `[B, Hq, Sq, D]` of f16, bf16 or f32.
    pub q: &'a Tensor,
    /// Key codes, u8 `[B, Hkv, S, D]` or packed u32 `[B, Hkv, S, W]`.
    pub k_codes: &'a Tensor,
    /// Key scales `[B, Hkv, ceil(S / g), D]`, f16 or f32.
    pub k_scale: &'a Tensor,
    /// Key zero points, like the scales.
    pub k_zero: &'a Tensor,
    /// Value codes, u8 or packed u32; independent of the keys.
    pub v_codes: &'a Tensor,
    /// Value scales `[B, Hkv, S, ceil(D / g)]`, f16 or f32.
    pub v_scale: &'a Tensor,
    /// Value zero points, like the scales.
    pub v_zero: &'a Tensor,
    /// Tokens (keys) or channels (values) of a group.
    pub group_size: usize,
    /// Bits of a key code; needed when packed.
    pub k_bits: Option<u32>,
    /// Bits of a value code; needed when packed.
    pub v_bits: Option<u32>,
    /// Factor of every score; default `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// Whether a query sees only tokens up to its own; the queries are the last `Sq` tokens.
    pub causal: bool,
    /// A tuning hint of other implementations. It never changes a result, and is not needed here.
    pub nsg: Option<u32>,
}

/// Attention straight from group-affine keys and values: `out` f16 `[B, Hq, Sq, D]`, `lse` f32 `[B, Hq, Sq]`.
pub fn scalar_fused_decode_attend(args: ScalarFusedDecodeAttend<'_>) -> Result<Attended> {
    const OP: &str = "scalar_fused_decode_attend";
    if args.nsg == Some(0) {
        return Err(Error::value(OP, "nsg", "at least 1", 0));
    }
    let &[_, _, s_q, head_dim] = args.q.shape() else {
        return Err(Error::shape(OP, "q", "[B, Hq, Sq, D]", args.q.shape()));
    };
    let width = |codes: &Tensor, arg, bits: Option<u32>| match codes.dtype() {
        DType::U32 => needed(OP, arg, bits, "1, 2, 3, 4 or 8 for packed codes"),
        _ => bits.map_or(Ok(8), |bits| bits::check_width(OP, arg, bits).map(|()| bits)),
    };
    let keys = Affine::new(
        Names { op: OP, codes: "k_codes", scale: "k_scale", zero: "k_zero", bits: "k_bits" },
        args.k_codes.clone(),
        args.k_scale.clone(),
        args.k_zero.clone(),
        width(args.k_codes, "k_bits", args.k_bits)?,
        args.group_size,
        Axis::Tokens,
        head_dim,
    )?;
    let values = Affine::new(
        Names { op: OP, codes: "v_codes", scale: "v_scale", zero: "v_zero", bits: "v_bits" },
        args.v_codes.clone(),
        args.v_scale.clone(),
        args.v_zero.clone(),
        width(args.v_codes, "v_bits", args.v_bits)?,
        args.group_size,
        Axis::Channels,
        head_dim,
    )?;
    let segment = Segment::full(Rows::Affine(keys), Rows::Affine(values), s_q);
    let scale = args.scale.unwrap_or(1.0 / (head_dim as f32).sqrt());
    let options = Options { scale, causal: args.causal, window: 0, out_dtype: DType::F16 };
    attend(OP, args.q, &[segment], options)
}

fn needed<T>(op: &'static str, arg: &'static str, value: Option<T>, expected: &str) -> Result<T> {
    value.ok_or_else(|| Error::Missing { op, arg, expected: expected.into() })
}
