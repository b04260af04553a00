"""Forward attention in Triton, for one kind of problem.

    bfloat16, head dim 64, no mask
    BLOCK_M=128 BLOCK_N=64 HEAD_GROUP=1 HEAD_SPLIT=0 PERSISTENT=0 barrier=none mask_loop=split maxnreg=0 num_stages=3
    num_warps=4 products=as_asked row_order=descending softmax=online

Rendered by autoattn from the template triton/forward; it imports only triton and stands alone. The algorithm is
FlashAttention-2's (Dao 2023, arXiv:2307.08691): one program owns BLOCK_M rows of queries, walks the keys in blocks of
BLOCK_N and keeps a running softmax. Scores are counted in powers of two, so that exp is a single exp2. To launch:

    forward[grid(batch, heads_q, seq_q, sm_count)](*arguments in the order of SIGNATURE, **OPTIONS)

where scale_log2 = scale * log2(e), scale > 0, and lse is in natural logarithms, [batch, heads_q, seq_q].
Output and lse must be there: those of other keys, 0 and -inf where there are none. The kernel merges its own into them.
"""

import triton
import triton.language as tl

HEAD_DIM = tl.constexpr(64)
BLOCK_M = tl.constexpr(128)  # query rows a program
BLOCK_N = tl.constexpr(64)  # keys a step
HEAD_GROUP = tl.constexpr(1)  # heads next to one another in program order; 0 means all
LOWEST = tl.constexpr(-3.0e38)  # below every score, but finite: LOWEST - LOWEST is 0, not NaN

OPTIONS = {"num_warps": 4, "num_stages": 3}
SIGNATURE = {
    "query_ptr": "*bf16",
    "key_ptr": "*bf16",
    "value_ptr": "*bf16",
    "output_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "stride_lb": "i64",
    "stride_lh": "i64",
    "stride_qb": "i64",
    "stride_qh": "i64",
    "stride_qs": "i32",
    "stride_kb": "i64",
    "stride_kh": "i64",
    "stride_ks": "i32",
    "stride_vb": "i64",
    "stride_vh": "i64",
    "stride_vs": "i32",
    "stride_ob": "i64",
    "stride_oh": "i64",
    "stride_os": "i32",
    "batch_heads": "i32",
    "seq_q": "i32",
    "seq_kv": "i32",
    "heads_q": "i32",
    "group_size": "i32",
    "scale_log2": "fp32",
}
# What divides each argument: bytes for a pointer, elements for a stride.
DIVISIBLE = {
    name: 16 if name.endswith("_ptr") else 8
    for name in SIGNATURE
    if name in ("query_ptr", "key_ptr", "value_ptr", "output_ptr") or name[:8] in ("stride_q", "stride_k", "stride_v",
    "stride_o")
}


def grid(batch, heads_q, seq_q, sm_count):
    """Programs to launch."""
    tiles = batch * heads_q * triton.cdiv(seq_q, 128)
    return (tiles,)


@triton.jit
def scores_of(
    query, key_ptrs, start_n, stride_ks, o_m, end_n,
    seq_q, seq_kv, scale_log2, MASKED: tl.constexpr
):
    """Scores of a block of keys, before scaling; -inf where the mask hides the key."""
    o_n = start_n + tl.arange(0, BLOCK_N)
    # [64, BLOCK_N]
    if MASKED:
        key = tl.load(key_ptrs + start_n * stride_ks, mask=(o_n < end_n)[None, :], other=0.0)
    else:
        key = tl.load(key_ptrs + start_n * stride_ks)
    # [BLOCK_M, 64] x [64, BLOCK_N]
    scores = tl.dot(query, key)
    if MASKED:
        scores = tl.where(o_n[None, :] < seq_kv, scores, float("-inf"))
    return scores


@triton.jit
def add_values(acc, weights, value_ptrs, start_n, stride_vs, end_n, MASKED: tl.constexpr):
    """Adds a block of values, weighted."""
    # [BLOCK_N, 64]; what lies beyond end_n may be NaN, and 0 * NaN would spread
    if MASKED:
        o_n = start_n + tl.arange(0, BLOCK_N)
        value = tl.load(value_ptrs + start_n * stride_vs, mask=(o_n < end_n)[:, None], other=0.0)
    else:
        value = tl.load(value_ptrs + start_n * stride_vs)
    # [BLOCK_M, BLOCK_N] x [BLOCK_N, 64]
    acc = tl.dot(weights.to(value.dtype), value, acc)
    return acc


