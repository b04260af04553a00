"""Forward attention in Triton, for one kind of problem.

    float8_e4m3, head dim 192, values 128, window bounded on the left and the right, mod-da0a6a97, softcap, alibi,
    sinks, dropout, bias-additive
    BLOCK_M=64 BLOCK_N=32 HEAD_GROUP=1 HEAD_SPLIT=0 PERSISTENT=1 barrier=none mask_loop=split maxnreg=0 num_stages=2
    num_warps=4 products=as_asked row_order=descending softmax=online

Rendered by autoattn from the template triton/forward; it imports only triton and stands alone. The algorithm is
FlashAttention-2's (Dao 2023, arXiv:2307.08691): one program owns BLOCK_M rows of queries, walks the keys in blocks of
BLOCK_N and keeps a running softmax. Scores are counted in powers of two, so that exp is a single exp2. To launch:

    forward[grid(batch, heads_q, seq_q, sm_count)](*arguments in the order of SIGNATURE, **OPTIONS)

where scale > 0, and lse is in natural logarithms, [batch, heads_q, seq_q].
"""

import triton
import triton.language as tl

HEAD_DIM = tl.constexpr(192)
HEAD_DIM_V = tl.constexpr(128)
BLOCK_M = tl.constexpr(64)  # query rows a program
BLOCK_N = tl.constexpr(32)  # keys a step
HEAD_GROUP = tl.constexpr(1)  # heads next to one another in program order; 0 means all
BOOST = tl.constexpr(8.0)  # weights of at most 1 become float8 as 2**8 times as much, to use more of its exponents
LOWEST = tl.constexpr(-3.0e38)  # below every score, but finite: LOWEST - LOWEST is 0, not NaN
LOG2E = tl.constexpr(1.4426950408889634)

OPTIONS = {"num_warps": 4, "num_stages": 2}
SIGNATURE = {
    "query_ptr": "*fp8e4nv",
    "key_ptr": "*fp8e4nv",
    "value_ptr": "*fp8e4nv",
    "output_ptr": "*bf16",
    "lse_ptr": "*fp32",
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
    "query_scale_ptr": "*fp32",
    "key_scale_ptr": "*fp32",
    "value_scale_ptr": "*fp32",
    "batch_heads": "i32",
    "seq_q": "i32",
    "seq_kv": "i32",
    "heads_q": "i32",
    "group_size": "i32",
    "scale": "fp32",
    "window_left": "i32",
    "softcap": "fp32",
    "slopes_ptr": "*fp32",
    "stride_sb": "i64",
    "stride_sh": "i64",
    "bias_ptr": "*bf16",
    "stride_bb": "i64",
    "stride_bh": "i64",
    "stride_bs": "i64",
    "stride_bn": "i64",
    "sinks_ptr": "*fp32",
    "seed": "i64",
    "drop_below": "i64",
    "keep_scale": "fp32",
    "score_captured0_ptr": "*fp32",
    "score_captured0_stride0": "i32",
    "score_captured0_size0": "i32",
    "score_captured0_size1": "i32",
}
# What divides each argument: bytes for a pointer, elements for a stride.
DIVISIBLE = {
    name: 16 if name.endswith("_ptr") else 16
    for name in SIGNATURE
    if name in ("query_ptr", "key_ptr", "value_ptr", "output_ptr") or name[:8] in ("stride_q", "stride_k", "stride_v",
    "stride_o")
}


def grid(batch, heads_q, seq_q, sm_count):
    """Programs to launch."""
    tiles = batch * heads_q * triton.cdiv(seq_q, 64)
    return (min(tiles, 1 * sm_count),)


@triton.jit
def remainder(left, right):
    """The remainder with the sign of `right`, as Python's."""
    rest = left % right
    return tl.where((rest != 0) & ((rest < 0) != (right < 0)), rest + right, rest)


@triton.jit
def tanh(value):
    """The hyperbolic tangent, by way of an exponential that cannot overflow into NaN."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(value * 2.885390081777927))


@triton.jit
def read_by_head(b, h, captured0_ptr, captured0_stride0, captured0_size0, captured0_size1):
    """What score_mod is passed of tensors: elements that are the same for all pairs of a head of a sequence."""
    head_value0 = tl.load(captured0_ptr + b * captured0_stride0 + h)
    return head_value0


@triton.jit
def score_mod(score, b, h, q_idx, kv_idx, head_value0):
    """The caller's change of a scaled score."""
    own_slope = head_value0
    return tl.where((remainder(q_idx, 4) == 0), (score * own_slope), score)


