"""Forward attention on a latent cache in Gluon for Hopper (sm_90), for one kind of problem.

    bfloat16, head dim 576, values 512, no mask, cache contiguous,latent,rows,leftpad
    BLOCK_M=16 BLOCK_N=64 PART_BLOCKS=1 PERSISTENT=0 SPLITS=4 byte_stages=1 num_stages=2

Rendered by autoattn from the template latent/forward; it imports only triton and stands alone. Values are the first
elements of keys, so that a block of keys serves both products. The producer, one warp, has the TMA unit bring blocks
of keys into shared memory. Two consumers, warpgroups of four warps, each own half of the
columns of the outputs of ROWS rows: queries of all heads that share keys. The first one also computes scores and
weights, and leaves the weights in shared memory for both (FlashMLA, https://github.com/deepseek-ai/FlashMLA).
Scores have keys along their rows, and outputs the columns of values: a product of a warpgroup has 64 of them.
To launch:

    forward[grid(batch, heads_q, seq_q, sm_count)](*arguments in the order of SIGNATURE, **OPTIONS)

for which heads_q counts the heads of the keys, and seq_q each query once for each head that shares a key, and where
scale_log2 = scale * log2(e), scale > 0, and lse is in natural logarithms, [batch, heads_q, seq_q].
The arguments in DESCRIPTORS are TMA descriptors of [rows, heads, capacity, head_dim] views.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(16)  # of a tile: queries of all heads that share keys
PACK_GQA = True
WIDTH = gl.constexpr(512)  # of values, the first elements of keys
REST = gl.constexpr(64)  # of the elements of keys behind them
HALF = gl.constexpr(256)  # columns of the outputs that a consumer has
BLOCK_N = gl.constexpr(64)  # keys a step
STAGES = gl.constexpr(2)  # blocks of keys that shared memory holds
SPLITS = gl.constexpr(4)  # programs that share the keys of a tile, at most
PART_BLOCKS = gl.constexpr(1)  # blocks of keys that a program takes of a tile that is shared, at least
PART_ROWS = gl.constexpr(16)  # that are added up at once
UNROLL = gl.constexpr(4)  # parts of a tile that are asked for at once
PART_NUMBERS = gl.constexpr(4128)  # of a part of a consumer's: outputs, and each row's maximum and sum
SPREAD = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
LOWEST = gl.constexpr(-3.0e38)  # below every score, but finite: LOWEST - LOWEST is 0, not NaN
ELEMENT = gl.constexpr(gl.bfloat16)  # of products
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
    instr_shape=[16, 16, 16]))  # [BLOCK_N, ROWS]
SCORE_ROWS = gl.constexpr(gl.SliceLayout(0, SCORES))
SCORE_KEYS = gl.constexpr(gl.SliceLayout(1, SCORES))
OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
    instr_shape=[16, 16, 16]))  # [HALF, ROWS]
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(0, OUTPUTS))
HALF_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))  # rows of a consumer's half of values
REST_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # rows of the rest of keys

# TMA descriptors: argument -> block and layout
DESCRIPTORS = {
    "key_low": ([1, 1, 64, 512], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)),
    "key_high": ([1, 1, 64, 64], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)),
}
OPTIONS = {"num_warps": 4}
SIGNATURE = {
    **{name: f"tensordesc<bf16{block},{layout}>" for name, (block, layout) in DESCRIPTORS.items()},
    "query_ptr": "*bf16",
    "output_ptr": "*bf16",
    "lse_ptr": "*fp32",
    "arrivals_ptr": "*i32",
    "partial_ptr": "*fp32",
    "stride_qb": "i64",
    "stride_qh": "i64",
    "stride_qs": "i64",
    "stride_ob": "i64",
    "stride_oh": "i64",
    "stride_os": "i64",
    "lengths_ptr": "*i32",
    "cache_rows_ptr": "*i32",
    "leftpad_ptr": "*i32",
    "batch_heads": "i32",
    "seq_q": "i32",
    "capacity": "i32",
    "heads_q": "i32",
    "group_size": "i32",
    "scale_log2": "fp32",
}
DIVISIBLE = {"query_ptr": 16, "output_ptr": 16}
DIVISIBLE |= {name: 8 for name in SIGNATURE if name[:8] in ("stride_q", "stride_o")}
DIVISIBLE["partial_ptr"] = 16


def grid(batch, heads_q, seq_q, sm_count):
    """Programs to launch."""
    return (batch * heads_q * triton.cdiv(seq_q, 16) * 4,)


def arrivals(batch, heads_q, seq_q):
    """Zeros that a launch needs room for, and leaves as zeros: programs that are done, of each consumer of a tile."""
    return 2 * batch * heads_q * triton.cdiv(seq_q, 16)


def partials(batch, heads_q, seq_q):
    """Numbers of float32 that a launch needs room for: a program's outputs, and each row's maximum and sum."""
    return batch * heads_q * triton.cdiv(seq_q, 16) * 33024


# Barriers of the hardware: 0 to 5 belong to Triton.
@gluon.jit
def meet():
    """Waits until both consumers are here."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(6)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def say_weighed():
    """Says that the weights of a block are there."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(7)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_weighed():
    """Waits for that."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(7)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def say_read():
    """Says that the second consumer has read them."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(8)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_read():
    """Waits for that."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(8)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def advance(slot, phase, stages: gl.constexpr):
    """The next slot of a ring, and the phase of its barriers."""
    slot += 1
    around = slot == stages
    return gl.where(around, 0, slot), gl.where(around, phase ^ 1, phase)


