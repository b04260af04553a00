"""Forward attention in Triton, for one kind of problem.

    float32 (ieee products), head dim 111, causal (top-left)
    BLOCK_M=32 BLOCK_N=16 HEAD_GROUP=1 HEAD_SPLIT=0 PERSISTENT=0 barrier=loop_end mask_loop=every maxnreg=0
    num_stages=1 num_warps=4 products=as_asked row_order=ascending softmax=lazy

Rendered by autoattn from the template triton/forward; it imports only triton and stands alone. The algorithm is
FlashAttention-2's (Dao 2023, arXiv:2307.08691): one program owns BLOCK_M rows of queries, walks the keys in blocks of
BLOCK_N and keeps a running softmax. Scores are counted in powers of two, so that exp is a single exp2. To launch:

    forward[grid(batch, heads_q, seq_q, sm_count)](*arguments in the order of SIGNATURE, **OPTIONS)

where scale_log2 = scale * log2(e), scale > 0, and lse is in natural logarithms, [batch, heads_q, seq_q].
"""

import triton
import triton.language as tl

HEAD_DIM = tl.constexpr(111)
BLOCK_M = tl.constexpr(32)  # query rows a program
BLOCK_N = tl.constexpr(16)  # keys a step
HEAD_GROUP = tl.constexpr(1)  # heads next to one another in program order; 0 means all
GROWTH = tl.constexpr(8.0)  # a row's maximum may grow by 2**8 before everything is rescaled to it
LOWEST = tl.constexpr(-3.0e38)  # below every score, but finite: LOWEST - LOWEST is 0, not NaN

OPTIONS = {"num_warps": 4, "num_stages": 1}
SIGNATURE = {
    "query_ptr": "*fp32",
    "key_ptr": "*fp32",
    "value_ptr": "*fp32",
    "output_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "stride_qb": "i64",
    "stride_qh": "i64",
    "stride_qs": "i64",
    "stride_qd": "i64",
    "stride_kb": "i64",
    "stride_kh": "i64",
    "stride_ks": "i64",
    "stride_kd": "i64",
    "stride_vb": "i64",
    "stride_vh": "i64",
    "stride_vs": "i64",
    "stride_vd": "i64",
    "stride_ob": "i64",
    "stride_oh": "i64",
    "stride_os": "i64",
    "stride_od": "i64",
    "batch_heads": "i32",
    "seq_q": "i32",
    "seq_kv": "i32",
    "heads_q": "i32",
    "group_size": "i32",
    "scale_log2": "fp32",
}
DIVISIBLE = {}


def grid(batch, heads_q, seq_q, sm_count):
    """Programs to launch."""
    tiles = batch * heads_q * triton.cdiv(seq_q, 32)
    return (tiles,)


@triton.jit
def scores_of(
    query, key_ptrs, start_n, stride_ks, o_m, end_n,
    seq_q, seq_kv, last, scale_log2, MASKED: tl.constexpr
):
    """Scores of a block of keys, before scaling; -inf where the mask hides the key."""
    o_n = start_n + tl.arange(0, BLOCK_N)
    m_d = tl.arange(0, 128) < HEAD_DIM
    # [128, BLOCK_N]
    if MASKED:
        key = tl.load(key_ptrs + start_n * stride_ks, mask=(o_n < end_n)[None, :] & m_d[:, None], other=0.0)
    else:
        key = tl.load(key_ptrs + start_n * stride_ks, mask=m_d[:, None], other=0.0)
    # [BLOCK_M, 128] x [128, BLOCK_N]
    scores = tl.dot(query, key, input_precision="ieee")
    if MASKED:
        scores = tl.where((o_n[None, :] <= o_m[:, None] + last) & (o_n[None, :] < seq_kv), scores, float("-inf"))
    return scores


@triton.jit
def add_values(acc, weights, value_ptrs, start_n, stride_vs, end_n, MASKED: tl.constexpr):
    """Adds a block of values, weighted."""
    m_d = tl.arange(0, 128) < HEAD_DIM
    # [BLOCK_N, 128]; what lies beyond end_n may be NaN, and 0 * NaN would spread
    if MASKED:
        o_n = start_n + tl.arange(0, BLOCK_N)
        value = tl.load(value_ptrs + start_n * stride_vs, mask=(o_n < end_n)[:, None] & m_d[None, :], other=0.0)
    else:
        value = tl.load(value_ptrs + start_n * stride_vs, mask=m_d[None, :], other=0.0)
    # [BLOCK_M, BLOCK_N] x [BLOCK_N, 128]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    tl.debug_barrier()
    return acc


@triton.jit
def walk(
    acc, row_max, row_sum, query, key_ptrs, value_ptrs,
    begin_n, end_n, stride_ks, stride_vs, o_m,
    seq_q, seq_kv, last, scale_log2, MASKED: tl.constexpr
):
    """Folds the keys from begin_n to end_n into the rows, rescaling only when some maximum grew."""
    for start_n in tl.range(begin_n, end_n, BLOCK_N):
        scores = scores_of(query, key_ptrs, start_n, stride_ks, o_m, end_n, seq_q, seq_kv, last, scale_log2, MASKED)
        block_max = tl.max(scores, 1) * scale_log2
        if tl.max(block_max - row_max) > GROWTH:
            new_max = tl.maximum(row_max, block_max)
            shrink = tl.exp2(row_max - new_max)
            row_sum = row_sum * shrink
            acc = acc * shrink[:, None]
            row_max = new_max
        weights = tl.exp2(scores * scale_log2 - row_max[:, None])
        row_sum += tl.sum(weights, 1)
        acc = add_values(acc, weights, value_ptrs, start_n, stride_vs, end_n, MASKED)
    return acc, row_max, row_sum


