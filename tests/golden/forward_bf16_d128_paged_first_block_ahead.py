"""Forward attention in Triton, for one kind of problem.

    bfloat16, head dim 128, no mask, cache paged:16
    BLOCK_M=16 BLOCK_N=128 HEAD_GROUP=1 HEAD_SPLIT=0 PACK_GQA=1 PERSISTENT=0 SPLITS=8 barrier=none first_block=ahead
    mask_loop=every maxnreg=0 num_stages=2 num_warps=4 parts_read=at_once products=as_asked row_order=descending
    softmax=online

Rendered by autoattn from the template triton/forward; it imports only triton and stands alone. The algorithm is
FlashAttention-2's (Dao 2023, arXiv:2307.08691): one program owns BLOCK_M rows of queries, walks the keys in blocks of
BLOCK_N and keeps a running softmax. Scores are counted in powers of two, so that exp is a single exp2. To launch:

    forward[grid(batch, heads_q, seq_q, sm_count)](*arguments in the order of SIGNATURE, **OPTIONS)

for which heads_q counts the heads of the keys, and seq_q each query once for each head that shares a key.
where scale_log2 = scale * log2(e), scale > 0.
"""

import triton
import triton.language as tl

HEAD_DIM = tl.constexpr(128)
BLOCK_M = tl.constexpr(16)  # query rows a program
BLOCK_N = tl.constexpr(128)  # keys a step
SPLITS = tl.constexpr(8)  # programs that share the keys of a tile, at most
UNROLL = tl.constexpr(8)  # parts of a tile that are asked for at once
PACK_GQA = True  # the rows of a tile are queries of all heads that share a key
HEAD_GROUP = tl.constexpr(1)  # heads next to one another in program order; 0 means all
PAGE = tl.constexpr(16)  # keys of a page of the cache
PART_BLOCKS = tl.constexpr(1)  # blocks of keys that a program takes of a tile that is shared, at least
LOWEST = tl.constexpr(-3.0e38)  # below every score, but finite: LOWEST - LOWEST is 0, not NaN

OPTIONS = {"num_warps": 4, "num_stages": 2}
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
    "lengths_ptr": "*i32",
    "pages_ptr": "*i32",
    "stride_pb": "i64",
    "batch_heads": "i32",
    "seq_q": "i32",
    "capacity": "i32",
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
    return (tiles * 8,)


def arrivals(batch, heads_q, seq_q):
    """Zeros that a launch needs room for, and leaves as zeros: for each tile, how many of its programs are done."""
    tiles = batch * heads_q * triton.cdiv(seq_q, 16)
    return tiles


def partials(batch, heads_q, seq_q):
    """Numbers of float32 that a launch needs room for: a program's outputs, and each row's maximum and sum."""
    tiles = batch * heads_q * triton.cdiv(seq_q, 16)
    return tiles * 16640


