"""Forward attention in Triton, for one kind of problem.

    bfloat16, head dim 576, values 512, causal (bottom-right), cache paged:64,float8_e4m3,latent
    BLOCK_M=32 BLOCK_N=32 HEAD_GROUP=1 HEAD_SPLIT=1 PACK_GQA=1 PERSISTENT=0 SHARED_PROGRAMS=256 SPLITS=64 barrier=none
    mask_loop=split maxnreg=0 num_stages=3 num_warps=8 products=as_asked row_order=descending softmax=online

Rendered by autoattn from the template triton/forward; it imports only triton and stands alone. The algorithm is
FlashAttention-2's (Dao 2023, arXiv:2307.08691): one program owns BLOCK_M rows of queries, walks the keys in blocks of
BLOCK_N and keeps a running softmax. Scores are counted in powers of two, so that exp is a single exp2. To launch:

    forward[grid(batch, heads_q, seq_q, sm_count)](*arguments in the order of SIGNATURE, **OPTIONS)

for which heads_q counts the heads of the keys, and seq_q each query once for each head that shares a key.
where scale_log2 = scale * log2(e), scale > 0.
"""

import triton
import triton.language as tl

HEAD_DIM = tl.constexpr(576)
HEAD_DIM_V = tl.constexpr(512)
BLOCK_M = tl.constexpr(32)  # query rows a program
BLOCK_N = tl.constexpr(32)  # keys a step
SPLITS = tl.constexpr(64)  # programs that share the keys of a tile, at most
UNROLL = tl.constexpr(1)  # parts of a tile that are asked for at once
GROUP_PARTS = tl.constexpr(8)  # parts of a tile that are added up before those of other groups
PACK_GQA = True  # the rows of a tile are queries of all heads that share a key
HEAD_GROUP = tl.constexpr(1)  # heads next to one another in program order; 0 means all
PAGE = tl.constexpr(64)  # keys of a page of the cache
PART_BLOCKS = tl.constexpr(1)  # blocks of keys that a program takes of a tile that is shared, at least
SHARED_PROGRAMS = tl.constexpr(256)  # among which the keys of all sequences are shared out
LOWEST = tl.constexpr(-3.0e38)  # below every score, but finite: LOWEST - LOWEST is 0, not NaN

OPTIONS = {"num_warps": 8, "num_stages": 3}
SIGNATURE = {
    "query_ptr": "*bf16",
    "key_ptr": "*fp8e4nv",
    "output_ptr": "*bf16",
    "arrivals_ptr": "*i32",
    "partial_ptr": "*fp32",
    "stride_qb": "i64",
    "stride_qh": "i64",
    "stride_qs": "i32",
    "stride_kb": "i64",
    "stride_kh": "i64",
    "stride_ks": "i32",
    "stride_ob": "i64",
    "stride_oh": "i64",
    "stride_os": "i32",
    "key_scale_ptr": "*fp32",
    "stride_kfb": "i64",
    "stride_kfh": "i64",
    "value_scale_ptr": "*fp32",
    "stride_vfb": "i64",
    "stride_vfh": "i64",
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
    name: 16 if name.endswith("_ptr") else 16 if name[7] in "kv" else 8
    for name in SIGNATURE
    if name in ("query_ptr", "key_ptr", "value_ptr", "output_ptr") or name[:8] in ("stride_q", "stride_k", "stride_v",
    "stride_o") and name[8] != "f"
}
DIVISIBLE["partial_ptr"] = 16


def grid(batch, heads_q, seq_q, sm_count):
    """Programs to launch."""
    tiles = batch * heads_q * triton.cdiv(seq_q, 32)
    return (tiles + 256,)


def arrivals(batch, heads_q, seq_q):
    """Zeros that a launch needs room for, and leaves as zeros: for each tile, how many of its groups are done."""
    tiles = batch * heads_q * triton.cdiv(seq_q, 32)
    return tiles * 9


def partials(batch, heads_q, seq_q):
    """Numbers of float32 that a launch needs room for: a program's outputs, and each row's maximum and sum."""
    tiles = batch * heads_q * triton.cdiv(seq_q, 32)
    return (tiles + 256) * 16448


