"""Forward attention in Triton, for one kind of problem.

    bfloat16, head dim 64, no mask
    BLOCK_M=16 BLOCK_N=128 HEAD_GROUP=1 HEAD_SPLIT=0 PACK_GQA=1 PERSISTENT=0 SPLITS=64 barrier=none mask_loop=branch
    maxnreg=0 num_stages=3 num_warps=4 parts_read=by_rows products=as_asked row_order=descending softmax=online

Rendered by autoattn from the template triton/forward; it imports only triton and stands alone. The algorithm is
FlashAttention-2's (Dao 2023, arXiv:2307.08691): one program owns BLOCK_M rows of queries, walks the keys in blocks of
BLOCK_N and keeps a running softmax. Scores are counted in powers of two, so that exp is a single exp2. To launch:

    forward[grid(batch, heads_q, seq_q, sm_count)](*arguments in the order of SIGNATURE, **OPTIONS)

for which heads_q counts the heads of the keys, and seq_q each query once for each head that shares a key.
where scale_log2 = scale * log2(e), scale > 0.
"""

import triton
import triton.language as tl

HEAD_DIM = tl.constexpr(64)
BLOCK_M = tl.constexpr(16)  # query rows a program
BLOCK_N = tl.constexpr(128)  # keys a step
SPLITS = tl.constexpr(64)  # programs that share the keys of a tile, at most
ROWS = tl.constexpr(4)  # rows of a tile whose parts are asked for at once
PACK_GQA = True  # the rows of a tile are queries of all heads that share a key
HEAD_GROUP = tl.constexpr(1)  # heads next to one another in program order; 0 means all
LOWEST = tl.constexpr(-3.0e38)  # below every score, but finite: LOWEST - LOWEST is 0, not NaN

