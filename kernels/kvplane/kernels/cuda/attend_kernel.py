"""Attention of one item of a work list: some packed query rows against one split of the keys of a sequence.

FlashAttention's online softmax (Dao et al., 2022) over a fixed split of the keys (Flash-Decoding). The query heads of a
KV head are packed into rows, so that K and V are read once; decode and prefill differ in the number of rows only.
"""

# pyright: reportInvalidTypeForm=false, reportIndexIssue=false
import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
ITEM_COLUMNS: tl.constexpr = tl.constexpr(8)
TOKEN_COLUMNS: tl.constexpr = tl.constexpr(6)


@triton.jit
def load_segments(segments):
    """Rows 1 to 3 of `segments` int64 [MAX_SEGMENTS, 2]: first block (beyond all blocks where there is no segment) and
    how many elements its base is from where one segment would put it. Row 0 is not looked at."""
    first_1 = tl.load(segments + 2)
    first_2 = tl.load(segments + 4)
    first_3 = tl.load(segments + 6)
    shift_1 = tl.load(segments + 3)
    shift_2 = tl.load(segments + 5)
    shift_3 = tl.load(segments + 7)
    return first_1, first_2, first_3, shift_1, shift_2, shift_3


@triton.jit
def segment_shift(block, found):
    """Elements to add to a block's offset. Loads nothing, so that a loop around it can be pipelined."""
    first_1, first_2, first_3, shift_1, shift_2, shift_3 = found
    late = tl.where(block >= first_3, shift_3, shift_2)
    early = tl.where(block >= first_1, shift_1, 0)
    return tl.where(block >= first_2, late, early)