@triton.jit
def pages_of(pages_ptr, o_n, end_n):
    """[BLOCK_N]: the pages in which keys lie; none is read that lies behind end_n."""
    return tl.load(pages_ptr + o_n // PAGE, mask=o_n < end_n, other=0)


@triton.jit
def rows_in(pages, o_n, stride_b, stride_s):
    """Where keys lie in the cache, from the first page on."""
    return pages.to(tl.int64) * stride_b + o_n % PAGE * stride_s


@triton.jit
def scores_of(
    query, key_ptrs, pages, start_n, stride_ks, o_m, end_n,
    seq_q, seq_kv, scale_log2, pages_ptr, stride_kb, stride_vb, MASKED: tl.constexpr
):
    """Scores of a block of keys, before scaling; -inf where the mask hides the key."""
    o_n = start_n + tl.arange(0, BLOCK_N)
    k_rows = rows_in(pages, o_n, stride_kb, stride_ks)
    # [128, BLOCK_N]
    if MASKED:
        key = tl.load(key_ptrs + k_rows[None, :], mask=(o_n < end_n)[None, :], other=0.0)
    else:
        key = tl.load(key_ptrs + k_rows[None, :])
    # [BLOCK_M, 128] x [128, BLOCK_N]
    scores = tl.dot(query, key)
    if MASKED:
        scores = tl.where(o_n[None, :] < seq_kv, scores, float("-inf"))
    return scores


@triton.jit
def add_values(acc, weights, value_ptrs, pages, start_n, stride_vs, end_n, pages_ptr, stride_vb, MASKED: tl.constexpr):
    """Adds a block of values, weighted."""
    v_rows = rows_in(pages, start_n + tl.arange(0, BLOCK_N), stride_vb, stride_vs)
    # [BLOCK_N, 128]; what lies beyond end_n may be NaN, and 0 * NaN would spread
    if MASKED:
        o_n = start_n + tl.arange(0, BLOCK_N)
        value = tl.load(value_ptrs + v_rows[:, None], mask=(o_n < end_n)[:, None], other=0.0)
    else:
        value = tl.load(value_ptrs + v_rows[:, None])
    # [BLOCK_M, BLOCK_N] x [BLOCK_N, 128]
    acc = tl.dot(weights.to(value.dtype), value, acc)
    return acc


@triton.jit
def walk(
    acc, row_max, row_sum, query, key_ptrs, value_ptrs,
    begin_n, end_n, stride_ks, stride_vs, o_m,
    seq_q, seq_kv, scale_log2, pages_ptr, stride_kb, stride_vb, MASKED: tl.constexpr
):
    """Folds the keys from begin_n to end_n into the rows."""
    # Pages are read a step ahead, so that keys and values are asked for without waiting for them.
    next_pages = pages_of(pages_ptr, begin_n + tl.arange(0, BLOCK_N), end_n)
    for start_n in tl.range(begin_n, end_n, BLOCK_N):
        pages = next_pages
        next_pages = pages_of(pages_ptr, start_n + BLOCK_N + tl.arange(0, BLOCK_N), end_n)
        scores = scores_of(query, key_ptrs, pages, start_n, stride_ks, o_m, end_n, seq_q, seq_kv, scale_log2, pages_ptr,
            stride_kb, stride_vb, MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        row_max = new_max
        acc = add_values(acc, weights, value_ptrs, pages, start_n, stride_vs, end_n, pages_ptr, stride_vb, MASKED)
    return acc, row_max, row_sum


@triton.jit
def block_at(key_ptrs, value_ptrs, pages, start_n, stride_ks, stride_vs, end_n, pages_ptr, stride_kb, stride_vb,
        MASKED: tl.constexpr):
    """Keys and values of a block; 0 behind end_n."""
    o_n = start_n + tl.arange(0, BLOCK_N)
    k_rows = rows_in(pages, o_n, stride_kb, stride_ks)
    v_rows = rows_in(pages, o_n, stride_vb, stride_vs)
    # [128, BLOCK_N]
    if MASKED:
        key = tl.load(key_ptrs + k_rows[None, :], mask=(o_n < end_n)[None, :], other=0.0)
    else:
        key = tl.load(key_ptrs + k_rows[None, :])
    # [BLOCK_N, 128]; what lies beyond end_n may be NaN, and 0 * NaN would spread
    if MASKED:
        o_n = start_n + tl.arange(0, BLOCK_N)
        value = tl.load(value_ptrs + v_rows[:, None], mask=(o_n < end_n)[:, None], other=0.0)
    else:
        value = tl.load(value_ptrs + v_rows[:, None])
    return key, value


@triton.jit
def scores_of_given(
    query, key, start_n, o_m, end_n,
    seq_q, seq_kv, scale_log2, pages_ptr, stride_kb, stride_vb, MASKED: tl.constexpr
):
    """Scores of a block of keys, before scaling; -inf where the mask hides the key."""
    o_n = start_n + tl.arange(0, BLOCK_N)
    # [BLOCK_M, 128] x [128, BLOCK_N]
    scores = tl.dot(query, key)
    if MASKED:
        scores = tl.where(o_n[None, :] < seq_kv, scores, float("-inf"))
    return scores


@triton.jit
def add_given(acc, weights, value):
    """Adds a block of values, weighted."""
    # [BLOCK_M, BLOCK_N] x [BLOCK_N, 128]
    acc = tl.dot(weights.to(value.dtype), value, acc)
    return acc


@triton.jit
def fold_given(
    acc, row_max, row_sum, query, key, value, start_n, end_n, o_m,
    seq_q, seq_kv, scale_log2, pages_ptr, stride_kb, stride_vb
):
    """Folds a block of keys into the rows, unless it lies behind all keys."""
    if start_n < end_n:
        scores = scores_of_given(query, key, start_n, o_m, end_n, seq_q, seq_kv, scale_log2, pages_ptr, stride_kb,
            stride_vb, True)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        row_max = new_max
        acc = add_given(acc, weights, value)
    return acc, row_max, row_sum


@triton.jit
def add_parts(parts_ptr, parts, m_m):
    """Outputs, maximum and sum of those rows of a tile that there are, from what the programs that share it left."""
    o_r = tl.arange(0, BLOCK_M)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 128], tl.float32)
    for first in range(0, parts, UNROLL):
        for place in tl.static_range(UNROLL):
            part_ptr = parts_ptr + (first + place) * (BLOCK_M * 130)
            m_r = m_m & (first + place < parts)
            part_max = tl.load(part_ptr + BLOCK_M * 128 + o_r, mask=m_r, other=LOWEST, cache_modifier=".cg")
            new_max = tl.maximum(row_max, part_max)
            kept, shrink = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)
            row_max = new_max
            part_sum = tl.load(part_ptr + BLOCK_M * 129 + o_r, mask=m_r, other=0.0, cache_modifier=".cg")
            row_sum = row_sum * kept + part_sum * shrink
            o_d = tl.arange(0, 128)
            part_acc = tl.load(part_ptr + o_r[:, None] * 128 + o_d[None, :], mask=m_r[:, None], other=0.0,
                cache_modifier=".cg")
            acc = acc * kept[:, None] + part_acc * shrink[:, None]
    return acc, row_max, row_sum