OPTIONS = {"num_warps": 4, "num_stages": 3}
SIGNATURE = {
    "query_ptr": "*bf16",
    "key_ptr": "*bf16",
    "value_ptr": "*bf16",
    "output_ptr": "*bf16",
    "arrivals_ptr": "*i32",
    "partial_ptr": "*fp32",
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
DIVISIBLE["partial_ptr"] = 16


def grid(batch, heads_q, seq_q, sm_count):
    """Programs to launch."""
    tiles = batch * heads_q * triton.cdiv(seq_q, 16)
    return (tiles * 64,)


def arrivals(batch, heads_q, seq_q):
    """Zeros that a launch needs room for, and leaves as zeros: for each tile, how many of its programs are done."""
    tiles = batch * heads_q * triton.cdiv(seq_q, 16)
    return tiles


def partials(batch, heads_q, seq_q):
    """Numbers of float32 that a launch needs room for: a program's outputs, and each row's maximum and sum."""
    tiles = batch * heads_q * triton.cdiv(seq_q, 16)
    return tiles * 67584


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
    if start_n + BLOCK_N > seq_kv:
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
def add_parts(parts_ptr, parts, rows):
    """Outputs, maximum and sum of the first rows of a tile, from what the programs that share it left."""
    o_p = tl.arange(0, SPLITS)
    o_t = tl.arange(0, BLOCK_M)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 64], tl.float32)
    for first in range(0, rows, ROWS):
        o_r = first + tl.arange(0, ROWS)
        m_r = (o_p < parts)[:, None] & (o_r < rows)[None, :]
        row_ptrs = parts_ptr + o_p[:, None] * (BLOCK_M * 66) + o_r[None, :]
        # [SPLITS, ROWS]
        part_max = tl.load(row_ptrs + BLOCK_M * 64, mask=m_r, other=LOWEST, cache_modifier=".cg")
        part_sum = tl.load(row_ptrs + BLOCK_M * 65, mask=m_r, other=0.0, cache_modifier=".cg")
        acc_ptrs = parts_ptr + o_p[:, None] * (BLOCK_M * 66) + o_r[None, :] * 64
        # [SPLITS, ROWS, 64]
        part_acc = tl.load(acc_ptrs[:, :, None] + (tl.arange(0, 64))[None, None, :], mask=m_r[:, :, None], other=0.0,
            cache_modifier=".cg")
        new_max = tl.max(part_max, 0)
        shrink = tl.exp2(part_max - new_max[None, :])
        new_sum = tl.sum(part_sum * shrink, 0)
        m_t = o_t // ROWS == first // ROWS  # the rows of the tile that these are
        row_max = tl.where(m_t, tl.reshape(tl.broadcast_to(new_max[None, :], [BLOCK_M // ROWS, ROWS]), [BLOCK_M]),
            row_max)
        row_sum = tl.where(m_t, tl.reshape(tl.broadcast_to(new_sum[None, :], [BLOCK_M // ROWS, ROWS]), [BLOCK_M]),
            row_sum)
        # [ROWS, 64]
        new_acc = tl.sum(part_acc * shrink[:, :, None], 0)
        acc = tl.where(m_t[:, None],
            tl.reshape(tl.broadcast_to(new_acc[None, :, :], [BLOCK_M // ROWS, ROWS, 64]), [BLOCK_M, 64]), acc)
    return acc, row_max, row_sum

@triton.jit
def forward(
    query_ptr, key_ptr, value_ptr, output_ptr, arrivals_ptr, partial_ptr,
    stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2,
):
    """Each program has a part in a tile, or all of it: BLOCK_M rows of one head of one sequence."""
    tile = tl.program_id(0) // SPLITS
    part = tl.program_id(0) % SPLITS
    # Programs that run together share a group of heads, whose keys then stay in the L2.
    batch_heads = batch_heads // group_size
    row_tiles = tl.cdiv(seq_q * group_size, BLOCK_M)
    group = HEAD_GROUP if HEAD_GROUP > 0 else batch_heads
    first_head = tile // (group * row_tiles) * group
    members = tl.minimum(group, batch_heads - first_head)
    place = tile % (group * row_tiles)
    row_tile = row_tiles - 1 - place // members  # the longest rows start first
    i_bh = first_head + place % members
    start_r = row_tile * BLOCK_M
    start_m = start_r // group_size
    i_b = (i_bh // (heads_q // group_size)).to(tl.int64)
    # The rows are the first query of all heads that share a key, then the next query of them all.
    stop_m = (start_r + BLOCK_M - 1) // group_size + 1
    i_kv = (i_bh % (heads_q // group_size)).to(tl.int64)
    o_r = start_r + tl.arange(0, BLOCK_M)
    i_h = i_kv * group_size + o_r % group_size

    o_m = o_r // group_size
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, 64)
    query_ptr += i_b * stride_qb + i_h.to(tl.int64)[:, None] * stride_qh
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
    blocks = tl.cdiv(tl.maximum(0, end_n - begin_n), BLOCK_N)
    # A tile that sees half of the keys is shared by half as many programs, so that all walk equally far.
    parts = tl.maximum(1, tl.minimum(blocks, tl.cdiv(blocks * SPLITS, tl.maximum(1, tl.cdiv(seq_kv, BLOCK_N)))))
    if part >= parts:
        return
    end_n = tl.minimum(end_n, begin_n + blocks * (part + 1) // parts * BLOCK_N)
    begin_n += blocks * part // parts * BLOCK_N
    acc, row_max, row_sum = walk(
        acc, row_max, row_sum, query, key_ptrs, value_ptrs,
        begin_n, end_n, stride_ks, stride_vs, o_m,
        seq_q, seq_kv, scale_log2, True
    )
    # Who shares a tile leaves its part in memory; who is done last adds up all parts, in their order.
    writes = parts == 1
    if parts > 1:
        o_p = tl.arange(0, BLOCK_M)
        m_m = o_m < seq_q  # few of the rows, when there are few queries
        parts_ptr = partial_ptr + tile.to(tl.int64) * (SPLITS * BLOCK_M * 66)
        own_ptr = parts_ptr + part * (BLOCK_M * 66)
        tl.store(own_ptr + o_p[:, None] * 64 + tl.arange(0, 64)[None, :], acc, mask=m_m[:, None])
        tl.store(own_ptr + BLOCK_M * 64 + o_p, row_max, mask=m_m)
        tl.store(own_ptr + BLOCK_M * 65 + o_p, row_sum, mask=m_m)
        tl.debug_barrier()  # the numbers of all threads are in memory before the program says so
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == parts - 1:
            writes = parts > 1
            tl.store(arrivals_ptr + tile, 0)
            acc, row_max, row_sum = add_parts(parts_ptr, parts, tl.sum(m_m.to(tl.int32)))

    # A row that sees no key has sum 0: its output is 0.
    share = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    output_ptr += i_b * stride_ob + i_h.to(tl.int64)[:, None] * stride_oh
    # [BLOCK_M, 64]
    m_o = ((o_m < seq_q) & writes)[:, None]
    output_ptrs = output_ptr + o_m[:, None] * stride_os + o_d[None, :]
    tl.store(output_ptrs, (acc * share[:, None]).to(output_ptr.dtype.element_ty), mask=m_o)
