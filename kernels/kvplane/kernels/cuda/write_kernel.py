"""New keys and values to their slots; quantised on the way where the cache is."""

# pyright: reportInvalidTypeForm=false, reportIndexIssue=false
import triton
import triton.language as tl

from kvplane.kernels.cuda.attend_kernel import load_segments, segment_shift

INT8_MAX: tl.constexpr = tl.constexpr(127.0)
E4M3_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def quantised(x, scale, element_ty):
    """x / scale in the cache's format: saturated, and for int8 rounded to nearest, halves up."""
    scaled = x.to(tl.float32) / scale
    if element_ty == tl.int8:
        rounded = tl.floor(scaled + 0.5)
        result = tl.minimum(tl.maximum(rounded, -INT8_MAX), INT8_MAX)
    else:
        # both comparisons are false for NaN, which stays NaN
        result = tl.where(scaled > E4M3_MAX, E4M3_MAX, tl.where(scaled < -E4M3_MAX, -E4M3_MAX, scaled))
    return result.to(element_ty)


@triton.jit(do_not_specialize=["kv_heads", "block_shift"])
def write_slots(
    key,
    value,
    keys,
    values,
    slots,  # int64 [tokens]; negative: nowhere
    key_segments,  # int64 [MAX_SEGMENTS, 2]
    value_segments,
    key_scales,  # float32 [kv heads]
    value_scales,
    key_token: tl.int64,
    key_row: tl.int64,
    value_token: tl.int64,
    value_row: tl.int64,
    key_block: tl.int64,
    key_head: tl.int64,
    key_slot: tl.int64,
    value_block: tl.int64,
    value_head: tl.int64,
    value_slot: tl.int64,
    kv_heads: tl.int32,
    head_dim: tl.int32,
    block_shift: tl.int32,
    PADDED_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Grid (tokens, groups of HEADS KV heads)."""
    token = tl.program_id(0)
    at = tl.load(slots + token)
    if at < 0:
        return
    block = at >> block_shift
    slot = at & ((1 << block_shift) - 1)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, PADDED_DIM)
    real = (head < kv_heads)[:, None] & (dim < head_dim)[None, :]
    row = head.to(tl.int64)[:, None]
    k = tl.load(key + token.to(tl.int64) * key_token + row * key_row + dim[None, :], mask=real)
    v = tl.load(value + token.to(tl.int64) * value_token + row * value_row + dim[None, :], mask=real)
    if QUANTISED:
        k = quantised(k, tl.load(key_scales + head, mask=head < kv_heads, other=1.0)[:, None], keys.dtype.element_ty)
        v = quantised(
            v, tl.load(value_scales + head, mask=head < kv_heads, other=1.0)[:, None], values.dtype.element_ty
        )
    key_at = block * key_block + slot * key_slot
    value_at = block * value_block + slot * value_slot
    key_at = tl.multiple_of(key_at + segment_shift(block, load_segments(key_segments)), 16)
    value_at = tl.multiple_of(value_at + segment_shift(block, load_segments(value_segments)), 16)
    tl.store(keys + key_at + row * key_head + dim[None, :], k, mask=real)
    tl.store(values + value_at + row * value_head + dim[None, :], v, mask=real)