@triton.jit
def scores_of(
    query, key_ptrs, start_n, stride_ks, o_m, end_n,
    seq_q, seq_kv, first, last, scale, softcap, slope, shift, bias_ptr, stride_bs, stride_bn, sequence, i_h, row, seed,
    drop_below, score_head_value0, MASKED: tl.constexpr
):
    """Scores of a block of keys, in powers of two; -inf where the mask hides the key."""
    o_n = start_n + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_N]
    m_b = (o_m < seq_q)[:, None] & (o_n < seq_kv)[None, :]
    bias = tl.load(bias_ptr + o_m.to(tl.int64)[:, None] * stride_bs + o_n.to(tl.int64)[None, :] * stride_bn, mask=m_b,
        other=0)
    m_d = tl.arange(0, 256) < HEAD_DIM
    # [256, BLOCK_N]
    if MASKED:
        key = tl.load(key_ptrs + start_n * stride_ks, mask=(o_n < end_n)[None, :] & m_d[:, None], other=0.0)
    else:
        key = tl.load(key_ptrs + start_n * stride_ks, mask=m_d[:, None], other=0.0)
    # [BLOCK_M, 256] x [256, BLOCK_N]
    scores = tl.dot(query, key)
    # Indices beyond the sequence belong to nobody, and a tensor of the caller's has no element for them.
    q_idx = tl.minimum(o_m, seq_q - 1)[:, None]
    kv_idx = tl.minimum(o_n, seq_kv - 1)[None, :]
    scores = scores * scale
    scores = score_mod(scores, sequence, i_h, q_idx, kv_idx, score_head_value0)
    scores = softcap * tanh(scores / softcap)
    scores -= slope * tl.abs(o_m[:, None] + shift - o_n[None, :]).to(tl.float32)
    scores += bias.to(tl.float32)
    scores *= LOG2E
    if MASKED:
        scores = tl.where((o_n[None, :] <= o_m[:, None] + last) & (o_n[None, :] >= o_m[:, None] + first), scores,
            float("-inf"))
    return scores


@triton.jit
def add_values(acc, weights, value_ptrs, start_n, stride_vs, end_n, MASKED: tl.constexpr):
    """Adds a block of values, weighted."""
    # [BLOCK_N, 128]; what lies beyond end_n may be NaN, and 0 * NaN would spread
    if MASKED:
        o_n = start_n + tl.arange(0, BLOCK_N)
        value = tl.load(value_ptrs + start_n * stride_vs, mask=(o_n < end_n)[:, None], other=0.0)
    else:
        value = tl.load(value_ptrs + start_n * stride_vs)
    # [BLOCK_M, BLOCK_N] x [BLOCK_N, 128]
    acc = tl.dot(weights.to(value.dtype), value, acc)
    return acc


@triton.jit
def walk(
    acc, row_max, row_sum, query, key_ptrs, value_ptrs,
    begin_n, end_n, stride_ks, stride_vs, o_m,
    seq_q, seq_kv, first, last, scale, softcap, slope, shift, bias_ptr, stride_bs, stride_bn, sequence, i_h, row, seed,
    drop_below, score_head_value0, MASKED: tl.constexpr
):
    """Folds the keys from begin_n to end_n into the rows."""
    for start_n in tl.range(begin_n, end_n, BLOCK_N):
        scores = scores_of(query, key_ptrs, start_n, stride_ks, o_m, end_n, seq_q, seq_kv, first, last, scale, softcap,
            slope, shift, bias_ptr, stride_bs, stride_bn, sequence, i_h, row, seed, drop_below, score_head_value0,
            MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None] + BOOST)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        row_max = new_max
        o_n = start_n + tl.arange(0, BLOCK_N)
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        word, _, _, _ = tl.philox(seed, zero + o_n[None, :], zero + o_m[:, None], zero + row, zero)
        weights = tl.where(word.to(tl.uint32, bitcast=True).to(tl.int64) < drop_below, 0.0, weights)
        acc = add_values(acc, weights, value_ptrs, start_n, stride_vs, end_n, MASKED)
    return acc, row_max, row_sum


@triton.jit
def walk_edges(
    acc, row_max, row_sum, query, key_ptrs, value_ptrs,
    begin_n, gap_n, gap, end_n, stride_ks, stride_vs, o_m,
    seq_q, seq_kv, first, last, scale, softcap, slope, shift, bias_ptr, stride_bs, stride_bn, sequence, i_h, row, seed,
    drop_below, score_head_value0, MASKED: tl.constexpr
):
    """Folds the keys up to gap_n and behind gap_n + gap into the rows."""
    for place in tl.range(begin_n, end_n - gap, BLOCK_N):
        start_n = tl.where(place < gap_n, place, place + gap)
        scores = scores_of(query, key_ptrs, start_n, stride_ks, o_m, end_n, seq_q, seq_kv, first, last, scale, softcap,
            slope, shift, bias_ptr, stride_bs, stride_bn, sequence, i_h, row, seed, drop_below, score_head_value0,
            MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None] + BOOST)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        row_max = new_max
        o_n = start_n + tl.arange(0, BLOCK_N)
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        word, _, _, _ = tl.philox(seed, zero + o_n[None, :], zero + o_m[:, None], zero + row, zero)
        weights = tl.where(word.to(tl.uint32, bitcast=True).to(tl.int64) < drop_below, 0.0, weights)
        acc = add_values(acc, weights, value_ptrs, start_n, stride_vs, end_n, MASKED)
    return acc, row_max, row_sum


