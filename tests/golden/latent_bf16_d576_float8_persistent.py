"""Forward attention on a latent cache in Gluon for Hopper (sm_90), for one kind of problem.

    bfloat16, head dim 576, values 512, causal (bottom-right), cache paged:64,float8_e4m3,latent
    BLOCK_M=64 BLOCK_N=32 PART_BLOCKS=4 PERSISTENT=1 SPLITS=1 byte_stages=4 num_stages=2

Rendered by autoattn from the template latent/forward; it imports only triton and stands alone. Values are the first
elements of keys, so that a block of keys serves both products. The producer, a warpgroup, has the TMA unit bring blocks
of keys into shared memory, and converts them. Two consumers, warpgroups of four warps, each own half of the
columns of the outputs of ROWS rows: queries of all heads that share keys. The first one also computes scores and
weights, and leaves the weights in shared memory for both (FlashMLA, https://github.com/deepseek-ai/FlashMLA).
To launch:

    forward[grid(batch, heads_q, seq_q, sm_count)](*arguments in the order of SIGNATURE, **OPTIONS)

for which heads_q counts the heads of the keys, and seq_q each query once for each head that shares a key, and where
scale_log2 = scale * log2(e), scale > 0, and lse is in natural logarithms, [batch, heads_q, seq_q].
The arguments in DESCRIPTORS are TMA descriptors of [pages, heads, page, head_dim] views.
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

ROWS = gl.constexpr(64)  # of a tile: queries of all heads that share keys
PACK_GQA = True
WIDTH = gl.constexpr(512)  # of values, the first elements of keys
REST = gl.constexpr(64)  # of the elements of keys behind them
HALF = gl.constexpr(256)  # columns of the outputs that a consumer has
BLOCK_N = gl.constexpr(32)  # keys a step
STAGES = gl.constexpr(2)  # blocks of keys that shared memory holds
BYTE_STAGES = gl.constexpr(4)  # of these as they lie in the cache, of 8 bits
PAGE = gl.constexpr(64)  # keys of a page of the cache
PART_BLOCKS = gl.constexpr(4)  # blocks of keys that a program takes, at least
GROUP_PARTS = gl.constexpr(8)  # parts of a tile that are added up before those of other groups
SEQUENCES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # whose lengths are read at once
PART_ROWS = gl.constexpr(16)  # that are added up at once
UNROLL = gl.constexpr(4)  # parts of a tile that are asked for at once
PART_NUMBERS = gl.constexpr(16512)  # of a part of a consumer's: outputs, and each row's maximum and sum
SPREAD = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
LOWEST = gl.constexpr(-3.0e38)  # below every score, but finite: LOWEST - LOWEST is 0, not NaN
ELEMENT = gl.constexpr(gl.float16)  # of products
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
SCORE_KEYS = gl.constexpr(gl.SliceLayout(0, SCORES))
OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUTS))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=OUTPUTS, k_width=2))
HALF_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))  # rows of a consumer's half of values
REST_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # rows of the rest of keys
LATENT_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))  # rows of values

# TMA descriptors: argument -> block and layout
DESCRIPTORS = {
    "key_low": ([1, 1, 32, 512], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)),
    "key_high": ([1, 1, 32, 64], gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=4)),
}
OPTIONS = {"num_warps": 4}
SIGNATURE = {
    **{name: f"tensordesc<fp8e4nv{block},{layout}>" for name, (block, layout) in DESCRIPTORS.items()},
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
DIVISIBLE = {"query_ptr": 16, "output_ptr": 16}
DIVISIBLE |= {name: 8 for name in SIGNATURE if name[:8] in ("stride_q", "stride_o")}
DIVISIBLE["partial_ptr"] = 16


def grid(batch, heads_q, seq_q, sm_count):
    """Programs to launch."""
    return (min(sm_count, 144),)


def arrivals(batch, heads_q, seq_q):
    """Zeros that a launch needs room for, and leaves as zeros: groups that are done, of each consumer of a tile."""
    return 2 * batch * heads_q * triton.cdiv(seq_q, 64) * 19


def partials(batch, heads_q, seq_q):
    """Numbers of float32 that a launch needs room for: a program's outputs, and each row's maximum and sum."""
    return 9510912


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
def place_of(tile, lengths_ptr, pages_ptr, stride_pb, batch_heads, seq_q, capacity, heads_q, group_size):
    """First row, sequence and key head of a tile, where its keys lie, and how many its sequence has; which blocks all
    rows see, those before inner_end; and behind which key none sees any, and which one is the last for a query."""
    row_tiles = gl.cdiv(seq_q * group_size, ROWS)
    heads_kv = heads_q // group_size
    i_bh = tile // row_tiles
    start_r = (row_tiles - 1 - tile % row_tiles) * ROWS  # the longest rows start first
    i_b = i_bh // heads_kv
    i_kv = i_bh % heads_kv
    # A length that is wrong reaches no further than the cache.
    seq_kv = gl.maximum(0, gl.minimum(gl.load(lengths_ptr + i_b), capacity))
    pages_ptr += i_b * stride_pb
    shift = seq_kv - seq_q  # the query at row i stands at key i + shift
    last = shift  # query i sees the keys up to i + last
    inner_end = gl.maximum(0, gl.minimum(seq_kv, start_r // group_size + last + 1)) // BLOCK_N
    end_n = gl.maximum(0, gl.minimum(seq_kv, (start_r + ROWS - 1) // group_size + 1 + last))
    return start_r, i_b, i_kv, pages_ptr, seq_kv, inner_end, end_n, last


@gluon.jit
def plus(left, right):
    """The sum of two numbers."""
    return left + right


@gluon.jit
def blocks_of(lengths, capacity):
    """Blocks of keys of a sequence; one at least, since somebody must write its outputs."""
    return gl.maximum(1, gl.cdiv(gl.minimum(lengths, capacity), BLOCK_N))


@gluon.jit
def share_of(program, lengths_ptr, capacity, batch, sequence_tiles):
    """A program's share of all blocks of keys, tile behind tile: its first one and that behind its last.

    Also how many blocks there are and how many programs share them; and of the sequence in which the share begins, the
    number and the first block.
    """
    o_s = gl.arange(0, 128, SEQUENCES)
    total = gl.to_tensor(0)
    for first in range(0, batch, 128):
        inside = first + o_s < batch
        own = blocks_of(gl.load(lengths_ptr + first + o_s, mask=inside, other=0), capacity)
        total += gl.sum(gl.where(inside, own, 0), 0)
    total *= sequence_tiles
    programs = gl.maximum(1, gl.minimum(gl.num_programs(0), total // PART_BLOCKS))
    block = gl.minimum(program, programs) * total // programs
    sequence = gl.to_tensor(0)
    base = gl.to_tensor(0)
    end = gl.to_tensor(0)
    for first in range(0, batch, 128):
        inside = first + o_s < batch
        own = blocks_of(gl.load(lengths_ptr + first + o_s, mask=inside, other=0), capacity)
        own = gl.where(inside, own, 0) * sequence_tiles
        ends = end + gl.associative_scan(own, 0, plus)
        passed = inside & (ends <= block)
        sequence += gl.sum(passed.to(gl.int32), 0)
        base = gl.maximum(base, gl.max(gl.where(passed, ends, 0), 0))
        end += gl.sum(own, 0)
    stop = gl.minimum(program + 1, programs) * total // programs
    return block, stop, total, programs, sequence, base


@gluon.jit
def program_of(block, total, programs):
    """Which program has a block: the last one whose first block is not behind it."""
    return ((block + 1) * programs + total - 1) // total - 1


@gluon.jit
def load_tile(key_low, key_high, low_bytes, high_bytes, byte_full, latents, rests, key_full, key_free, tile_pages_ptr,
        i_kv, begin, end, byte_slot, byte_phase, slot, phase):
    """Has the blocks of keys from `begin` to before `end` brought as they lie in the cache, and makes float16 of each,
    once for both products."""
    coming_slot = byte_slot
    for block in range(begin, gl.minimum(begin + BYTE_STAGES, end)):
        page = gl.load(tile_pages_ptr + block * BLOCK_N // PAGE, mask=block < end, other=0)
        row = block * BLOCK_N % PAGE
        mbarrier.expect(byte_full.index(coming_slot), key_low.block_type.nbytes + key_high.block_type.nbytes)
        # [BLOCK_N, WIDTH] and [BLOCK_N, REST]
        tma.async_copy_global_to_shared(key_low, [page, i_kv, row, 0], byte_full.index(coming_slot),
            low_bytes.index(coming_slot))
        tma.async_copy_global_to_shared(key_high, [page, i_kv, row, WIDTH], byte_full.index(coming_slot),
            high_bytes.index(coming_slot))
        coming_slot = gl.where(coming_slot == BYTE_STAGES - 1, 0, coming_slot + 1)
    for block in range(begin, end):
        coming = block + BYTE_STAGES
        page = gl.load(tile_pages_ptr + coming * BLOCK_N // PAGE, mask=coming < end,
            other=0)  # while this block is converted
        mbarrier.wait(byte_full.index(byte_slot), byte_phase)
        mbarrier.wait(key_free.index(slot), phase)
        source = low_bytes.index(byte_slot).reshape([BLOCK_N, WIDTH])
        target = latents.index(slot).reshape([BLOCK_N, WIDTH])
        for part in gl.static_range(2):
            tile = source.slice(part * 16, 16).load(LATENT_ROWS)
            target.slice(part * 16, 16).store(tile.to(ELEMENT))
        tile = high_bytes.index(byte_slot).reshape([BLOCK_N, REST]).load(REST_ROWS)
        rests.index(slot).reshape([BLOCK_N, REST]).store(tile.to(ELEMENT))
        fence_async_shared()
        mbarrier.arrive(key_full.index(slot), count=1)  # behind a barrier of all threads of this warpgroup
        if coming < end:
            row = coming * BLOCK_N % PAGE
            mbarrier.expect(byte_full.index(byte_slot), key_low.block_type.nbytes + key_high.block_type.nbytes)
            # [BLOCK_N, WIDTH] and [BLOCK_N, REST]
            tma.async_copy_global_to_shared(key_low, [page, i_kv, row, 0], byte_full.index(byte_slot),
                low_bytes.index(byte_slot))
            tma.async_copy_global_to_shared(key_high, [page, i_kv, row, WIDTH], byte_full.index(byte_slot),
                high_bytes.index(byte_slot))
        byte_slot, byte_phase = advance(byte_slot, byte_phase, BYTE_STAGES)
        slot, phase = advance(slot, phase, STAGES)
    return byte_slot, byte_phase, slot, phase


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
    # float16 holds bfloat16 numbers up to 2: a row is divided by a power of two, and its scores are multiplied by it.
    largest = gl.max(gl.abs(query.to(gl.float32)), 1)
    if c == 1:
        largest_rest = gl.max(gl.abs(query_rest.to(gl.float32)), 1)
        largest = gl.maximum(largest, gl.convert_layout(largest_rest, largest.type.layout))
    row_numbers.index(2 + c).store(largest)
    meet()
    query = (query.to(gl.float32) / row_factors(row_numbers, gl.SliceLayout(1, HALF_ROWS))[:, None]).to(ELEMENT)
    if c == 1:
        query_rest = (query_rest.to(gl.float32) / row_factors(row_numbers,
            gl.SliceLayout(1, REST_ROWS))[:, None]).to(ELEMENT)
    queries.index(0).slice(c * HALF, HALF, dim=1).store(query)
    if c == 1:
        query_rests.index(0).store(query_rest)
    fence_async_shared()
    meet()


@gluon.jit
def row_factors(row_numbers, layout: gl.constexpr):
    """[ROWS]: the power of two that each row of the queries is divided by."""
    largest = gl.maximum(row_numbers.index(2).load(layout), row_numbers.index(3).load(layout))
    return gl.exp2(gl.floor(gl.log2(gl.maximum(largest, 1.0e-30))))


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
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    # [ROWS, WIDTH] x [WIDTH, BLOCK_N]
    token = warpgroup_mma(queries.index(nought), latent.permute((1, 0)), zeros, use_acc=False, is_async=True)
    # [ROWS, REST] x [REST, BLOCK_N]
    token = warpgroup_mma(query_rests.index(nought), rest.permute((1, 0)), token, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(token,))


@gluon.jit
def add_values(c: gl.constexpr, weights, latents, slot, acc):
    """Starts adding a consumer's columns of a block of values, weighted."""
    values = latents.index(slot).reshape([BLOCK_N, WIDTH]).slice(c * HALF, HALF, dim=1)
    # [ROWS, BLOCK_N] x [BLOCK_N, HALF]
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def hide(scores, start_r, start_n, group_size, seq_kv, last):
    """-inf where the mask hides the key."""
    o_m = (start_r + gl.arange(0, ROWS, SCORE_ROWS)) // group_size
    o_n = start_n + gl.arange(0, BLOCK_N, SCORE_KEYS)
    return gl.where(o_n[None, :] <= o_m[:, None] + last, scores, float("-inf"))