@triton.jit
def add_values_carefully(acc, weights, scores, value_ptrs, start_n, stride_vs, end_n, MASKED: tl.constexpr):
    """Adds a block of values, weighted; one that is no finite number reaches only the rows that see its key."""
    m_d = tl.arange(0, 128) < HEAD_DIM
    # [BLOCK_N, 128]; what lies beyond end_n may be NaN, and 0 * NaN would spread
    if MASKED:
        o_n = start_n + tl.arange(0, BLOCK_N)
        value = tl.load(value_ptrs + start_n * stride_vs, mask=(o_n < end_n)[:, None] & m_d[None, :], other=0.0)
    else:
        value = tl.load(value_ptrs + start_n * stride_vs, mask=m_d[None, :], other=0.0)
    finite = value * 0.0 == 0.0
    up = tl.where(finite | (value < 0.0), 0.0, 1.0).to(tl.float16)  # +inf and NaN
    down = tl.where(finite | (value > 0.0), 0.0, 1.0).to(tl.float16)  # -inf and NaN
    seen = tl.where(scores == float("-inf"), 0.0, 1.0).to(tl.float16)
    # [BLOCK_M, BLOCK_N] x [BLOCK_N, 128]
    acc = tl.dot(weights.to(value.dtype), tl.where(finite, value, 0.0), acc, input_precision="ieee")
    acc += tl.where(tl.dot(seen, up) > 0.0, float("inf"), 0.0)
    acc += tl.where(tl.dot(seen, down) > 0.0, float("-inf"), 0.0)
    return acc


@triton.jit
def walk_again(
    acc, row_max, row_sum, query, key_ptrs, value_ptrs,
    begin_n, end_n, stride_ks, stride_vs, o_m,
    seq_q, seq_kv, last, scale_log2, MASKED: tl.constexpr
):
    """Folds the keys from begin_n to end_n into the rows."""
    for start_n in tl.range(begin_n, end_n, BLOCK_N, num_stages=1):
        scores = scores_of(query, key_ptrs, start_n, stride_ks, o_m, end_n, seq_q, seq_kv, last, scale_log2, MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        row_max = new_max
        acc = add_values_carefully(acc, weights, scores, value_ptrs, start_n, stride_vs, end_n, MASKED)
    return acc, row_max, row_sum


@triton.jit
def forward(
    query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_ob, stride_oh, stride_os, stride_od,
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
    row_tile = place // members
    i_bh = first_head + place % members
    start_m = row_tile * BLOCK_M
    i_b = (i_bh // heads_q).to(tl.int64)
    i_h = i_bh % heads_q
    i_kv = (i_h // group_size).to(tl.int64)

    o_m = start_m + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, 128)
    query_ptr += i_b * stride_qb + i_h.to(tl.int64) * stride_qh
    key_ptr += i_b * stride_kb + i_kv * stride_kh
    value_ptr += i_b * stride_vb + i_kv * stride_vh
    key_ptrs = key_ptr + o_n[None, :] * stride_ks + o_d[:, None] * stride_kd
    value_ptrs = value_ptr + o_n[:, None] * stride_vs + o_d[None, :] * stride_vd
    # [BLOCK_M, 128]
    m_q = (o_m < seq_q)[:, None] & (o_d < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + o_m[:, None] * stride_qs + o_d[None, :] * stride_qd, mask=m_q, other=0.0)

    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 128], tl.float32)
    shift = 0  # the query at row i stands at key i + shift
    begin_n = 0
    last = shift  # query i sees the keys up to i + last
    end_n = tl.maximum(0, tl.minimum(seq_kv, start_m + BLOCK_M + last))
    acc, row_max, row_sum = walk(
        acc, row_max, row_sum, query, key_ptrs, value_ptrs,
        begin_n, end_n, stride_ks, stride_vs, o_m,
        seq_q, seq_kv, last, scale_log2, True
    )
    # A value that is NaN or inf and met a weight of 0 spoils rows that do not see it: such a tile is computed anew.
    spoilt = row_sum * 0.0
    spoilt += tl.sum(acc * 0.0, 1)
    if tl.max(tl.where(spoilt == 0.0, 0, 1)) > 0:
        row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, 128], tl.float32)
        acc, row_max, row_sum = walk_again(
            acc, row_max, row_sum, query, key_ptrs, value_ptrs,
            begin_n, end_n, stride_ks, stride_vs, o_m,
            seq_q, seq_kv, last, scale_log2, True
        )

    # A row that sees no key has sum 0: its output is 0 and its LSE -inf.
    share = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    output_ptr += i_b * stride_ob + i_h.to(tl.int64) * stride_oh
    # [BLOCK_M, 128]
    m_o = (o_m < seq_q)[:, None] & (o_d < HEAD_DIM)[None, :]
    output_ptrs = output_ptr + o_m[:, None] * stride_os + o_d[None, :] * stride_od
    tl.store(output_ptrs, (acc * share[:, None]).to(output_ptr.dtype.element_ty), mask=m_o)
    log_sum = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(row_sum)) * 0.6931471805599453)
    tl.store(lse_ptr + i_bh.to(tl.int64) * seq_q + o_m, log_sum, mask=o_m < seq_q)