@triton.jit
def add_values_carefully(acc, weights, scores, value_ptrs, start_n, stride_vs, end_n, MASKED: tl.constexpr):
    """Adds a block of values, weighted; one that is no finite number reaches only the rows that see its key."""
    # [BLOCK_N, 128]; what lies beyond end_n may be NaN, and 0 * NaN would spread
    if MASKED:
        o_n = start_n + tl.arange(0, BLOCK_N)
        value = tl.load(value_ptrs + start_n * stride_vs, mask=(o_n < end_n)[:, None], other=0.0)
    else:
        value = tl.load(value_ptrs + start_n * stride_vs)
    number = value.to(tl.float16)
    finite = number * 0.0 == 0.0
    up = tl.where(finite | (number < 0.0), 0.0, 1.0).to(tl.float16)  # +inf and NaN
    down = tl.where(finite | (number > 0.0), 0.0, 1.0).to(tl.float16)  # -inf and NaN
    seen = tl.where(scores == float("-inf"), 0.0, 1.0).to(tl.float16)
    # [BLOCK_M, BLOCK_N] x [BLOCK_N, 128]
    acc = tl.dot(weights.to(value.dtype), tl.where(finite, number, 0.0).to(value.dtype), acc)
    acc += tl.where(tl.dot(seen, up) > 0.0, float("inf"), 0.0)
    acc += tl.where(tl.dot(seen, down) > 0.0, float("-inf"), 0.0)
    return acc


@triton.jit
def walk_again(
    acc, row_max, row_sum, query, key_ptrs, value_ptrs,
    begin_n, end_n, stride_ks, stride_vs, o_m,
    seq_q, seq_kv, first, last, scale, softcap, slope, shift, bias_ptr, stride_bs, stride_bn, sequence, i_h, row, seed,
    drop_below, score_head_value0, MASKED: tl.constexpr
):
    """Folds the keys from begin_n to end_n into the rows."""
    for start_n in tl.range(begin_n, end_n, BLOCK_N, num_stages=1):
        scores = scores_of(query, key_ptrs, start_n, stride_ks, o_m, end_n, seq_q, seq_kv, first, last, scale, softcap,
            slope, shift, bias_ptr, stride_bs, stride_bn, sequence, i_h, row, seed, drop_below, score_head_value0,
            MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None] + BOOST)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        row_max = new_max
        o_n = start_n + tl.arange(0, BLOCK_N)
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        word, _, _, _ = tl.philox(seed, zero + o_n[None, :], zero + o_m[:, None], zero + row, zero)
        weights = tl.where(word.to(tl.uint32, bitcast=True).to(tl.int64) < drop_below, 0.0, weights)
        acc = add_values_carefully(acc, weights, scores, value_ptrs, start_n, stride_vs, end_n, MASKED)
    return acc, row_max, row_sum