@gluon.jit
def clear_values(c: gl.constexpr, latents, slot, start_n, seq_kv):
    """Sets a consumer's values behind the last key to 0: anything may lie there, and a weight of 0 makes NaN of NaN."""
    tile = latents.index(slot).reshape([BLOCK_N, WIDTH])
    for part in gl.static_range(2):
        place = tile.slice(part * 16, 16).slice(c * HALF, HALF, dim=1)
        values = place.load(HALF_ROWS)
        o_n = start_n + part * 16 + gl.arange(0, 16, gl.SliceLayout(1, HALF_ROWS))
        kept = (o_n < seq_kv)[:, None]
        # A row that sees a key which is no finite number is NaN by its score; 0 * NaN would spoil the others too.
        kept = kept & (values * 0.0 == 0.0)
        place.store(gl.where(kept, values, gl.zeros([16, HALF], ELEMENT, HALF_ROWS)))
    fence_async_shared()
    gl.thread_barrier()  # of this warpgroup, whose next product reads what all its threads wrote


@gluon.jit
def write_rows(c: gl.constexpr, acc, row_max, row_sum, first, layout: gl.constexpr, ROWS_OF: gl.constexpr, output_ptr,
        lse_ptr, stride_ob, stride_oh, stride_os, value_scale_ptr, stride_vfb, stride_vfh, i_b, i_kv, rows, heads_q,
        group_size, seq_q):
    """Writes a consumer's columns of ROWS_OF rows from `first` on."""
    o_r = first + gl.arange(0, ROWS_OF, gl.SliceLayout(1, layout))
    o_d = c * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    # A row that sees no key has sum 0: its output is 0 and its LSE -inf.
    share = gl.where(row_sum == 0.0, 0.0, gl.load(value_scale_ptr + i_b * stride_vfb + i_kv * stride_vfh) / row_sum)
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
    """Where a part begins behind the room of the first one's program.

    A program leaves two parts: of the tile in which it begins, and of that in which it ends, whose first part it has.
    """
    return (2 * part + (part == 0).to(gl.int32)) * (2 * PART_NUMBERS)


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
        stride_oh, stride_os, value_scale_ptr, stride_vfb, stride_vfh, i_b, i_kv, rows, heads_q, group_size, seq_q):
    """Adds up parts of a tile and writes its outputs."""
    for first in range(0, gl.minimum(ROWS, rows - start_r), PART_ROWS):
        acc, row_max, row_sum = add_parts(parts_ptr, begin, step, parts, first, rows - start_r)
        write_rows(c, acc, row_max, row_sum, start_r + first, SPREAD, PART_ROWS, output_ptr, lse_ptr, stride_ob,
            stride_oh, stride_os, value_scale_ptr, stride_vfb, stride_vfh, i_b, i_kv, rows, heads_q, group_size, seq_q)