@triton.jit
def walk(
    acc, row_max, row_sum, query, key_ptrs, value_ptrs,
    begin_n, end_n, stride_ks, stride_vs, o_m,
    seq_q, seq_kv, scale_log2, MASKED: tl.constexpr
):
    """Folds the keys from begin_n to end_n into the rows."""
    for start_n in tl.range(begin_n, end_n, BLOCK_N):
        scores = scores_of(query, key_ptrs, start_n, stride_ks, o_m, end_n, seq_q, seq_kv, scale_log2, MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        row_max = new_max
        acc = add_values(acc, weights, value_ptrs, start_n, stride_vs, end_n, MASKED)
    return acc, row_max, row_sum


@triton.jit
def forward(
    query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr, stride_lb, stride_lh,
    stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2,
):
    """Each program computes one tile: BLOCK_M rows of one head of one sequence."""
    tile = tl.program_id(0)
    # Programs that run together share a group of heads, whose keys then stay in the L2.
    row_tiles = tl.cdiv(seq_q, BLOCK_M)
    group = HEAD_GROUP if HEAD_GROUP > 0 else batch_heads
    first_head = tile // (group * row_tiles) * group
    members = tl.minimum(group, batch_heads - first_head)
    place = tile % (group * row_tiles)
    row_tile = row_tiles - 1 - place // members  # the longest rows start first
    i_bh = first_head + place % members
    start_m = row_tile * BLOCK_M
    i_b = (i_bh // heads_q).to(tl.int64)
    i_h = i_bh % heads_q
    i_kv = (i_h // group_size).to(tl.int64)

    o_m = start_m + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, 64)
    query_ptr += i_b * stride_qb + i_h.to(tl.int64) * stride_qh
    key_ptr += i_b * stride_kb + i_kv * stride_kh
    value_ptr += i_b * stride_vb + i_kv * stride_vh
    key_ptrs = key_ptr + o_n[None, :] * stride_ks + o_d[:, None]
    value_ptrs = value_ptr + o_n[:, None] * stride_vs + o_d[None, :]
    # [BLOCK_M, 64]
    m_q = (o_m < seq_q)[:, None]
    query = tl.load(query_ptr + o_m[:, None] * stride_qs + o_d[None, :], mask=m_q, other=0.0)

    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 64], tl.float32)
    begin_n = 0
    end_n = seq_kv
    inner_end = seq_kv // BLOCK_N * BLOCK_N
    acc, row_max, row_sum = walk(
        acc, row_max, row_sum, query, key_ptrs, value_ptrs,
        begin_n, inner_end, stride_ks, stride_vs, o_m,
        seq_q, seq_kv, scale_log2, False
    )
    acc, row_max, row_sum = walk(
        acc, row_max, row_sum, query, key_ptrs, value_ptrs,
        inner_end, end_n, stride_ks, stride_vs, o_m,
        seq_q, seq_kv, scale_log2, True
    )

    # A row that sees no key has sum 0: its output is 0 and its LSE -inf.
    share = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    log_sum = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(row_sum)) * 0.6931471805599453)
    # Output and LSE of other keys are there; a row that sees no key leaves them as they are.
    m_m = (o_m < seq_q) & (log_sum != float("-inf"))
    lse_ptrs = lse_ptr + i_b * stride_lb + i_h.to(tl.int64) * stride_lh + o_m
    before_lse = tl.load(lse_ptrs, mask=m_m, other=float("-inf"))
    top = tl.where(m_m, tl.maximum(before_lse, log_sum), 0.0)
    before_weight = tl.exp2((before_lse - top) * 1.4426950408889634)
    own_weight = tl.exp2((log_sum - top) * 1.4426950408889634)
    total = before_weight + own_weight
    share *= own_weight / total
    kept = before_weight / total
    output_ptr += i_b * stride_ob + i_h.to(tl.int64) * stride_oh
    # [BLOCK_M, 64]; an output of no key is left out, whatever it is
    output_ptrs = output_ptr + o_m[:, None] * stride_os + o_d[None, :]
    m_b = (m_m & (before_weight > 0.0))[:, None]
    before = tl.load(output_ptrs, mask=m_b, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads have read what was there
    m_o = m_m[:, None]
    acc = acc * share[:, None] + before * kept[:, None]
    tl.store(output_ptrs, acc.to(output_ptr.dtype.element_ty), mask=m_o)
    tl.store(lse_ptrs, top + tl.log2(total) * 0.6931471805599453, mask=m_m)
