"""Forward attention in Triton, for one kind of problem.

    float16, head dim 64, a table of blocks of 128 by 128
    BLOCK_M=128 BLOCK_N=64 HEAD_GROUP=1 HEAD_SPLIT=0 PERSISTENT=0 barrier=none mask_loop=split maxnreg=0 num_stages=3
    num_warps=4 products=as_asked row_order=descending softmax=first_max

Rendered by autoattn from the template triton/forward; it imports only triton and stands alone. The algorithm is
FlashAttention-2's (Dao 2023, arXiv:2307.08691): one program owns BLOCK_M rows of queries, walks the keys in blocks of
BLOCK_N and keeps a running softmax. Scores are counted in powers of two, so that exp is a single exp2. To launch:

    forward[grid(batch, heads_q, seq_q, sm_count)](*arguments in the order of SIGNATURE, **OPTIONS)

where scale_log2 = scale * log2(e), scale > 0.
"""

import triton
import triton.language as tl

HEAD_DIM = tl.constexpr(64)
BLOCK_M = tl.constexpr(128)  # query rows a program
BLOCK_N = tl.constexpr(64)  # keys a step
HEAD_GROUP = tl.constexpr(1)  # heads next to one another in program order; 0 means all
SPARSE_Q = tl.constexpr(128)  # queries of a block of the table
SPARSE_KV = tl.constexpr(128)  # keys of a block of the table
STEPS = tl.constexpr(2)  # steps through a block
LOWEST = tl.constexpr(-3.0e38)  # below every score, but finite: LOWEST - LOWEST is 0, not NaN