@gluon.jit
def leave_part(c: gl.constexpr, acc, row_max, row_sum, layout: gl.constexpr, tile, part, parts, start_r, arrivals_ptr,
        partial_ptr, output_ptr, lse_ptr, stride_ob, stride_oh, stride_os, value_scale_ptr, stride_vfb, stride_vfh, i_b,
        i_kv, rows, heads_q, group_size, seq_q):
    """Leaves a part in memory; who is last of a tile adds up all parts, in their order."""
    parts_ptr = partial_ptr + (gl.program_id(0) - part).to(gl.int64) * (4 * PART_NUMBERS) + c * PART_NUMBERS
    store_part(parts_ptr + place_of_part(part), acc, row_max, row_sum, 0, rows - start_r, layout, ROWS)
    gl.thread_barrier()  # the numbers of all threads are in memory before the consumer says so
    # Who is last of a group adds up its parts in their order, and who is last of these the sums of all groups.
    done_ptr = arrivals_ptr + (tile * 2 + c) * 19
    group = part // GROUP_PARTS
    groups = gl.cdiv(parts, GROUP_PARTS)
    members = gl.minimum(GROUP_PARTS, parts - group * GROUP_PARTS)
    if gl.atomic_add(done_ptr + 1 + group, 1, sem="acq_rel", scope="gpu") == members - 1:
        gl.store(done_ptr + 1 + group, 0)
        begin = group * GROUP_PARTS
        if groups == 1:
            write_sum(c, parts_ptr, begin, 1, members, start_r, output_ptr, lse_ptr, stride_ob, stride_oh, stride_os,
                value_scale_ptr, stride_vfb, stride_vfh, i_b, i_kv, rows, heads_q, group_size, seq_q)
        else:
            for first in range(0, gl.minimum(ROWS, rows - start_r), PART_ROWS):
                group_acc, group_max, group_sum = add_parts(parts_ptr, begin, 1, members, first, rows - start_r)
                gl.thread_barrier()  # all threads have read the rows in whose place the sum is written
                store_part(parts_ptr + place_of_part(begin), group_acc, group_max, group_sum, first, rows - start_r,
                    SPREAD, PART_ROWS)
            gl.thread_barrier()
            if gl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == groups - 1:
                gl.store(done_ptr, 0)
                write_sum(c, parts_ptr, gl.to_tensor(0), GROUP_PARTS, groups, start_r, output_ptr, lse_ptr, stride_ob,
                    stride_oh, stride_os, value_scale_ptr, stride_vfb, stride_vfh, i_b, i_kv, rows, heads_q, group_size,
                    seq_q)