@triton.jit
def pages_of(pages_ptr, start_n, end_n):
    """The page in which a block of keys lies; none is read that lies behind end_n."""
    return tl.load(pages_ptr + start_n // PAGE, mask=start_n < end_n, other=0)


@triton.jit
def rows_in(page, start_n, stride_b, stride_s):
    """Where a block of keys lies in the cache, from the first page on."""
    return page.to(tl.int64) * stride_b + (start_n - start_n // PAGE * PAGE) * stride_s


@triton.jit
def scores_of(
    query_low, query_high, key_ptrs_low, key_ptrs_high, pages, start_n, stride_ks, o_m, end_n,
    seq_q, seq_kv, last, scale_log2, row_scale, pages_ptr, stride_kb, MASKED: tl.constexpr
):
    """Scores of a block of keys, and its values, before scaling; -inf where the mask hides the key."""
    o_n = start_n + tl.arange(0, BLOCK_N)
    k_rows = rows_in(pages, start_n, stride_kb, stride_ks)
    # [BLOCK_N, 512]
    if MASKED:
        latent = tl.load(key_ptrs_low + k_rows, mask=(o_n < end_n)[:, None], other=0.0)
    else:
        latent = tl.load(key_ptrs_low + k_rows)
    # Every step takes this branch. Without it, Triton 3.6 converts the tile for each product, and reads none ahead.
    if start_n < end_n:
        converted = latent.to(query_low.dtype)
    else:
        converted = tl.zeros([BLOCK_N, 512], query_low.dtype)
    latent = converted
    # [BLOCK_M, 512] x [512, BLOCK_N]
    scores = tl.dot(query_low, tl.trans(latent))
    # [64, BLOCK_N]
    if MASKED:
        key = tl.load(key_ptrs_high + k_rows, mask=(o_n < end_n)[None, :], other=0.0)
    else:
        key = tl.load(key_ptrs_high + k_rows)
    key = key.to(query_high.dtype)
    # [BLOCK_M, 64] x [64, BLOCK_N]
    scores = tl.dot(query_high, key, scores)
    scores = scores * row_scale[:, None]
    if MASKED:
        scores = tl.where(o_n[None, :] <= o_m[:, None] + last, scores, float("-inf"))
    return scores, latent


@triton.jit
def add_values(acc, weights, latent, MASKED: tl.constexpr):
    """Adds a block of values, weighted: the tile of which its scores are."""
    if MASKED:
        # A row that sees a key which is no finite number is NaN by its score; 0 * NaN would spoil the others too.
        latent = tl.where(latent * 0.0 == 0.0, latent, 0.0)
    # [BLOCK_M, BLOCK_N] x [BLOCK_N, 512]
    acc = tl.dot(weights.to(latent.dtype), latent, acc)
    return acc


@triton.jit
def walk(
    acc, row_max, row_sum, query_low, query_high,
    key_ptrs_low, key_ptrs_high,
    begin_n, end_n, stride_ks, o_m,
    seq_q, seq_kv, last, scale_log2, row_scale, pages_ptr, stride_kb, MASKED: tl.constexpr
):
    """Folds the keys from begin_n to end_n into the rows."""
    # Pages are read a step ahead, so that keys and values are asked for without waiting for them.
    next_pages = pages_of(pages_ptr, begin_n, end_n)
    for start_n in tl.range(begin_n, end_n, BLOCK_N):
        pages = next_pages
        next_pages = pages_of(pages_ptr, start_n + BLOCK_N, end_n)
        scores, latent = scores_of(query_low, query_high, key_ptrs_low, key_ptrs_high, pages, start_n, stride_ks, o_m,
            end_n, seq_q, seq_kv, last, scale_log2, row_scale, pages_ptr, stride_kb, MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        row_max = new_max
        acc = add_values(acc, weights, latent, MASKED)
    return acc, row_max, row_sum


@triton.jit
def add_parts(parts_ptr, parts, m_m, STEP: tl.constexpr):
    """Outputs, maximum and sum of those rows of a tile that there are, from each STEP-th part."""
    o_r = tl.arange(0, BLOCK_M)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    for part in tl.static_range(GROUP_PARTS):
        part_ptr = parts_ptr + part * (STEP * BLOCK_M * 514)
        found = tl.load(part_ptr + BLOCK_M * 512 + o_r, mask=m_m & (part < parts), other=LOWEST, cache_modifier=".cg")
        row_max = tl.maximum(row_max, found)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 512], tl.float32)
    for first in range(0, parts, UNROLL):
        for place in tl.static_range(UNROLL):
            part_ptr = parts_ptr + (first + place) * (STEP * BLOCK_M * 514)
            m_r = m_m & (first + place < parts)
            part_max = tl.load(part_ptr + BLOCK_M * 512 + o_r, mask=m_r, other=LOWEST, cache_modifier=".cg")
            shrink = tl.exp2(part_max - row_max)
            part_sum = tl.load(part_ptr + BLOCK_M * 513 + o_r, mask=m_r, other=0.0, cache_modifier=".cg")
            row_sum += part_sum * shrink
            o_d = tl.arange(0, 512)
            part_acc = tl.load(part_ptr + o_r[:, None] * 512 + o_d[None, :], mask=m_r[:, None], other=0.0,
                cache_modifier=".cg")
            acc += part_acc * shrink[:, None]
    return acc, row_max, row_sum

@triton.jit
def part_of(program, lengths_ptr, capacity, batch, sequence_tiles):
    """The tile of a program, its part there, and how many programs share the tile; 0 for a program that is left over.

    A part has as many blocks of keys as give each program as much to do, so that no program waits for a long sequence.
    """
    o_s = tl.arange(0, 128)
    blocks = tl.zeros([128], tl.int32)
    for first in range(0, batch, 128):
        lengths = tl.load(lengths_ptr + first + o_s, mask=first + o_s < batch, other=0)
        blocks += tl.cdiv(tl.maximum(0, tl.minimum(lengths, capacity)), BLOCK_N)
    part_blocks = tl.maximum(PART_BLOCKS, tl.cdiv(tl.sum(blocks) * sequence_tiles, SHARED_PROGRAMS))
    sequence = tl.zeros([], tl.int32)
    begin = tl.zeros([], tl.int32)
    end = tl.zeros([], tl.int32)
    parts = tl.zeros([], tl.int32)
    for first in range(0, batch, 128):
        lengths = tl.load(lengths_ptr + first + o_s, mask=first + o_s < batch, other=0)
        blocks = tl.cdiv(tl.maximum(0, tl.minimum(lengths, capacity)), BLOCK_N)
        own = tl.maximum(1, tl.minimum(SPLITS, tl.cdiv(blocks, part_blocks)))
        own = tl.where(first + o_s < batch, own, 0)
        ends = end + tl.cumsum(own, 0) * sequence_tiles  # the programs of a sequence end before its number here
        passed = (ends <= program) & (own > 0)
        sequence += tl.sum(passed.to(tl.int32))
        begin = tl.maximum(begin, tl.max(tl.where(passed, ends, 0)))
        parts += tl.sum(tl.where((ends > program) & (ends - own * sequence_tiles <= program), own, 0))
        end += tl.sum(own) * sequence_tiles
    place = program - begin
    divisor = tl.maximum(parts, 1)
    return sequence * sequence_tiles + place // divisor, place % divisor, parts


@triton.jit
def forward(
    query_ptr, key_ptr, output_ptr, arrivals_ptr, partial_ptr,
    stride_qb, stride_qh, stride_qs,
    stride_kb, stride_kh, stride_ks,
    stride_ob, stride_oh, stride_os,
    key_scale_ptr, stride_kfb, stride_kfh, value_scale_ptr, stride_vfb, stride_vfh,
    lengths_ptr, pages_ptr, stride_pb,
    batch_heads, seq_q, capacity, heads_q, group_size, scale_log2,
):
    """Each program has a part in a tile, or all of it: BLOCK_M rows of one head of one sequence."""
    sequence_tiles = tl.cdiv(seq_q * group_size, BLOCK_M) * (heads_q // group_size)
    tile, part, parts = part_of(tl.program_id(0), lengths_ptr, capacity, batch_heads // heads_q, sequence_tiles)
    if parts == 0:
        return
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
    o_d_low = tl.arange(0, 512)
    o_d_high = 512 + tl.arange(0, 64)
    o_dv = tl.arange(0, 512)
    query_ptr += i_b * stride_qb + i_h.to(tl.int64)[:, None] * stride_qh
    key_ptr += i_kv * stride_kh
    key_ptrs_low = key_ptr + o_n[:, None] * stride_ks + o_d_low[None, :]
    key_ptrs_high = key_ptr + o_n[None, :] * stride_ks + o_d_high[:, None]
    # [BLOCK_M, 512]
    m_q = (o_m < seq_q)[:, None]
    query_low = tl.load(query_ptr + o_m[:, None] * stride_qs + o_d_low[None, :], mask=m_q, other=0.0)
    # [BLOCK_M, 64]
    m_q = (o_m < seq_q)[:, None]
    query_high = tl.load(query_ptr + o_m[:, None] * stride_qs + o_d_high[None, :], mask=m_q, other=0.0)
    # float16 holds bfloat16 numbers up to 2: a row is divided by a power of two, and its scores are multiplied by it.
    largest = tl.maximum(tl.max(tl.abs(query_low), 1), tl.max(tl.abs(query_high), 1)).to(tl.float32)
    row_scale = tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 1.0e-30))))
    query_low = (query_low / row_scale[:, None]).to(tl.float16)
    query_high = (query_high / row_scale[:, None]).to(tl.float16)
    scaled = i_b  # the sequence whose scales these are
    scale_log2 *= tl.load(key_scale_ptr + scaled * stride_kfb + i_kv * stride_kfh)

    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 512], tl.float32)
    shift = seq_kv - seq_q  # the query at row i stands at key i + shift
    begin_n = 0
    last = shift  # query i sees the keys up to i + last
    end_n = tl.maximum(0, tl.minimum(seq_kv, stop_m + last))
    blocks = tl.cdiv(tl.maximum(0, end_n - begin_n), BLOCK_N)
    parts = tl.minimum(parts, tl.maximum(1, blocks))
    if part >= parts:
        return
    end_n = tl.minimum(end_n, begin_n + blocks * (part + 1) // parts * BLOCK_N)
    begin_n += blocks * part // parts * BLOCK_N
    # All rows see the keys before inner_end.
    inner_end = tl.maximum(0, tl.minimum(seq_kv, start_m + last + 1)) // BLOCK_N * BLOCK_N
    inner_end = tl.maximum(begin_n, tl.minimum(inner_end, end_n))
    acc, row_max, row_sum = walk(
        acc, row_max, row_sum, query_low, query_high, key_ptrs_low, key_ptrs_high,
        begin_n, inner_end, stride_ks, o_m,
        seq_q, seq_kv, last, scale_log2, row_scale, pages_ptr, stride_kb, False
    )
    acc, row_max, row_sum = walk(
        acc, row_max, row_sum, query_low, query_high, key_ptrs_low, key_ptrs_high,
        inner_end, end_n, stride_ks, o_m,
        seq_q, seq_kv, last, scale_log2, row_scale, pages_ptr, stride_kb, True
    )
    # Who shares a tile leaves its part in memory; who is done last adds up all parts, in their order.
    writes = parts == 1
    if parts > 1:
        o_p = tl.arange(0, BLOCK_M)
        m_m = o_m < seq_q  # few of the rows, when there are few queries
        parts_ptr = partial_ptr + (tl.program_id(0) - part).to(tl.int64) * (BLOCK_M * 514)
        own_ptr = parts_ptr + part * (BLOCK_M * 514)
        tl.store(own_ptr + o_p[:, None] * 512 + tl.arange(0, 512)[None, :], acc, mask=m_m[:, None])
        tl.store(own_ptr + BLOCK_M * 512 + o_p, row_max, mask=m_m)
        tl.store(own_ptr + BLOCK_M * 513 + o_p, row_sum, mask=m_m)
        tl.debug_barrier()  # the numbers of all threads are in memory before the program says so
        # Who is last of a group adds up its parts in their order, and who is last of these the sums of all groups.
        done_ptr = arrivals_ptr + tile * 9
        group = part // GROUP_PARTS
        groups = tl.cdiv(parts, GROUP_PARTS)
        members = tl.minimum(GROUP_PARTS, parts - group * GROUP_PARTS)
        if tl.atomic_add(done_ptr + 1 + group, 1, sem="acq_rel", scope="gpu") == members - 1:
            writes = groups == 1
            tl.store(done_ptr + 1 + group, 0)
            group_ptr = parts_ptr + group * (GROUP_PARTS * BLOCK_M * 514)
            acc, row_max, row_sum = add_parts(group_ptr, members, m_m, 1)
            if groups > 1:
                tl.debug_barrier()  # all threads have read the part in whose place the sum is written
                tl.store(group_ptr + o_p[:, None] * 512 + tl.arange(0, 512)[None, :], acc, mask=m_m[:, None])
                tl.store(group_ptr + BLOCK_M * 512 + o_p, row_max, mask=m_m)
                tl.store(group_ptr + BLOCK_M * 513 + o_p, row_sum, mask=m_m)
                tl.debug_barrier()
                if tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == groups - 1:
                    writes = groups > 1
                    tl.store(done_ptr, 0)
                    acc, row_max, row_sum = add_parts(parts_ptr, groups, m_m, GROUP_PARTS)

    # A row that sees no key has sum 0: its output is 0.
    share = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    share *= tl.load(value_scale_ptr + scaled * stride_vfb + i_kv * stride_vfh)
    output_ptr += i_b * stride_ob + i_h.to(tl.int64)[:, None] * stride_oh
    # [BLOCK_M, 512]
    m_o = ((o_m < seq_q) & writes)[:, None]
    output_ptrs = output_ptr + o_m[:, None] * stride_os + o_dv[None, :]
    tl.store(output_ptrs, (acc * share[:, None]).to(output_ptr.dtype.element_ty), mask=m_o)