@gluon.jit
def place_of(tile, lengths_ptr, cache_rows_ptr, leftpad_ptr, batch_heads, seq_q, capacity, heads_q, group_size):
    """First row, sequence and key head of a tile, where its keys lie, and how many its sequence has; which blocks all
    rows see, those before inner_end; and behind which key none sees any."""
    row_tiles = gl.cdiv(seq_q * group_size, ROWS)
    heads_kv = heads_q // group_size
    i_bh = tile // row_tiles
    start_r = tile % row_tiles * ROWS
    i_b = i_bh // heads_kv
    i_kv = i_bh % heads_kv
    # A length that is wrong reaches no further than the cache.
    seq_kv = gl.maximum(0, gl.minimum(gl.load(lengths_ptr + i_b), capacity))
    begin_kv = gl.maximum(0, gl.minimum(gl.load(leftpad_ptr + i_b), seq_kv))
    seq_kv -= begin_kv
    i_c = gl.load(cache_rows_ptr + i_b).to(gl.int64)
    inner_end = seq_kv // BLOCK_N
    end_n = seq_kv
    return start_r, i_b, i_kv, i_c, begin_kv, seq_kv, inner_end, end_n


@gluon.jit
def part_of(end_n):
    """A program's part of a tile, how many programs share the tile, its first block and that behind its last."""
    part = gl.program_id(0) % SPLITS
    begin_n = gl.to_tensor(0)
    blocks = gl.cdiv(gl.maximum(0, end_n - begin_n), BLOCK_N)
    # Longer sequences are shared by more programs; how many depends on a sequence alone, whatever shares its batch.
    parts = gl.maximum(1, gl.minimum(SPLITS, gl.cdiv(blocks, PART_BLOCKS)))
    end_n = gl.minimum(end_n, begin_n + blocks * (part + 1) // parts * BLOCK_N)
    begin_n += blocks * part // parts * BLOCK_N
    return part, parts, begin_n // BLOCK_N, gl.cdiv(end_n, BLOCK_N)


@gluon.jit
def load_tile(key_low, key_high, latents, rests, key_full, key_free, i_c, begin_kv, i_kv, begin, end, slot, phase):
    """Has the blocks of keys from `begin` to before `end` brought, each as soon as its slot is free."""
    for block in range(begin, end):
        mbarrier.wait(key_free.index(slot), phase)
        row = begin_kv + block * BLOCK_N
        mbarrier.expect(key_full.index(slot), key_low.block_type.nbytes + key_high.block_type.nbytes)
        # [BLOCK_N, WIDTH] and [BLOCK_N, REST]
        tma.async_copy_global_to_shared(key_low, [i_c, i_kv, row, 0], key_full.index(slot), latents.index(slot))
        tma.async_copy_global_to_shared(key_high, [i_c, i_kv, row, WIDTH], key_full.index(slot), rests.index(slot))
        slot, phase = advance(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def row_starts(first, layout: gl.constexpr, i_b, i_kv, group_size, stride_b, stride_h, stride_s,
        ROWS_OF: gl.constexpr = ROWS):
    """[ROWS_OF]: where the rows from `first` on begin in memory: the first query of all heads, then the next one."""
    o_r = first + gl.arange(0, ROWS_OF, gl.SliceLayout(1, layout))
    i_h = i_kv * group_size + o_r % group_size
    return i_b.to(gl.int64) * stride_b + i_h.to(gl.int64) * stride_h + (o_r // group_size).to(gl.int64) * stride_s


@gluon.jit
def load_queries(c: gl.constexpr, query_ptr, queries, query_rests, row_numbers, start_r, rows, i_b, i_kv, group_size,
        stride_qb, stride_qh, stride_qs):
    """Brings a consumer's columns of the queries, and the second one those behind them, and waits for the other's."""
    o_d = c * HALF + gl.arange(0, HALF, gl.SliceLayout(0, HALF_ROWS))
    m_q = (start_r + gl.arange(0, ROWS, gl.SliceLayout(1, HALF_ROWS)) < rows)[:, None]
    # [ROWS, HALF]
    query = gl.load(query_ptr + row_starts(start_r, HALF_ROWS, i_b, i_kv, group_size, stride_qb, stride_qh,
        stride_qs)[:, None] + o_d[None, :], mask=m_q, other=0.0)
    if c == 1:
        o_d = WIDTH + gl.arange(0, REST, gl.SliceLayout(0, REST_ROWS))
        m_q = (start_r + gl.arange(0, ROWS, gl.SliceLayout(1, REST_ROWS)) < rows)[:, None]
        # [ROWS, REST]
        query_rest = gl.load(query_ptr + row_starts(start_r, REST_ROWS, i_b, i_kv, group_size, stride_qb, stride_qh,
            stride_qs)[:, None] + o_d[None, :], mask=m_q, other=0.0)
    queries.index(0).slice(c * HALF, HALF, dim=1).store(query)
    if c == 1:
        query_rests.index(0).store(query_rest)
    fence_async_shared()
    meet()


@gluon.jit
def hidden_nought():
    """0, which the compiler does not know.

    As the place of the queries, it has their descriptors made anew in each step. Made
    once, before the loop, there are more of them than registers (Triton 3.6).
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def multiply_keys(queries, query_rests, latents, rests, slot):
    """Scores of a block of keys, before scaling."""
    nought = hidden_nought()
    latent = latents.index(slot).reshape([BLOCK_N, WIDTH])
    rest = rests.index(slot).reshape([BLOCK_N, REST])
    zeros = gl.zeros([BLOCK_N, ROWS], gl.float32, SCORES)
    # [BLOCK_N, WIDTH] x [WIDTH, ROWS]
    token = warpgroup_mma(latent, queries.index(nought).permute((1, 0)), zeros, use_acc=False, is_async=True)
    # [BLOCK_N, REST] x [REST, ROWS]
    token = warpgroup_mma(rest, query_rests.index(nought).permute((1, 0)), token, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(token,))


@gluon.jit
def add_values(c: gl.constexpr, weights, latents, slot, acc):
    """Starts adding a consumer's columns of a block of values, weighted."""
    values = latents.index(slot).reshape([BLOCK_N, WIDTH]).slice(c * HALF, HALF, dim=1)
    # [HALF, BLOCK_N] x [BLOCK_N, ROWS]
    return warpgroup_mma(values.permute((1, 0)), weights, acc, is_async=True)


@gluon.jit
def hide(scores, start_r, start_n, group_size, seq_kv):
    """-inf where the mask hides the key."""
    o_n = start_n + gl.arange(0, BLOCK_N, SCORE_KEYS)
    return gl.where(o_n[:, None] < seq_kv, scores, float("-inf"))


@gluon.jit
def clear_values(c: gl.constexpr, latents, slot, start_n, seq_kv):
    """Sets a consumer's values behind the last key to 0: anything may lie there, and a weight of 0 makes NaN of NaN."""
    tile = latents.index(slot).reshape([BLOCK_N, WIDTH])
    for part in gl.static_range(4):
        place = tile.slice(part * 16, 16).slice(c * HALF, HALF, dim=1)
        values = place.load(HALF_ROWS)
        o_n = start_n + part * 16 + gl.arange(0, 16, gl.SliceLayout(1, HALF_ROWS))
        kept = (o_n < seq_kv)[:, None]
        place.store(gl.where(kept, values, gl.zeros([16, HALF], ELEMENT, HALF_ROWS)))
    fence_async_shared()
    gl.thread_barrier()  # of this warpgroup, whose next product reads what all its threads wrote


@gluon.jit
def write_rows(c: gl.constexpr, acc, row_max, row_sum, first, layout: gl.constexpr, ROWS_OF: gl.constexpr, output_ptr,
        lse_ptr, stride_ob, stride_oh, stride_os, i_b, i_kv, rows, heads_q, group_size, seq_q):
    """Writes a consumer's columns of ROWS_OF rows from `first` on."""
    o_r = first + gl.arange(0, ROWS_OF, gl.SliceLayout(1, layout))
    o_d = c * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    # A row that sees no key has sum 0: its output is 0 and its LSE -inf.
    share = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    # [ROWS_OF, HALF]
    starts = row_starts(first, layout, i_b, i_kv, group_size, stride_ob, stride_oh, stride_os, ROWS_OF)
    rounded = (acc * share[:, None]).to(output_ptr.dtype.element_ty)
    gl.store(output_ptr + starts[:, None] + o_d[None, :], rounded, mask=(o_r < rows)[:, None])
    if c == 0:
        log_sum = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(row_sum)) * 0.6931471805599453)
        i_h = i_kv * group_size + o_r % group_size
        lse_ptrs = lse_ptr + (i_b * heads_q + i_h).to(gl.int64) * seq_q + o_r // group_size
        gl.store(lse_ptrs, log_sum, mask=o_r < rows)


@gluon.jit
def store_part(part_ptr, acc, row_max, row_sum, first, stop, layout: gl.constexpr, ROWS_OF: gl.constexpr):
    """Writes ROWS_OF rows from `first` on, up to `stop`, of a part: outputs, then maxima and sums of all rows."""
    o_r = first + gl.arange(0, ROWS_OF, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    m_r = o_r < stop
    gl.store(part_ptr + o_r[:, None] * HALF + o_d[None, :], acc, mask=m_r[:, None])
    gl.store(part_ptr + ROWS * HALF + o_r, row_max, mask=m_r)
    gl.store(part_ptr + ROWS * (HALF + 1) + o_r, row_sum, mask=m_r)


@gluon.jit
def place_of_part(part):
    """Where a part begins behind the first one."""
    return part * (2 * PART_NUMBERS)


@gluon.jit
def add_parts(parts_ptr, begin, step: gl.constexpr, parts, first, stop):
    """Outputs, maxima and sums of PART_ROWS rows from `first` on, of so many parts: number `begin` and each step-th."""
    o_r = first + gl.arange(0, PART_ROWS, gl.SliceLayout(1, SPREAD))
    o_d = gl.arange(0, HALF, gl.SliceLayout(0, SPREAD))
    row_max = gl.full([PART_ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SPREAD))
    for number in range(0, parts, UNROLL):
        for place in gl.static_range(UNROLL):
            part_ptr = parts_ptr + place_of_part(begin + (number + place) * step)
            m_r = (o_r < stop) & (number + place < parts)
            part_max = gl.load(part_ptr + ROWS * HALF + o_r, mask=m_r, other=LOWEST, cache_modifier=".cg")
            row_max = gl.maximum(row_max, part_max)
    row_sum = gl.zeros([PART_ROWS], gl.float32, gl.SliceLayout(1, SPREAD))
    acc = gl.zeros([PART_ROWS, HALF], gl.float32, SPREAD)
    for number in range(0, parts, UNROLL):
        for place in gl.static_range(UNROLL):
            part_ptr = parts_ptr + place_of_part(begin + (number + place) * step)
            m_r = (o_r < stop) & (number + place < parts)
            part_max = gl.load(part_ptr + ROWS * HALF + o_r, mask=m_r, other=LOWEST, cache_modifier=".cg")
            shrink = gl.exp2(part_max - row_max)
            row_sum += shrink * gl.load(part_ptr + ROWS * (HALF + 1) + o_r, mask=m_r, other=0.0, cache_modifier=".cg")
            # [PART_ROWS, HALF]
            part_acc = gl.load(part_ptr + o_r[:, None] * HALF + o_d[None, :], mask=m_r[:, None], other=0.0,
                cache_modifier=".cg")
            acc += part_acc * shrink[:, None]
    return acc, row_max, row_sum


@gluon.jit
def write_sum(c: gl.constexpr, parts_ptr, begin, step: gl.constexpr, parts, start_r, output_ptr, lse_ptr, stride_ob,
        stride_oh, stride_os, i_b, i_kv, rows, heads_q, group_size, seq_q):
    """Adds up parts of a tile and writes its outputs."""
    for first in range(0, gl.minimum(ROWS, rows - start_r), PART_ROWS):
        acc, row_max, row_sum = add_parts(parts_ptr, begin, step, parts, first, rows - start_r)
        write_rows(c, acc, row_max, row_sum, start_r + first, SPREAD, PART_ROWS, output_ptr, lse_ptr, stride_ob,
            stride_oh, stride_os, i_b, i_kv, rows, heads_q, group_size, seq_q)


@gluon.jit
def leave_part(c: gl.constexpr, acc, row_max, row_sum, layout: gl.constexpr, tile, part, parts, start_r, arrivals_ptr,
        partial_ptr, output_ptr, lse_ptr, stride_ob, stride_oh, stride_os, i_b, i_kv, rows, heads_q, group_size, seq_q):
    """Leaves a part in memory; who is last of a tile adds up all parts, in their order."""
    parts_ptr = partial_ptr + tile.to(gl.int64) * (SPLITS * 2 * PART_NUMBERS) + c * PART_NUMBERS
    store_part(parts_ptr + place_of_part(part), acc, row_max, row_sum, 0, rows - start_r, layout, ROWS)
    gl.thread_barrier()  # the numbers of all threads are in memory before the consumer says so
    if gl.atomic_add(arrivals_ptr + tile * 2 + c, 1, sem="acq_rel", scope="gpu") == parts - 1:
        gl.store(arrivals_ptr + tile * 2 + c, 0)
        write_sum(c, parts_ptr, gl.to_tensor(0), 1, parts, start_r, output_ptr, lse_ptr, stride_ob, stride_oh,
            stride_os, i_b, i_kv, rows, heads_q, group_size, seq_q)


@gluon.jit
def weigh_tile(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs, stride_ob,
        stride_oh, stride_os, queries, query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free, tile,
        part, parts, start_r, i_b, i_kv, begin, inner_end, end, seq_kv, rows, heads_q, group_size, seq_q, scale_log2,
        slot, phase):
    """The first consumer's part in a tile: scores and weights of each block, and the first half of the outputs."""
    load_queries(0, query_ptr, queries, query_rests, row_numbers, start_r, rows, i_b, i_kv, group_size, stride_qb,
        stride_qh, stride_qs)
    acc = gl.zeros([HALF, ROWS], gl.float32, OUTPUTS)
    row_scale = scale_log2 + gl.zeros([ROWS], gl.float32, SCORE_ROWS)
    row_max = gl.full([ROWS], LOWEST, gl.float32, SCORE_ROWS)
    row_sum = gl.zeros([ROWS], gl.float32, SCORE_ROWS)
    for block in range(begin, end):
        mbarrier.wait(key_full.index(slot), phase)
        scores = multiply_keys(queries, query_rests, latents, rests, slot)
        if block >= inner_end:
            scores = hide(scores, start_r, block * BLOCK_N, group_size, seq_kv)
        new_max = gl.maximum(row_max, gl.max(scores, 0) * row_scale)
        shrink = gl.exp2(row_max - new_max)
        weights = gl.exp2(scores * row_scale[None, :] - new_max[None, :])
        row_sum = row_sum * shrink + gl.sum(weights, 0)
        row_max = new_max
        rounded = weights.to(ELEMENT)
        wait_read()  # the weights before
        weight_tile.store(rounded)
        row_numbers.index(0).store(shrink)
        fence_async_shared()
        say_weighed()
        if block >= inner_end:
            clear_values(0, latents, slot, block * BLOCK_N, seq_kv)
        acc = acc * gl.convert_layout(shrink, OUTPUT_ROWS)[None, :]
        gl.thread_barrier()  # of this warpgroup, whose next product reads the weights of all its threads
        token = add_values(0, weight_tile, latents, slot, acc)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
        mbarrier.arrive(key_free.index(slot), count=1)
        slot, phase = advance(slot, phase, STAGES)
    wait_read()
    row_numbers.index(0).store(row_max)
    row_numbers.index(1).store(row_sum)
    meet()
    acc = acc.permute((1, 0))
    # [ROWS, HALF]
    layout: gl.constexpr = acc.type.layout
    row_max = row_numbers.index(0).load(gl.SliceLayout(1, layout))
    row_sum = row_numbers.index(1).load(gl.SliceLayout(1, layout))
    if parts > 1:
        leave_part(0, acc, row_max, row_sum, layout, tile, part, parts, start_r, arrivals_ptr, partial_ptr, output_ptr,
            lse_ptr, stride_ob, stride_oh, stride_os, i_b, i_kv, rows, heads_q, group_size, seq_q)
    else:
        write_rows(0, acc, row_max, row_sum, start_r, layout, ROWS, output_ptr, lse_ptr, stride_ob, stride_oh,
            stride_os, i_b, i_kv, rows, heads_q, group_size, seq_q)
    return slot, phase


@gluon.jit
def add_tile(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs, stride_ob,
        stride_oh, stride_os, queries, query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free, tile,
        part, parts, start_r, i_b, i_kv, begin, inner_end, end, seq_kv, rows, heads_q, group_size, seq_q, slot):
    """The second consumer's part in a tile: the second half of the outputs."""
    load_queries(1, query_ptr, queries, query_rests, row_numbers, start_r, rows, i_b, i_kv, group_size, stride_qb,
        stride_qh, stride_qs)
    acc = gl.zeros([HALF, ROWS], gl.float32, OUTPUTS)
    say_read()
    for block in range(begin, end):
        wait_weighed()
        shrink = row_numbers.index(0).load(OUTPUT_ROWS)
        if block >= inner_end:
            clear_values(1, latents, slot, block * BLOCK_N, seq_kv)
        acc = acc * shrink[None, :]
        token = add_values(1, weight_tile, latents, slot, acc)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
        say_read()
        mbarrier.arrive(key_free.index(slot), count=1)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    meet()
    acc = acc.permute((1, 0))
    # [ROWS, HALF]
    layout: gl.constexpr = acc.type.layout
    row_max = row_numbers.index(0).load(gl.SliceLayout(1, layout))
    row_sum = row_numbers.index(1).load(gl.SliceLayout(1, layout))
    if parts > 1:
        leave_part(1, acc, row_max, row_sum, layout, tile, part, parts, start_r, arrivals_ptr, partial_ptr, output_ptr,
            lse_ptr, stride_ob, stride_oh, stride_os, i_b, i_kv, rows, heads_q, group_size, seq_q)
    else:
        write_rows(1, acc, row_max, row_sum, start_r, layout, ROWS, output_ptr, lse_ptr, stride_ob, stride_oh,
            stride_os, i_b, i_kv, rows, heads_q, group_size, seq_q)
    return slot


@gluon.jit
def weigh(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs, stride_ob,
        stride_oh, stride_os, queries, query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free,
        lengths_ptr, cache_rows_ptr, leftpad_ptr, batch_heads, seq_q, capacity, heads_q, group_size, scale_log2):
    """The first consumer."""
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile = gl.program_id(0) // SPLITS
    start_r, i_b, i_kv, i_c, begin_kv, seq_kv, inner_end, end_n = place_of(tile, lengths_ptr, cache_rows_ptr,
        leftpad_ptr, batch_heads, seq_q, capacity, heads_q, group_size)
    part, parts, begin, end = part_of(end_n)
    if part < parts:
        slot, phase = weigh_tile(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh,
            stride_qs, stride_ob, stride_oh, stride_os, queries, query_rests, latents, rests, weight_tile, row_numbers,
            key_full, key_free, tile, part, parts, start_r, i_b, i_kv, begin, inner_end, end, seq_kv,
            seq_q * group_size, heads_q, group_size, seq_q, scale_log2, slot, phase)


@gluon.jit
def add(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs, stride_ob,
        stride_oh, stride_os, queries, query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free,
        lengths_ptr, cache_rows_ptr, leftpad_ptr, batch_heads, seq_q, capacity, heads_q, group_size, scale_log2):
    """The second consumer."""
    slot = gl.to_tensor(0)
    tile = gl.program_id(0) // SPLITS
    start_r, i_b, i_kv, i_c, begin_kv, seq_kv, inner_end, end_n = place_of(tile, lengths_ptr, cache_rows_ptr,
        leftpad_ptr, batch_heads, seq_q, capacity, heads_q, group_size)
    part, parts, begin, end = part_of(end_n)
    if part < parts:
        slot = add_tile(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs,
            stride_ob, stride_oh, stride_os, queries, query_rests, latents, rests, weight_tile, row_numbers, key_full,
            key_free, tile, part, parts, start_r, i_b, i_kv, begin, inner_end, end, seq_kv, seq_q * group_size, heads_q,
            group_size, seq_q, slot)


@gluon.jit
def produce(key_low, key_high, latents, rests, key_full, key_free, lengths_ptr, cache_rows_ptr, leftpad_ptr,
        batch_heads, seq_q, capacity, heads_q, group_size):
    """The producer."""
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    tile = gl.program_id(0) // SPLITS
    start_r, i_b, i_kv, i_c, begin_kv, seq_kv, inner_end, end_n = place_of(tile, lengths_ptr, cache_rows_ptr,
        leftpad_ptr, batch_heads, seq_q, capacity, heads_q, group_size)
    part, parts, begin, end = part_of(end_n)
    if part < parts:
        slot, phase = load_tile(key_low, key_high, latents, rests, key_full, key_free, i_c, begin_kv, i_kv, begin, end,
            slot, phase)


@gluon.jit
def forward(
    key_low, key_high, query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs,
    stride_ob, stride_oh, stride_os, lengths_ptr, cache_rows_ptr, leftpad_ptr,
    batch_heads, seq_q, capacity, heads_q, group_size, scale_log2
):
    """Each program has a part in a tile, or all of it: ROWS rows of one key head of one sequence."""
    queries = gl.allocate_shared_memory(ELEMENT, [1, ROWS, WIDTH],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
    query_rests = gl.allocate_shared_memory(ELEMENT, [1, ROWS, REST],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
    latents = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, 1, BLOCK_N, WIDTH],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4))
    rests = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, 1, BLOCK_N, REST],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4))
    weight_tile = gl.allocate_shared_memory(ELEMENT, [BLOCK_N, ROWS],
        gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
    row_numbers = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(key_full.index(place), count=1)
        mbarrier.init(key_free.index(place), count=2)
    sizes = (lengths_ptr, cache_rows_ptr, leftpad_ptr, batch_heads, seq_q, capacity, heads_q, group_size)
    rooms = (query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs, stride_ob,
        stride_oh, stride_os, queries, query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free)
    gl.warp_specialize(
        [
            (weigh, rooms + sizes + (scale_log2,)),
            (add, rooms + sizes + (scale_log2,)),
            (produce, (key_low, key_high, latents, rests, key_full, key_free) + sizes),
        ],
        [4, 1],  # warps; the first consumer has OPTIONS["num_warps"]
        [240, 24],  # registers of a thread; the first consumer has the rest
    )
    gl.thread_barrier()  # nothing else may lie where a barrier was made until it is dropped
    for place in gl.static_range(STAGES):
        mbarrier.invalidate(key_full.index(place))
        mbarrier.invalidate(key_free.index(place))