@gluon.jit
def weigh_tile(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs, stride_ob,
        stride_oh, stride_os, key_scale_ptr, stride_kfb, stride_kfh, value_scale_ptr, stride_vfb, stride_vfh, queries,
        query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free, tile, part, parts, start_r, i_b,
        i_kv, begin, inner_end, end, seq_kv, last, rows, heads_q, group_size, seq_q, scale_log2, slot, phase):
    """The first consumer's part in a tile: scores and weights of each block, and the first half of the outputs."""
    load_queries(0, query_ptr, queries, query_rests, row_numbers, start_r, rows, i_b, i_kv, group_size, stride_qb,
        stride_qh, stride_qs)
    acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUTS)
    scale_log2 = scale_log2 * gl.load(key_scale_ptr + i_b * stride_kfb + i_kv * stride_kfh)
    row_scale = scale_log2 * row_factors(row_numbers, SCORE_ROWS)
    row_max = gl.full([ROWS], LOWEST, gl.float32, SCORE_ROWS)
    row_sum = gl.zeros([ROWS], gl.float32, SCORE_ROWS)
    for block in range(begin, end):
        mbarrier.wait(key_full.index(slot), phase)
        scores = multiply_keys(queries, query_rests, latents, rests, slot)
        if block >= inner_end:
            scores = hide(scores, start_r, block * BLOCK_N, group_size, seq_kv, last)
        new_max = gl.maximum(row_max, gl.max(scores, 1) * row_scale)
        shrink = gl.exp2(row_max - new_max)
        weights = gl.exp2(scores * row_scale[:, None] - new_max[:, None])
        row_sum = row_sum * shrink + gl.sum(weights, 1)
        row_max = new_max
        rounded = weights.to(ELEMENT)
        wait_read()  # the weights before
        weight_tile.store(rounded)
        row_numbers.index(0).store(shrink)
        fence_async_shared()
        say_weighed()
        if block >= inner_end:
            clear_values(0, latents, slot, block * BLOCK_N, seq_kv)
        acc = acc * gl.convert_layout(shrink, OUTPUT_ROWS)[:, None]
        factor = gl.convert_layout(rounded, WEIGHTS)
        token = add_values(0, factor, latents, slot, acc)
        acc, factor = warpgroup_mma_wait(num_outstanding=0, deps=(token, factor))
        mbarrier.arrive(key_free.index(slot), count=1)
        slot, phase = advance(slot, phase, STAGES)
    wait_read()
    row_numbers.index(0).store(row_max)
    row_numbers.index(1).store(row_sum)
    meet()
    # [ROWS, HALF]
    layout: gl.constexpr = OUTPUTS
    row_max = row_numbers.index(0).load(gl.SliceLayout(1, layout))
    row_sum = row_numbers.index(1).load(gl.SliceLayout(1, layout))
    if parts > 1:
        leave_part(0, acc, row_max, row_sum, layout, tile, part, parts, start_r, arrivals_ptr, partial_ptr, output_ptr,
            lse_ptr, stride_ob, stride_oh, stride_os, value_scale_ptr, stride_vfb, stride_vfh, i_b, i_kv, rows, heads_q,
            group_size, seq_q)
    else:
        write_rows(0, acc, row_max, row_sum, start_r, layout, ROWS, output_ptr, lse_ptr, stride_ob, stride_oh,
            stride_os, value_scale_ptr, stride_vfb, stride_vfh, i_b, i_kv, rows, heads_q, group_size, seq_q)
    return slot, phase


