"""From the partial results of a row's splits to its output."""

# pyright: reportInvalidTypeForm=false, reportIndexIssue=false
import triton
import triton.language as tl

from kvplane.kernels.cuda.attend_kernel import TOKEN_COLUMNS


@triton.jit(do_not_specialize=["lse_token", "lse_head", "heads"], do_not_specialize_on_alignment=["lse"])
def merge_partials(
    partial_out,  # float32 [partials, heads, head_dim]
    partial_lse,  # float32 [partials, heads]
    tokens,  # int32 [tokens, 6], see work_list.py
    sinks,  # float32 [heads], -inf where there is none
    out,
    lse,
    out_token: tl.int64,
    out_head: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    heads: tl.int32,
    head_dim: tl.int32,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (tokens, heads). Weighs partials by exp(LSE), in the order of their splits, SPLITS of them at a time.

    Tokens of one split were written by `attend_items`; those of none become zeros with LSE -inf.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    splits = tl.load(tokens + token * TOKEN_COLUMNS + 4)
    if splits == 1:
        return
    first = tl.load(tokens + token * TOKEN_COLUMNS + 2)
    dim = tl.arange(0, PADDED_DIM)
    lane = tl.arange(0, SPLITS)
    in_dim = dim < head_dim
    top = -float("inf")
    total = 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for start in range(0, splits, SPLITS):
        here = start + lane < splits
        at = (first + start + lane).to(tl.int64) * heads + head
        part = tl.load(partial_lse + at, mask=here, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(part, 0))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight = tl.exp(part - safe)
        # what has no weight may never have been written
        read = (here & (part > -float("inf")))[:, None] & in_dim[None, :]
        values = tl.load(partial_out + (at * head_dim)[:, None] + dim[None, :], mask=read, other=0.0)
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * values, 0)
        top = new_top
    some = (total > 0) | (total != total)
    sink = tl.load(sinks + head)
    new_top = tl.maximum(top, sink)
    safe = tl.where(new_top == -float("inf"), 0.0, new_top)
    shrink = tl.exp(top - safe)
    with_sink = tl.where(some, total * shrink + tl.exp(sink - safe), 1.0)
    result = acc * tl.where(some, shrink / with_sink, 0.0)
    at_out = token.to(tl.int64) * out_token + head.to(tl.int64) * out_head
    tl.store(out + at_out + dim, result.to(out.dtype.element_ty), mask=in_dim)
    natural = tl.where(some, safe + tl.log(with_sink), -float("inf"))
    tl.store(lse + token.to(tl.int64) * lse_token + head.to(tl.int64) * lse_head, natural)