@triton.jit
def attend(
    tile, query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    query_scale_ptr, key_scale_ptr, value_scale_ptr,
    batch_heads, seq_q, seq_kv, heads_q, group_size, scale, window_left, softcap, slopes_ptr, stride_sb, stride_sh,
    bias_ptr, stride_bb, stride_bh, stride_bs, stride_bn, sinks_ptr, seed, drop_below, keep_scale, score_captured0_ptr,
    score_captured0_stride0, score_captured0_size0, score_captured0_size1,
):
    """One tile: BLOCK_M rows of one head of one sequence."""
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
    sequence = i_bh // heads_q
    i_kv = (i_h // group_size).to(tl.int64)
    row = sequence * heads_q + i_h

    o_m = start_m + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, 256)
    o_dv = tl.arange(0, 128)
    query_ptr += i_b * stride_qb + i_h.to(tl.int64) * stride_qh
    key_ptr += i_b * stride_kb + i_kv * stride_kh
    value_ptr += i_b * stride_vb + i_kv * stride_vh
    key_ptrs = key_ptr + o_n[None, :] * stride_ks + o_d[:, None]
    value_ptrs = value_ptr + o_n[:, None] * stride_vs + o_dv[None, :]
    # [BLOCK_M, 256]
    m_q = (o_m < seq_q)[:, None] & (o_d < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + o_m[:, None] * stride_qs + o_d[None, :], mask=m_q, other=0.0)
    scales = i_b * (heads_q // group_size) + i_kv
    scale *= tl.load(query_scale_ptr + scales) * tl.load(key_scale_ptr + scales)
    score_head_value0 = read_by_head(sequence, i_h, score_captured0_ptr, score_captured0_stride0, score_captured0_size0,
        score_captured0_size1)
    slope = tl.load(slopes_ptr + i_b * stride_sb + i_h * stride_sh)
    bias_ptr += i_b * stride_bb + i_h * stride_bh

    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 128], tl.float32)
    shift = seq_kv - seq_q  # the query at row i stands at key i + shift
    first = shift - window_left  # query i sees the keys from i + first on
    begin_n = tl.maximum(0, tl.minimum(seq_kv, start_m + first)) // BLOCK_N * BLOCK_N
    last = shift  # query i sees the keys up to i + last
    end_n = tl.maximum(0, tl.minimum(seq_kv, start_m + BLOCK_M + last))
    # All rows see the keys before inner_end, from inner_n on.
    inner_end = tl.maximum(0, tl.minimum(seq_kv, start_m + last + 1)) // BLOCK_N * BLOCK_N
    inner_n = tl.cdiv(tl.maximum(0, tl.minimum(seq_kv, start_m + BLOCK_M - 1 + first)), BLOCK_N) * BLOCK_N
    inner_end = tl.maximum(inner_n, inner_end)
    acc, row_max, row_sum = walk(
        acc, row_max, row_sum, query, key_ptrs, value_ptrs,
        inner_n, inner_end, stride_ks, stride_vs, o_m,
        seq_q, seq_kv, first, last, scale, softcap, slope, shift, bias_ptr, stride_bs, stride_bn, sequence, i_h, row,
        seed, drop_below, score_head_value0, False
    )
    acc, row_max, row_sum = walk_edges(
        acc, row_max, row_sum, query, key_ptrs, value_ptrs,
        begin_n, inner_n, inner_end - inner_n, end_n, stride_ks, stride_vs, o_m,
        seq_q, seq_kv, first, last, scale, softcap, slope, shift, bias_ptr, stride_bs, stride_bn, sequence, i_h, row,
        seed, drop_below, score_head_value0, True
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
            seq_q, seq_kv, first, last, scale, softcap, slope, shift, bias_ptr, stride_bs, stride_bn, sequence, i_h,
            row, seed, drop_below, score_head_value0, True
        )
    # The sink takes its share of the softmax and gives nothing.
    sink = tl.load(sinks_ptr + i_h) * LOG2E
    new_max = tl.maximum(row_max, sink)
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.exp2(sink - new_max + BOOST)
    acc = acc * shrink[:, None]
    row_max = new_max

    # A row that sees no key has sum 0: its output is 0 and its LSE -inf.
    share = tl.where(row_sum == 0.0, 0.0, keep_scale / row_sum)
    share *= tl.load(value_scale_ptr + scales)
    output_ptr += i_b * stride_ob + i_h.to(tl.int64) * stride_oh
    # [BLOCK_M, 128]
    m_o = (o_m < seq_q)[:, None]
    output_ptrs = output_ptr + o_m[:, None] * stride_os + o_dv[None, :]
    tl.store(output_ptrs, (acc * share[:, None]).to(output_ptr.dtype.element_ty), mask=m_o)
    log_sum = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(row_sum) - BOOST) * 0.6931471805599453)
    tl.store(lse_ptr + i_bh.to(tl.int64) * seq_q + o_m, log_sum, mask=o_m < seq_q)


@triton.jit
def forward(
    query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    query_scale_ptr, key_scale_ptr, value_scale_ptr,
    batch_heads, seq_q, seq_kv, heads_q, group_size, scale, window_left, softcap, slopes_ptr, stride_sb, stride_sh,
    bias_ptr, stride_bb, stride_bh, stride_bs, stride_bn, sinks_ptr, seed, drop_below, keep_scale, score_captured0_ptr,
    score_captured0_stride0, score_captured0_size0, score_captured0_size1,
):
    """Each program computes one tile after another."""
    tiles = tl.cdiv(seq_q, BLOCK_M) * batch_heads
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        attend(
            tile, query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr,
            stride_qb, stride_qh, stride_qs,
            stride_kb, stride_kh, stride_ks,
            stride_vb, stride_vh, stride_vs,
            stride_ob, stride_oh, stride_os,
            query_scale_ptr, key_scale_ptr, value_scale_ptr,
            batch_heads, seq_q, seq_kv, heads_q, group_size, scale, window_left, softcap, slopes_ptr, stride_sb,
            stride_sh, bias_ptr, stride_bb, stride_bh, stride_bs, stride_bn, sinks_ptr, seed, drop_below, keep_scale,
            score_captured0_ptr, score_captured0_stride0, score_captured0_size0, score_captured0_size1,
        )