@gluon.jit
def add_tile(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs, stride_ob,
        stride_oh, stride_os, key_scale_ptr, stride_kfb, stride_kfh, value_scale_ptr, stride_vfb, stride_vfh, queries,
        query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free, tile, part, parts, start_r, i_b,
        i_kv, begin, inner_end, end, seq_kv, last, rows, heads_q, group_size, seq_q, slot):
    """The second consumer's part in a tile: the second half of the outputs."""
    load_queries(1, query_ptr, queries, query_rests, row_numbers, start_r, rows, i_b, i_kv, group_size, stride_qb,
        stride_qh, stride_qs)
    acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUTS)
    say_read()
    for block in range(begin, end):
        wait_weighed()
        shrink = row_numbers.index(0).load(OUTPUT_ROWS)
        if block >= inner_end:
            clear_values(1, latents, slot, block * BLOCK_N, seq_kv)
        acc = acc * shrink[:, None]
        token = add_values(1, weight_tile, latents, slot, acc)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
        say_read()
        mbarrier.arrive(key_free.index(slot), count=1)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    meet()
    # [ROWS, HALF]
    layout: gl.constexpr = OUTPUTS
    row_max = row_numbers.index(0).load(gl.SliceLayout(1, layout))
    row_sum = row_numbers.index(1).load(gl.SliceLayout(1, layout))
    if parts > 1:
        leave_part(1, acc, row_max, row_sum, layout, tile, part, parts, start_r, arrivals_ptr, partial_ptr, output_ptr,
            lse_ptr, stride_ob, stride_oh, stride_os, value_scale_ptr, stride_vfb, stride_vfh, i_b, i_kv, rows, heads_q,
            group_size, seq_q)
    else:
        write_rows(1, acc, row_max, row_sum, start_r, layout, ROWS, output_ptr, lse_ptr, stride_ob, stride_oh,
            stride_os, value_scale_ptr, stride_vfb, stride_vfh, i_b, i_kv, rows, heads_q, group_size, seq_q)
    return slot