@triton.jit
def forward(
    query_ptr, key_ptr, value_ptr, output_ptr, arrivals_ptr, partial_ptr,
    stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    lengths_ptr, pages_ptr, stride_pb,
    batch_heads, seq_q, capacity, heads_q, group_size, scale_log2,
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
    # A length that is wrong reaches no further than the cache.
    seq_kv = tl.maximum(0, tl.minimum(tl.load(lengths_ptr + i_b), capacity))
    pages_ptr += i_b * stride_pb

    o_m = o_r // group_size
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, 128)
    query_ptr += i_b * stride_qb + i_h.to(tl.int64)[:, None] * stride_qh
    key_ptr += i_kv * stride_kh
    value_ptr += i_kv * stride_vh
    key_ptrs = key_ptr + o_d[:, None]
    value_ptrs = value_ptr + o_d[None, :]
    # [BLOCK_M, 128]
    m_q = (o_m < seq_q)[:, None]
    query = tl.load(query_ptr + o_m[:, None] * stride_qs + o_d[None, :], mask=m_q, other=0.0)

    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 128], tl.float32)
    begin_n = 0
    end_n = seq_kv
    # A part begins with the block of its number, so that its pages are known with the length, and its keys right behind.
    first_n = part * BLOCK_N
    # A page behind the length may be read here, and leads nowhere.
    first_pages = pages_of(pages_ptr, first_n + tl.arange(0, BLOCK_N), capacity)
    first_key, first_value = block_at(key_ptrs, value_ptrs, first_pages, first_n, stride_ks, stride_vs, end_n,
        pages_ptr, stride_kb, stride_vb, True)
    blocks = tl.cdiv(tl.maximum(0, end_n - begin_n), BLOCK_N)
    # Longer sequences are shared by more programs; how many depends on a sequence alone, whatever shares its batch.
    parts = tl.maximum(1, tl.minimum(SPLITS, tl.cdiv(blocks, PART_BLOCKS)))
    if part >= parts:
        return
    acc, row_max, row_sum = fold_given(
        acc, row_max, row_sum, query, first_key, first_value, first_n, end_n, o_m,
        seq_q, seq_kv, scale_log2, pages_ptr, stride_kb, stride_vb
    )
    # Behind the first blocks of all parts, each has an equal share.
    rest = tl.maximum(0, blocks - parts)
    end_n = tl.minimum(end_n, (parts + rest * (part + 1) // parts) * BLOCK_N)
    begin_n = (parts + rest * part // parts) * BLOCK_N
    if begin_n < end_n:  # a part of a short sequence is its first block
        acc, row_max, row_sum = walk(
            acc, row_max, row_sum, query, key_ptrs, value_ptrs,
            begin_n, end_n, stride_ks, stride_vs, o_m,
            seq_q, seq_kv, scale_log2, pages_ptr, stride_kb, stride_vb, True
        )
    # Who shares a tile leaves its part in memory; who is done last adds up all parts, in their order.
    writes = parts == 1
    if parts > 1:
        o_p = tl.arange(0, BLOCK_M)
        m_m = o_m < seq_q  # few of the rows, when there are few queries
        parts_ptr = partial_ptr + tile.to(tl.int64) * (SPLITS * BLOCK_M * 130)
        own_ptr = parts_ptr + part * (BLOCK_M * 130)
        tl.store(own_ptr + o_p[:, None] * 128 + tl.arange(0, 128)[None, :], acc, mask=m_m[:, None])
        tl.store(own_ptr + BLOCK_M * 128 + o_p, row_max, mask=m_m)
        tl.store(own_ptr + BLOCK_M * 129 + o_p, row_sum, mask=m_m)
        tl.debug_barrier()  # the numbers of all threads are in memory before the program says so
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == parts - 1:
            writes = parts > 1
            tl.store(arrivals_ptr + tile, 0)
            acc, row_max, row_sum = add_parts(parts_ptr, parts, m_m)

    # A row that sees no key has sum 0: its output is 0.
    share = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    output_ptr += i_b * stride_ob + i_h.to(tl.int64)[:, None] * stride_oh
    # [BLOCK_M, 128]
    m_o = ((o_m < seq_q) & writes)[:, None]
    output_ptrs = output_ptr + o_m[:, None] * stride_os + o_d[None, :]
    tl.store(output_ptrs, (acc * share[:, None]).to(output_ptr.dtype.element_ty), mask=m_o)