OPTIONS = {"num_warps": 4, "num_stages": 3}
SIGNATURE = {
    "query_ptr": "*fp16",
    "key_ptr": "*fp16",
    "value_ptr": "*fp16",
    "output_ptr": "*fp16",
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
    "full_counts_ptr": "*i32",
    "full_blocks_ptr": "*i32",
    "partial_counts_ptr": "*i32",
    "partial_blocks_ptr": "*i32",
    "stride_tb": "i32",
    "stride_th": "i32",
    "full_width": "i32",
    "partial_width": "i32",
    "mask_captured0_ptr": "*i32",
    "mask_captured0_size0": "i32",
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
def mask_mod(b, h, q_idx, kv_idx, captured0_ptr, captured0_size0):
    """Which pairs of a partial block the caller keeps."""
    return (tl.load(captured0_ptr + q_idx) == tl.load(captured0_ptr + kv_idx))


@triton.jit
def scores_of(
    query, key_ptrs, start_n, stride_ks, o_m, end_n,
    seq_q, seq_kv, scale_log2, sequence, i_h, mask_captured0_ptr, mask_captured0_size0, MASKED: tl.constexpr
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
    # Indices beyond the sequence belong to nobody, and a tensor of the caller's has no element for them.
    q_idx = tl.minimum(o_m, seq_q - 1)[:, None]
    kv_idx = tl.minimum(o_n, seq_kv - 1)[None, :]
    if MASKED:
        kept = mask_mod(sequence, i_h, q_idx, kv_idx, mask_captured0_ptr, mask_captured0_size0)
        scores = tl.where((o_n[None, :] < seq_kv) & kept, scores, float("-inf"))
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
    blocks_ptr, count, end_n, stride_ks, stride_vs, o_m,
    seq_q, seq_kv, scale_log2, sequence, i_h, mask_captured0_ptr, mask_captured0_size0, MASKED: tl.constexpr
):
    """Folds the keys of `count` blocks of the table into the rows, around the maximum that they came with."""
    # The block's number is read a step ahead, so that keys and values are asked for without waiting for it.
    next_n = tl.load(blocks_ptr) * SPARSE_KV
    for place in tl.range(0, count * STEPS):
        start_n = next_n
        block = (place + 1) // STEPS
        next_n = tl.load(blocks_ptr + tl.minimum(block, count - 1)) * SPARSE_KV + (place + 1 - block * STEPS) * BLOCK_N
        scores = scores_of(query, key_ptrs, start_n, stride_ks, o_m, end_n, seq_q, seq_kv, scale_log2, sequence, i_h,
            mask_captured0_ptr, mask_captured0_size0, MASKED)
        weights = tl.exp2(scores * scale_log2 - row_max[:, None])
        row_sum += tl.sum(weights, 1)
        acc = add_values(acc, weights, value_ptrs, start_n, stride_vs, end_n, MASKED)
    return acc, row_max, row_sum


@triton.jit
def add_values_carefully(acc, weights, scores, value_ptrs, start_n, stride_vs, end_n, MASKED: tl.constexpr):
    """Adds a block of values, weighted; one that is no finite number reaches only the rows that see its key."""
    # [BLOCK_N, 64]; what lies beyond end_n may be NaN, and 0 * NaN would spread
    if MASKED:
        o_n = start_n + tl.arange(0, BLOCK_N)
        value = tl.load(value_ptrs + start_n * stride_vs, mask=(o_n < end_n)[:, None], other=0.0)
    else:
        value = tl.load(value_ptrs + start_n * stride_vs)
    finite = value * 0.0 == 0.0
    up = tl.where(finite | (value < 0.0), 0.0, 1.0).to(tl.float16)  # +inf and NaN
    down = tl.where(finite | (value > 0.0), 0.0, 1.0).to(tl.float16)  # -inf and NaN
    seen = tl.where(scores == float("-inf"), 0.0, 1.0).to(tl.float16)
    # [BLOCK_M, BLOCK_N] x [BLOCK_N, 64]
    acc = tl.dot(weights.to(value.dtype), tl.where(finite, value, 0.0), acc)
    acc += tl.where(tl.dot(seen, up) > 0.0, float("inf"), 0.0)
    acc += tl.where(tl.dot(seen, down) > 0.0, float("-inf"), 0.0)
    return acc


@triton.jit
def walk_again(
    acc, row_max, row_sum, query, key_ptrs, value_ptrs,
    blocks_ptr, count, end_n, stride_ks, stride_vs, o_m,
    seq_q, seq_kv, scale_log2, sequence, i_h, mask_captured0_ptr, mask_captured0_size0, MASKED: tl.constexpr
):
    """Folds the keys of `count` blocks of the table into the rows."""
    # The block's number is read a step ahead, so that keys and values are asked for without waiting for it.
    next_n = tl.load(blocks_ptr) * SPARSE_KV
    for place in tl.range(0, count * STEPS, num_stages=1):
        start_n = next_n
        block = (place + 1) // STEPS
        next_n = tl.load(blocks_ptr + tl.minimum(block, count - 1)) * SPARSE_KV + (place + 1 - block * STEPS) * BLOCK_N
        scores = scores_of(query, key_ptrs, start_n, stride_ks, o_m, end_n, seq_q, seq_kv, scale_log2, sequence, i_h,
            mask_captured0_ptr, mask_captured0_size0, MASKED)
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
    query_ptr, key_ptr, value_ptr, output_ptr,
    stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2,
    full_counts_ptr, full_blocks_ptr, partial_counts_ptr, partial_blocks_ptr, stride_tb, stride_th, full_width,
    partial_width, mask_captured0_ptr, mask_captured0_size0,
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
    sequence = i_bh // heads_q
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
    end_n = seq_kv
    table_row = i_b * stride_tb + i_h * stride_th + start_m // SPARSE_Q
    full_blocks_ptr += table_row * full_width
    partial_blocks_ptr += table_row * partial_width
    full = tl.load(full_counts_ptr + table_row)
    partial = tl.load(partial_counts_ptr + table_row)
    # The maximum of the first listed block stands for the row's; of a block that is not listed it could be too large.
    anchor_n = tl.where(full > 0, tl.load(full_blocks_ptr), tl.load(partial_blocks_ptr)) * SPARSE_KV
    anchor = scores_of(query, key_ptrs, anchor_n, stride_ks, o_m, end_n, seq_q, seq_kv, scale_log2, sequence, i_h,
        mask_captured0_ptr, mask_captured0_size0, True)
    anchor = tl.where(full + partial > 0, anchor, float("-inf"))
    row_max = tl.maximum(row_max, tl.max(anchor, 1) * scale_log2)
    acc, row_max, row_sum = walk(
        acc, row_max, row_sum, query, key_ptrs, value_ptrs,
        full_blocks_ptr, full, end_n, stride_ks, stride_vs, o_m,
        seq_q, seq_kv, scale_log2, sequence, i_h, mask_captured0_ptr, mask_captured0_size0, False
    )
    acc, row_max, row_sum = walk(
        acc, row_max, row_sum, query, key_ptrs, value_ptrs,
        partial_blocks_ptr, partial, end_n, stride_ks, stride_vs, o_m,
        seq_q, seq_kv, scale_log2, sequence, i_h, mask_captured0_ptr, mask_captured0_size0, True
    )
    # Weights too far above 1 overflow to inf or NaN, times 0 either is NaN: such a tile is computed anew, and so is one
    # with a value that is no finite number, which may have met a weight of 0.
    spoilt = row_sum * 0.0
    spoilt += tl.sum(acc * 0.0, 1)
    if tl.max(tl.where(spoilt == 0.0, 0, 1)) > 0:
        row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, 64], tl.float32)
        acc, row_max, row_sum = walk_again(
            acc, row_max, row_sum, query, key_ptrs, value_ptrs,
            full_blocks_ptr, full, end_n, stride_ks, stride_vs, o_m,
            seq_q, seq_kv, scale_log2, sequence, i_h, mask_captured0_ptr, mask_captured0_size0, False
        )
        acc, row_max, row_sum = walk_again(
            acc, row_max, row_sum, query, key_ptrs, value_ptrs,
            partial_blocks_ptr, partial, end_n, stride_ks, stride_vs, o_m,
            seq_q, seq_kv, scale_log2, sequence, i_h, mask_captured0_ptr, mask_captured0_size0, True
        )

    # A row that sees no key has sum 0: its output is 0.
    share = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    output_ptr += i_b * stride_ob + i_h.to(tl.int64) * stride_oh
    # [BLOCK_M, 64]
    m_o = (o_m < seq_q)[:, None]
    output_ptrs = output_ptr + o_m[:, None] * stride_os + o_d[None, :]
    tl.store(output_ptrs, (acc * share[:, None]).to(output_ptr.dtype.element_ty), mask=m_o)