@gluon.jit
def weigh(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs, stride_ob,
        stride_oh, stride_os, key_scale_ptr, stride_kfb, stride_kfh, value_scale_ptr, stride_vfb, stride_vfh, queries,
        query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free, lengths_ptr, pages_ptr, stride_pb,
        batch_heads, seq_q, capacity, heads_q, group_size, scale_log2, block, stop, total, programs, sequence, base):
    """The first consumer."""
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    sequence_tiles = gl.cdiv(seq_q * group_size, ROWS) * (heads_q // group_size)
    while block < stop:
        own = blocks_of(gl.load(lengths_ptr + sequence), capacity)
        before = (block - base) // own  # tiles of the sequence
        tile = sequence * sequence_tiles + before
        first = base + before * own
        part = gl.program_id(0) - program_of(first, total, programs)
        parts = program_of(first + own - 1, total, programs) + 1 - gl.program_id(0) + part
        start_r, i_b, i_kv, tile_pages_ptr, seq_kv, inner_end, end_n, last = place_of(tile, lengths_ptr, pages_ptr,
            stride_pb, batch_heads, seq_q, capacity, heads_q, group_size)
        end = gl.minimum(gl.minimum(own, stop - first), gl.cdiv(end_n, BLOCK_N))
        begin = gl.minimum(block - first, end)
        slot, phase = weigh_tile(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh,
            stride_qs, stride_ob, stride_oh, stride_os, key_scale_ptr, stride_kfb, stride_kfh, value_scale_ptr,
            stride_vfb, stride_vfh, queries, query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free,
            tile, part, parts, start_r, i_b, i_kv, begin, inner_end, end, seq_kv, last, seq_q * group_size, heads_q,
            group_size, seq_q, scale_log2, slot, phase)
        block = gl.minimum(first + own, stop)
        over = block == base + own * sequence_tiles
        base = gl.where(over, block, base)
        sequence = gl.where(over, sequence + 1, sequence)


@gluon.jit
def add(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs, stride_ob,
        stride_oh, stride_os, key_scale_ptr, stride_kfb, stride_kfh, value_scale_ptr, stride_vfb, stride_vfh, queries,
        query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free, lengths_ptr, pages_ptr, stride_pb,
        batch_heads, seq_q, capacity, heads_q, group_size, scale_log2, block, stop, total, programs, sequence, base):
    """The second consumer."""
    slot = gl.to_tensor(0)
    sequence_tiles = gl.cdiv(seq_q * group_size, ROWS) * (heads_q // group_size)
    while block < stop:
        own = blocks_of(gl.load(lengths_ptr + sequence), capacity)
        before = (block - base) // own  # tiles of the sequence
        tile = sequence * sequence_tiles + before
        first = base + before * own
        part = gl.program_id(0) - program_of(first, total, programs)
        parts = program_of(first + own - 1, total, programs) + 1 - gl.program_id(0) + part
        start_r, i_b, i_kv, tile_pages_ptr, seq_kv, inner_end, end_n, last = place_of(tile, lengths_ptr, pages_ptr,
            stride_pb, batch_heads, seq_q, capacity, heads_q, group_size)
        end = gl.minimum(gl.minimum(own, stop - first), gl.cdiv(end_n, BLOCK_N))
        begin = gl.minimum(block - first, end)
        slot = add_tile(query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs,
            stride_ob, stride_oh, stride_os, key_scale_ptr, stride_kfb, stride_kfh, value_scale_ptr, stride_vfb,
            stride_vfh, queries, query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free, tile, part,
            parts, start_r, i_b, i_kv, begin, inner_end, end, seq_kv, last, seq_q * group_size, heads_q, group_size,
            seq_q, slot)
        block = gl.minimum(first + own, stop)
        over = block == base + own * sequence_tiles
        base = gl.where(over, block, base)
        sequence = gl.where(over, sequence + 1, sequence)


@gluon.jit
def produce(key_low, key_high, low_bytes, high_bytes, byte_full, latents, rests, key_full, key_free, lengths_ptr,
        pages_ptr, stride_pb, batch_heads, seq_q, capacity, heads_q, group_size, block, stop, total, programs, sequence,
        base):
    """The producer."""
    byte_slot = gl.to_tensor(0)
    byte_phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    sequence_tiles = gl.cdiv(seq_q * group_size, ROWS) * (heads_q // group_size)
    while block < stop:
        own = blocks_of(gl.load(lengths_ptr + sequence), capacity)
        before = (block - base) // own  # tiles of the sequence
        tile = sequence * sequence_tiles + before
        first = base + before * own
        part = gl.program_id(0) - program_of(first, total, programs)
        parts = program_of(first + own - 1, total, programs) + 1 - gl.program_id(0) + part
        start_r, i_b, i_kv, tile_pages_ptr, seq_kv, inner_end, end_n, last = place_of(tile, lengths_ptr, pages_ptr,
            stride_pb, batch_heads, seq_q, capacity, heads_q, group_size)
        end = gl.minimum(gl.minimum(own, stop - first), gl.cdiv(end_n, BLOCK_N))
        begin = gl.minimum(block - first, end)
        byte_slot, byte_phase, slot, phase = load_tile(key_low, key_high, low_bytes, high_bytes, byte_full, latents,
            rests, key_full, key_free, tile_pages_ptr, i_kv, begin, end, byte_slot, byte_phase, slot, phase)
        block = gl.minimum(first + own, stop)
        over = block == base + own * sequence_tiles
        base = gl.where(over, block, base)
        sequence = gl.where(over, sequence + 1, sequence)


@gluon.jit
def forward(
    key_low, key_high, query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs,
    stride_ob, stride_oh, stride_os, key_scale_ptr, stride_kfb, stride_kfh, value_scale_ptr, stride_vfb, stride_vfh,
    lengths_ptr, pages_ptr, stride_pb,
    batch_heads, seq_q, capacity, heads_q, group_size, scale_log2
):
    """Programs share all blocks of keys evenly, tile behind tile: ROWS rows of one key head of one sequence."""
    queries = gl.allocate_shared_memory(ELEMENT, [1, ROWS, WIDTH],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
    query_rests = gl.allocate_shared_memory(ELEMENT, [1, ROWS, REST],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
    latents = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, 1, BLOCK_N, WIDTH],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4))
    rests = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, 1, BLOCK_N, REST],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4))
    weight_tile = gl.allocate_shared_memory(ELEMENT, [ROWS, BLOCK_N],
        gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
    row_numbers = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(key_full.index(place), count=1)
        mbarrier.init(key_free.index(place), count=2)
    low_bytes = gl.allocate_shared_memory(gl.float8e4nv, [BYTE_STAGES, 1, 1, BLOCK_N, WIDTH], key_low.layout)
    high_bytes = gl.allocate_shared_memory(gl.float8e4nv, [BYTE_STAGES, 1, 1, BLOCK_N, REST], key_high.layout)
    byte_full = gl.allocate_shared_memory(gl.int64, [BYTE_STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(BYTE_STAGES):
        mbarrier.init(byte_full.index(place), count=1)
    sequence_tiles = gl.cdiv(seq_q * group_size, ROWS) * (heads_q // group_size)
    share = share_of(gl.program_id(0), lengths_ptr, capacity, batch_heads // heads_q, sequence_tiles)
    sizes = (lengths_ptr, pages_ptr, stride_pb, batch_heads, seq_q, capacity, heads_q, group_size)
    rooms = (query_ptr, output_ptr, lse_ptr, arrivals_ptr, partial_ptr, stride_qb, stride_qh, stride_qs, stride_ob,
        stride_oh, stride_os, key_scale_ptr, stride_kfb, stride_kfh, value_scale_ptr, stride_vfb, stride_vfh, queries,
        query_rests, latents, rests, weight_tile, row_numbers, key_full, key_free)
    gl.warp_specialize(
        [
            (weigh, rooms + sizes + (scale_log2,) + share),
            (add, rooms + sizes + (scale_log2,) + share),
            (produce,
            (key_low, key_high, low_bytes, high_bytes, byte_full, latents, rests, key_full, key_free) + sizes + share),
        ],
        [4, 4],  # warps; the first consumer has OPTIONS["num_warps"]
        [224, 56],  # registers of a thread; the first consumer has the rest
    )
    gl.thread_barrier()  # nothing else may lie where a barrier was made until it is dropped
    for place in gl.static_range(STAGES):
        mbarrier.invalidate(key_full.index(place))
        mbarrier.invalidate(key_free.index(place))
    for place in gl.static_range(BYTE_STAGES):
        mbarrier.invalidate(byte_full.index(place))