@triton.jit(
    do_not_specialize=[
        "table_stride",
        "lse_token",
        "lse_head",
        "group",
        "heads",
        "block_shift",
    ],
    do_not_specialize_on_alignment=["lse"],
)
def attend_items(
    query,
    keys,
    values,
    out,
    lse,
    partial_out,  # float32 [partials, heads, HEAD_DIM]
    partial_lse,  # float32 [partials, heads]
    items,  # int32 [items, 8]: first packed row, rows, table, begin, end, split
    members,  # int32: token of a member
    tokens,  # int32 [tokens, 6], see work_list.py
    tables,  # int32 [sequences, table_stride]
    key_segments,  # int64 [MAX_SEGMENTS, 2]
    value_segments,
    key_scales,  # float32 [kv heads]
    value_scales,
    slopes,  # float32 [heads], ALiBi
    sinks,  # float32 [heads], -inf where there is none
    scale: tl.float32,
    soft_cap: tl.float32,
    query_token: tl.int64,
    query_head: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    key_block: tl.int64,
    key_head: tl.int64,
    key_slot: tl.int64,
    value_block: tl.int64,
    value_head: tl.int64,
    value_slot: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    table_stride: tl.int32,
    group: tl.int32,
    heads: tl.int32,
    block_shift: tl.int32,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    GENERAL: tl.constexpr,
    EXACT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (items, KV heads). Rows whose token has one split go to `out` and `lse`, others to the partials.

    GENERAL adds segments, soft cap (0: none) and ALiBi. EXACT multiplies float32 without TF32. UPCAST is for the
    interpreter, which multiplies bfloat16 as if its bit patterns were integers.
    """
    item = items + tl.program_id(0) * ITEM_COLUMNS
    num_rows = tl.load(item + 1)
    if num_rows == 0:
        return  # spare room of a captured graph
    first_row = tl.load(item)
    table = tables + tl.load(item + 2).to(tl.int64) * table_stride
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    split = tl.load(item + 5)
    kv_head = tl.program_id(1)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    lane = tl.arange(0, TILE)
    real = row < num_rows
    packed = first_row + row
    token = tl.load(members + packed // group, mask=real, other=0)
    head = kv_head * group + packed % group
    facts = tokens + token * TOKEN_COLUMNS
    low = tl.load(facts, mask=real, other=0)
    high = tl.load(facts + 1, mask=real, other=0)

    in_query = real[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = token.to(tl.int64) * query_token + head.to(tl.int64) * query_head
    q = tl.load(query + q_at[:, None] + dim[None, :], mask=in_query, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    key_scale = scale * tl.load(key_scales + kv_head)
    if GENERAL:
        key_shifts = load_segments(key_segments)
        value_shifts = load_segments(value_segments)
        cap = tl.where(soft_cap > 0, soft_cap, 1.0)
        slope = tl.load(slopes + head, mask=real, other=0.0)
        position = tl.load(facts + 5, mask=real, other=0)

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    key_base = keys + kv_head.to(tl.int64) * key_head
    value_base = values + kv_head.to(tl.int64) * value_head
    for start in range(begin, end, TILE):
        at = start + lane
        inside = at < end
        block = tl.load(table + (at >> block_shift), mask=inside, other=0).to(tl.int64)
        slot = (at & ((1 << block_shift) - 1)).to(tl.int64)
        key_at = block * key_block + slot * key_slot
        value_at = block * value_block + slot * value_slot
        if GENERAL:
            # Strides and bases are multiples of 16 elements: the compiler has to know, or it gives up wide loads.
            key_at = tl.multiple_of(key_at + segment_shift(block, key_shifts), 16)
            value_at = tl.multiple_of(value_at + segment_shift(block, value_shifts), 16)
        loaded = inside[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(key_base + key_at[:, None] + dim[None, :], mask=loaded, other=0.0).to(q.dtype)
        v = tl.load(value_base + value_at[:, None] + dim[None, :], mask=loaded, other=0.0).to(q.dtype)
        if EXACT:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * key_scale
        else:
            scores = tl.dot(q, tl.trans(k)) * key_scale
        if GENERAL:
            # tanh(x) = (1 - e) / (1 + e) with e = exp(-2 |x|), which cannot overflow
            e = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / cap))
            capped = cap * (1.0 - e) / (1.0 + e)
            scores = tl.where(soft_cap > 0, tl.where(scores < 0, -capped, capped), scores)
            scores += slope[:, None] * (at[None, :] - position[:, None]).to(tl.float32)
        seen = inside[None, :] & (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
        scores = tl.where(seen, scores * LOG2_E, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # a row that has seen no key yet must not compute -inf - -inf
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        if EXACT:
            acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None])
        top = new_top

    value_scale = tl.load(value_scales + kv_head)
    splits = tl.load(facts + 4, mask=real, other=0)
    place = split - tl.load(facts + 3, mask=real, other=0)
    mine = real & (place >= 0) & (place < splits)
    some = (total > 0) | (total != total)

    partial = mine & (splits > 1)
    inverse = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    at_partial = (tl.load(facts + 2, mask=real, other=0) + place).to(tl.int64) * heads + head
    result = acc * (inverse * value_scale)[:, None]
    in_dim = (dim < HEAD_DIM)[None, :]
    tl.store(partial_out + (at_partial * HEAD_DIM)[:, None] + dim[None, :], result, mask=partial[:, None] & in_dim)
    natural = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN_2, -float("inf"))
    tl.store(partial_lse + at_partial, natural, mask=partial)

    whole = mine & (splits == 1)
    sink = tl.load(sinks + head, mask=real, other=-float("inf")) * LOG2_E
    new_top = tl.maximum(top, sink)
    safe = tl.where(new_top == -float("inf"), 0.0, new_top)
    shrink = tl.exp2(top - safe)
    with_sink = total * shrink + tl.exp2(sink - safe)
    factor = tl.where(some, shrink / tl.where(some, with_sink, 1.0), 0.0)
    result = acc * (factor * value_scale)[:, None]
    out_at = token.to(tl.int64) * out_token + head.to(tl.int64) * out_head
    tl.store(out + out_at[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=whole[:, None] & in_dim)
    natural = tl.where(some, (safe + tl.log2(tl.where(some, with_sink, 1.0))) * LN_2, -float("inf"))
    tl.store(lse + token.to(tl.int64) * lse_token + head.to(tl.int64) * lse_head, natural, mask=whole)
