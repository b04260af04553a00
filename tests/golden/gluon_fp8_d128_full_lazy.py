"""Forward attention in Gluon for Hopper (sm_90), for one kind of problem.

    float8_e4m3, head dim 128, no mask
    BLOCK_M=128 BLOCK_N=128 HEAD_GROUP=1 mask_loop=split num_stages=2 output_buffer=own overlap=0 ping_pong=mbarrier
    producer_registers=24 queries_in=shared query_stages=2 row_order=descending row_sum=last schedule=dynamic
    slot_release=named softmax=lazy software_exp2=4 v_wait=late

Rendered by autoattn from the template gluon/forward; it imports only triton and stands alone. One warp, the producer,
has the TMA unit bring tiles of queries, keys and values into shared memory; CONSUMERS warpgroups of four warps own
ROWS rows of queries each, walk the keys from the last block that a tile sees to the first, and keep a running softmax
(FlashAttention-2 and -3: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608). Scores are counted in powers
of two, so that exp is a single exp2. What the TMA unit reads beyond a tensor's end is zero, and it writes nothing
there. To launch:

    forward_before[grid_before(batch, heads_kv, seq_kv)](*arguments in the order of SIGNATURE, **OPTIONS)
    forward[grid(batch, heads_q, seq_q, sm_count)](*the same arguments, **OPTIONS)

where scale_log2 = scale * log2(e), scale > 0, and lse is in natural logarithms, [batch, heads_q, seq_q].
The arguments in DESCRIPTORS are TMA descriptors of [batch, heads, seq, head_dim] views, but value_columns, of the room
[batch, heads_kv, head_dim_v, keys] that turned() measures and forward_before fills.
scratch is int32 and belongs to one launch at a time. [0] counts the tiles that were given out, [1] the programs that
have got their last; both must be 0 and are 0 again afterwards.
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

WIDTH = gl.constexpr(128)  # of a tile of queries or keys
WIDTH_V = gl.constexpr(128)  # of a tile of values or outputs
CONSUMERS = gl.constexpr(2)  # warpgroups that compute
ROWS = gl.constexpr(64)  # query rows of one of them
BLOCK_M = gl.constexpr(128)  # query rows of all of them
BLOCK_N = gl.constexpr(128)  # keys a step
STAGES = gl.constexpr(2)  # blocks of keys, and of values, that shared memory holds
QUERY_STAGES = gl.constexpr(2)  # tiles of queries that it holds for each consumer
HEAD_GROUP = gl.constexpr(1)  # heads next to one another in program order; 0 means all
GROWTH = gl.constexpr(1.0)  # a row's maximum may grow by 2 before the row is rescaled to it: float8 ends at 448
BOOST = gl.constexpr(7.0)  # weights of at most 1 become float8 as 2**BOOST times as much, to use more of its exponents
LOWEST = gl.constexpr(-3.0e38)  # below every score, but finite: LOWEST - LOWEST is 0, not NaN
ELEMENT = gl.constexpr(gl.float8e4nv)
RESULT = gl.constexpr(gl.bfloat16)
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=OUTPUTS, k_width=4))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
SCORE_KEYS = gl.constexpr(gl.SliceLayout(0, SCORES))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUTS))
OUTPUT_DIMS = gl.constexpr(gl.SliceLayout(0, OUTPUTS))
# PTX: a thread's 64 outputs times their rows' factors, unless no lane of the warp has a factor other than 1. A
# branch on a vote keeps ptxas from hoisting the products above their test. Registers 0 and 2 are of the two rows.
RESCALE = gl.constexpr(
    "{ .reg .pred grew, any; .reg .f32 both; "
    "mul.rn.f32 both, $128, $130; setp.neu.f32 grew, both, 0f3F800000; "
    "vote.sync.any.pred any, grew, 0xffffffff; @!any bra.uni done; "
    + " ".join(f"mul.rn.f32 ${i}, ${i}, ${64 + i + 64};" for i in range(64))
    + " done: }"
)
RESCALE_REGISTERS = gl.constexpr(",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["f"] * 64))

# TMA descriptors: argument -> block and layout of a [batch, heads, seq, head_dim] view
DESCRIPTORS = {
    "query": ([1, 1, 64, 128], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)),
    "key": ([1, 1, 128, 128], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)),
    "value_columns": ([1, 1, 128, 128], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)),
    "output": ([1, 1, 64, 128], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)),
}
OPTIONS = {"num_warps": 4}
SIGNATURE = {
    **{
        name: f"tensordesc<{'bf16' if name == 'output' else 'fp8e4nv'}{block},{layout}>"
        for name, (block, layout) in DESCRIPTORS.items()
    },
    "value_ptr": "*fp8e4nv",
    "stride_vb": "i64",
    "stride_vh": "i64",
    "stride_vs": "i64",
    "value_columns_ptr": "*fp8e4nv",
    "query_scale_ptr": "*fp32",
    "key_scale_ptr": "*fp32",
    "value_scale_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "scratch_ptr": "*i32",
    "batch_heads": "i32",
    "seq_q": "i32",
    "seq_kv": "i32",
    "heads_q": "i32",
    "group_size": "i32",
    "scale_log2": "fp32",
}
DIVISIBLE = {name: 16 for name in ("value_ptr", "stride_vb", "stride_vh", "stride_vs", "value_columns_ptr")}


def grid(batch, heads_q, seq_q, sm_count):
    """Programs to launch."""
    return (min(batch * heads_q * triton.cdiv(seq_q, 128), sm_count),)


def grid_before(batch, heads_kv, seq_kv):
    """Programs to launch before."""
    return (batch * heads_kv * triton.cdiv(seq_kv, 128),)


def turned(batch, heads_kv, seq_kv):
    """Shape of the room for the values, turned, that a launch needs: keys come in groups of 16."""
    return batch, heads_kv, 128, triton.cdiv(seq_kv, 16) * 16


def scratch(batch, heads_q, seq_q):
    """Numbers that a launch needs room for."""
    return 2


# Barriers of the hardware: 0 to 5 belong to Triton, 6 and up to the ring.
@gluon.jit
def arrive_at_slot(number):
    """Says that this warpgroup has read a slot."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 288; mov.u32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_at_slot(number):
    """Waits until all consumers have read a slot."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 288; mov.u32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def take_turn(c: gl.constexpr, turns, slot, phase):
    """Consumers hand the tensor cores to one another, so that one computes its softmax while another multiplies."""
    mbarrier.wait(turns.index(c), (phase * STAGES + slot) & 1)  # they take one turn for each block of keys


@gluon.jit
def pass_turn(c: gl.constexpr, turns):
    """The next consumer may multiply."""
    mbarrier.arrive(turns.index((c + 1) % CONSUMERS), count=1)


@gluon.jit
def free_key(key_free, slot):
    """Says that this consumer has read a slot's keys."""
    arrive_at_slot(6 + slot)


@gluon.jit
def free_value(value_free, slot):
    """Says that this consumer has read a slot's values."""
    arrive_at_slot(6 + STAGES + slot)


@gluon.jit
def wait_free_key(key_free, slot, phase):
    """Waits until all consumers have."""
    wait_at_slot(6 + slot)


@gluon.jit
def wait_free_value(value_free, slot, phase):
    """Waits until all consumers have."""
    wait_at_slot(6 + STAGES + slot)


@gluon.jit
def init_barriers(query_full, query_free, key_full, key_free, value_full, value_free):
    """Readies the barriers for the first tile."""
    for place in gl.static_range(QUERY_STAGES * CONSUMERS):
        mbarrier.init(query_full.index(place), count=1)
        mbarrier.init(query_free.index(place), count=1)
    for place in gl.static_range(STAGES):
        mbarrier.init(key_full.index(place), count=1)
        mbarrier.init(key_free.index(place), count=CONSUMERS)
        mbarrier.init(value_full.index(place), count=1)
        mbarrier.init(value_free.index(place), count=CONSUMERS)


@gluon.jit
def drop_barriers(query_full, query_free, key_full, key_free, value_full, value_free):
    """Leaves their room to others: nothing else may lie where a barrier was made until it is dropped."""
    gl.thread_barrier()
    for place in gl.static_range(QUERY_STAGES * CONSUMERS):
        mbarrier.invalidate(query_full.index(place))
        mbarrier.invalidate(query_free.index(place))
    for place in gl.static_range(STAGES):
        mbarrier.invalidate(key_full.index(place))
        mbarrier.invalidate(key_free.index(place))
        mbarrier.invalidate(value_full.index(place))
        mbarrier.invalidate(value_free.index(place))
    gl.thread_barrier()


@gluon.jit
def advance(slot, phase):
    """The next slot of the ring, and the phase of its barriers."""
    slot += 1
    around = slot == STAGES
    return gl.where(around, 0, slot), gl.where(around, phase ^ 1, phase)


@gluon.jit
def place_of(tile, batch_heads, seq_q, seq_kv, heads_q, group_size):
    """First row, batch entry and head of a tile, and the blocks of keys from `begin` to before `end` that it sees."""
    # Programs that run together share a group of heads, whose keys then stay in the L2.
    row_tiles = gl.cdiv(seq_q, BLOCK_M)
    group = HEAD_GROUP if HEAD_GROUP > 0 else batch_heads
    first_head = tile // (group * row_tiles) * group
    members = gl.minimum(group, batch_heads - first_head)
    place = tile % (group * row_tiles)
    start_m = (row_tiles - 1 - place // members) * BLOCK_M  # the longest rows start first
    i_bh = first_head + place % members
    begin = 0
    end = gl.cdiv(seq_kv, BLOCK_N)
    return start_m, i_bh // heads_q, i_bh % heads_q, begin, end


@gluon.jit
def query_slot(c, turn):
    """Where the queries of a program's tile number `turn` lie, and the phase of the barriers there."""
    return (turn & 1) * CONSUMERS + c, (turn >> 1) & 1


@gluon.jit
def load_keys(key, i_b, i_kv, start_n, slot, phase, keys, key_full, key_free):
    """Asks for a block of keys as soon as its slot is free."""
    wait_free_key(key_free, slot, phase)
    mbarrier.expect(key_full.index(slot), key.block_type.nbytes)
    # [BLOCK_N, WIDTH]
    tma.async_copy_global_to_shared(key, [i_b, i_kv, start_n, 0], key_full.index(slot), keys.index(slot))


@gluon.jit
def load_values(value_columns, i_b, i_kv, start_n, slot, phase, values, value_full, value_free):
    """The same for values."""
    wait_free_value(value_free, slot, phase)
    mbarrier.expect(value_full.index(slot), value_columns.block_type.nbytes)
    # [WIDTH_V, BLOCK_N]
    tma.async_copy_global_to_shared(value_columns, [i_b, i_kv, 0, start_n], value_full.index(slot), values.index(slot))


@gluon.jit
def load_queries(query, i_b, i_h, row, c, turn, queries, query_full, query_free):
    """Asks for the queries of consumer `c`."""
    slot, phase = query_slot(c, turn)
    mbarrier.wait(query_free.index(slot), phase ^ 1)
    mbarrier.expect(query_full.index(slot), query.block_type.nbytes)
    # [ROWS, WIDTH]
    tma.async_copy_global_to_shared(query, [i_b, i_h, row, 0], query_full.index(slot), queries.index(slot))


@gluon.jit
def load_first(tile, turn, slot, phase, query, key, queries, outputs, query_full, query_free, keys, values, key_full,
        key_free, value_full, value_free, turns, batch_heads, seq_q, seq_kv, heads_q, group_size):
    """Asks for the queries of a tile and for its last block of keys."""
    start_m, i_b, i_h, begin, end = place_of(tile, batch_heads, seq_q, seq_kv, heads_q, group_size)
    load_keys(key, i_b, i_h // group_size, (end - 1) * BLOCK_N, slot, phase, keys, key_full, key_free)
    for c in gl.static_range(CONSUMERS):
        load_queries(query, i_b, i_h, start_m + c * ROWS, c, turn, queries, query_full, query_free)


@gluon.jit
def load_rest(tile, slot, phase, key, value_columns, keys, values, key_full, key_free, value_full, value_free, turns,
        batch_heads, seq_q, seq_kv, heads_q, group_size):
    """Asks for the other blocks of keys, and for all blocks of values; keys run one block ahead."""
    start_m, i_b, i_h, begin, end = place_of(tile, batch_heads, seq_q, seq_kv, heads_q, group_size)
    i_kv = i_h // group_size
    for block in range(end - 1, begin - 1, -1):
        value_slot = slot
        value_phase = phase
        slot, phase = advance(slot, phase)
        if block > begin:
            load_keys(key, i_b, i_kv, (block - 1) * BLOCK_N, slot, phase, keys, key_full, key_free)
        load_values(value_columns, i_b, i_kv, block * BLOCK_N, value_slot, value_phase, values, value_full, value_free)
    return slot, phase


@gluon.jit
def multiply_keys(query_tile, keys, slot):
    """Starts the products of queries and a block of keys."""
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    # [ROWS, WIDTH] x [WIDTH, BLOCK_N]
    key_tile = keys.index(slot).reshape([BLOCK_N, WIDTH]).permute((1, 0))
    return warpgroup_mma(query_tile, key_tile, zeros, use_acc=False, is_async=True)


@gluon.jit
def multiply_values(weights, values, slot, acc):
    """Starts adding a block of values, weighted."""
    # [ROWS, BLOCK_N] x [BLOCK_N, WIDTH_V]
    value_tile = values.index(slot).reshape([WIDTH_V, BLOCK_N]).permute((1, 0))
    return warpgroup_mma(weights, value_tile, acc, is_async=True)


@gluon.jit
def hide(scores, start_m, start_n, batch_heads, seq_q, seq_kv, heads_q, group_size):
    """-inf where the mask hides the key."""
    o_m = start_m + gl.arange(0, ROWS, SCORE_ROWS)
    o_n = start_n + gl.arange(0, BLOCK_N, SCORE_KEYS)
    return gl.where(o_n[None, :] < seq_kv, scores, float("-inf"))


def powers(bound):
    """PTX: powers of two of four numbers, one of them without the exp unit.

    To add 1.5 * 2**23 rounds to a whole number; to add float32's bias as well, 127, leaves the power's exponent in the
    low bits. Of the rest, -1/2 to 1/2, the power is a polynomial (relative error 7.5e-5, found by Remez's exchange).
    Below -126.5 there comes 0, as from the exp unit, and NaN stays NaN.
    """
    software = (
        f"max.NaN.f32 x, x, 0fC2FE0000; {bound} add.rn.f32 whole, x, 0f4B40007F; sub.rn.f32 rest, whole, 0f4B40007F; "
        "sub.rn.f32 rest, x, rest; fma.rn.f32 power, rest, 0f3D61FBB0, 0f3E786F0D; "
        "fma.rn.f32 power, power, rest, 0f3F31798D; fma.rn.f32 power, power, rest, 0f3F7FFB49; "
        "mov.b32 bits, whole; shl.b32 bits, bits, 23; mov.b32 whole, bits;"
    )
    lines = [
        f"mov.f32 x, ${4 + i}; {software} mul.rn.f32 ${i}, power, whole;"
        if i % 4 == 1
        else f"ex2.approx.ftz.f32 ${i}, ${4 + i};"
        for i in range(4)
    ]
    return " ".join(["{ .reg .f32 x, whole, rest, power; .reg .b32 bits;", *lines, "}"])


POWERS = gl.constexpr(powers(""))  # of numbers that are not far above 0
POWERS_REGISTERS = gl.constexpr("=f,=f,=f,=f,f,f,f,f")


@gluon.jit
def sum_of(weights):
    """[ROWS, 8]: sums of the weights of each row that one thread holds, so that nothing is sent between threads."""
    return gl.sum(gl.reshape(weights, [ROWS, BLOCK_N // 8, 8]), 1)


@gluon.jit
def weigh(scores, row_max, row_sum, scale_log2):
    """Weights of a block, and what sums from before shrink by."""
    block_max = gl.max(scores, 1) * scale_log2
    new_max = gl.where(block_max - row_max > GROWTH, block_max, row_max)
    shrink = gl.exp2(row_max - new_max)
    weights = gl.inline_asm_elementwise(
        POWERS, POWERS_REGISTERS, [scores * scale_log2 - (new_max - BOOST)[:, None]], dtype=gl.float32, is_pure=True,
        pack=4
    )
    row_sum = row_sum * gl.convert_layout(shrink, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return weights, new_max, row_sum + sum_of(weights), shrink


@gluon.jit
def rescale(acc, shrink):
    """The outputs so far in terms of a new maximum."""
    shrink = gl.convert_layout(shrink, OUTPUT_ROWS)[:, None]
    return gl.inline_asm_elementwise(
        RESCALE, RESCALE_REGISTERS, [acc, shrink], dtype=gl.float32, is_pure=True, pack=WIDTH_V // 2
    )


@gluon.jit
def packed(weights):
    """[ROWS, BLOCK_N / 16, 4] int32: words of four 8-bit weights that a thread holds of 16 keys.

    They are two neighbours and the two that lie 8 further on. The values are turned in the same order. Whole words are
    what passes from step to step: bytes would be unpacked and packed again.
    """
    by_thread = weights.reshape([ROWS, BLOCK_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    even, odd = gl.split(by_thread)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpacked(words):
    """[ROWS, BLOCK_N]: packed weights as the left factor of a product; nothing is moved."""
    pairs = gl.join(words, words)
    # In this layout, four numbers that lie beside one another are in four registers in a row.
    fourfold = gl.convert_layout(gl.join(pairs, pairs).reshape([ROWS, BLOCK_N]), WEIGHTS, assert_trivial=True)
    numbers = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [fourfold], dtype=gl.int8, is_pure=True,
        pack=4)
    return numbers.to(ELEMENT, bitcast=True)


@gluon.jit
def as_factor(weights):
    """Weights as the left factor of a product."""
    return unpacked(packed(weights))




@gluon.jit
def step_inside(
    c: gl.constexpr, block, acc, row_max, row_sum, slot, phase,
    query_tile, keys, values, key_full, key_free, value_full, value_free, turns,
    start_m, batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2
):
    """A block of keys that all rows see."""
    mbarrier.wait(key_full.index(slot), phase)
    take_turn(c, turns, slot, phase)
    score_token = multiply_keys(query_tile, keys, slot)
    pass_turn(c, turns)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(score_token,))
    free_key(key_free, slot)
    weights, row_max, row_sum, shrink = weigh(scores, row_max, row_sum, scale_log2)
    acc = rescale(acc, shrink)
    weights = as_factor(weights)
    mbarrier.wait(value_full.index(slot), phase)
    acc_token = multiply_values(weights, values, slot, acc)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_token,))
    free_value(value_free, slot)
    slot, phase = advance(slot, phase)
    return acc, row_max, row_sum, slot, phase


@gluon.jit
def step_cut(
    c: gl.constexpr, block, acc, row_max, row_sum, slot, phase,
    query_tile, keys, values, key_full, key_free, value_full, value_free, turns,
    start_m, batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2
):
    """A block of keys that the mask may cut."""
    mbarrier.wait(key_full.index(slot), phase)
    take_turn(c, turns, slot, phase)
    score_token = multiply_keys(query_tile, keys, slot)
    pass_turn(c, turns)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(score_token,))
    free_key(key_free, slot)
    scores = hide(scores, start_m, block * BLOCK_N, batch_heads, seq_q, seq_kv, heads_q, group_size)
    weights, row_max, row_sum, shrink = weigh(scores, row_max, row_sum, scale_log2)
    acc = rescale(acc, shrink)
    weights = as_factor(weights)
    mbarrier.wait(value_full.index(slot), phase)
    acc_token = multiply_values(weights, values, slot, acc)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_token,))
    free_value(value_free, slot)
    slot, phase = advance(slot, phase)
    return acc, row_max, row_sum, slot, phase


@gluon.jit
def attend(
    c: gl.constexpr, tile, turn, slot, phase,
    output, query_scale_ptr, key_scale_ptr, value_scale_ptr, lse_ptr, scratch_ptr, queries, outputs, query_full,
    query_free,
    keys, values, key_full, key_free, value_full, value_free, turns,
    batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2
):
    """A consumer's part in a tile."""
    start_m, i_b, i_h, begin, end = place_of(tile, batch_heads, seq_q, seq_kv, heads_q, group_size)
    start_m += c * ROWS
    scale_place = i_b * (heads_q // group_size) + i_h // group_size
    scale_log2 = scale_log2 * gl.load(query_scale_ptr + scale_place) * gl.load(key_scale_ptr + scale_place)
    inner_end = end - 1  # which may be cut at the end of the sequence

    query_place, query_phase = query_slot(c, turn)
    mbarrier.wait(query_full.index(query_place), query_phase)
    query_tile = queries.index(query_place).reshape([ROWS, WIDTH])
    row_max = gl.full([ROWS], LOWEST, gl.float32, SCORE_ROWS)
    row_sum = sum_of(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES))
    acc = gl.zeros([ROWS, WIDTH_V], gl.float32, OUTPUTS)
    for block in range(end - 1, inner_end - 1, -1):
        acc, row_max, row_sum, slot, phase = step_cut(
            c, block, acc, row_max, row_sum, slot, phase,
            query_tile, keys, values, key_full, key_free, value_full, value_free, turns,
            start_m, batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2
        )
    for block in range(inner_end - 1, begin - 1, -1):
        acc, row_max, row_sum, slot, phase = step_inside(
            c, block, acc, row_max, row_sum, slot, phase,
            query_tile, keys, values, key_full, key_free, value_full, value_free, turns,
            start_m, batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2
        )
    mbarrier.arrive(query_free.index(query_place), count=1)

    # A row that sees no key has sum 0: its output is 0 and its LSE -inf.
    total = gl.convert_layout(gl.sum(row_sum, 1), SCORE_ROWS)
    share = gl.where(total == 0.0, 0.0, gl.load(value_scale_ptr + scale_place) / total)
    # [ROWS, WIDTH_V]
    rounded = (acc * gl.convert_layout(share, OUTPUT_ROWS)[:, None]).to(RESULT)
    tma.store_wait(pendings=0)
    output_tile = outputs.index(c)
    output_tile.reshape([ROWS, WIDTH_V]).store(rounded)
    fence_async_shared()
    if start_m < seq_q:
        tma.async_copy_shared_to_global(output, [i_b, i_h, start_m, 0], output_tile)
    o_m = start_m + gl.arange(0, ROWS, SCORE_ROWS)
    log_sum = gl.where(total == 0.0, float("-inf"), (row_max + gl.log2(total) - BOOST) * 0.6931471805599453)
    gl.store(lse_ptr + (i_b * heads_q + i_h).to(gl.int64) * seq_q + o_m, log_sum, mask=o_m < seq_q)
    return slot, phase


@gluon.jit
def forward_before(
    query, key, value_columns, output, value_ptr, stride_vb, stride_vh, stride_vs, value_columns_ptr, query_scale_ptr,
    key_scale_ptr, value_scale_ptr, lse_ptr, scratch_ptr,
    batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2
):
    """Turns values to [head_dim_v, keys], as products of float8 read them, each 16 keys in the order of as_factor."""
    read: gl.constexpr = gl.BlockedLayout([32, 4], [1, 32], [4, 1], [1, 0])
    write: gl.constexpr = gl.BlockedLayout([4, 32], [32, 1], [1, 4], [1, 0])
    row_tiles = gl.cdiv(seq_kv, 128)
    heads_kv = heads_q // group_size
    i_bh = gl.program_id(0) // row_tiles
    start_n = gl.program_id(0) % row_tiles * 128
    value_ptr += (i_bh // heads_kv).to(gl.int64) * stride_vb + (i_bh % heads_kv).to(gl.int64) * stride_vh
    o_n = start_n + gl.arange(0, 128, gl.SliceLayout(1, read))
    o_d = gl.arange(0, WIDTH_V, gl.SliceLayout(0, read))
    # [128, WIDTH_V]
    m_v = (o_n < seq_kv)[:, None]
    tile = gl.load(value_ptr + o_n.to(gl.int64)[:, None] * stride_vs + o_d[None, :], mask=m_v, other=0.0)
    tile = tile.reshape([8, 2, 4, 2, WIDTH_V]).permute((4, 0, 2, 1, 3))
    turned_tile = gl.convert_layout(tile.reshape([WIDTH_V, 128]), write)
    width = gl.cdiv(seq_kv, 16) * 16
    o_n = start_n + gl.arange(0, 128, gl.SliceLayout(0, write))
    o_d = gl.arange(0, WIDTH_V, gl.SliceLayout(1, write))
    # [WIDTH_V, 128]
    m_c = (o_n < width)[None, :]
    place = (i_bh.to(gl.int64) * 128 + o_d)[:, None] * width + o_n[None, :]
    gl.store(value_columns_ptr + place, turned_tile, mask=m_c)


@gluon.jit
def consume(
    c: gl.constexpr, output, query_scale_ptr, key_scale_ptr, value_scale_ptr, lse_ptr, scratch_ptr, queries, outputs,
    query_full, query_free,
    keys, values, key_full, key_free, value_full, value_free, turns,
    next_tile, next_full, next_free, batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2
):
    """Consumer `c`."""
    if c == CONSUMERS - 1:
        pass_turn(c, turns)  # the first consumer begins
    for free in gl.static_range(STAGES):
        free_key(key_free, gl.to_tensor(free))
        free_value(value_free, gl.to_tensor(free))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = gl.program_id(0)
    tiles = gl.cdiv(seq_q, BLOCK_M) * batch_heads
    while tile < tiles:
        slot, phase = attend(
            c, tile, turn, slot, phase, output, query_scale_ptr, key_scale_ptr, value_scale_ptr, lse_ptr, scratch_ptr,
            queries, outputs, query_full, query_free,
            keys, values, key_full, key_free, value_full, value_free, turns,
            batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2
        )
        mbarrier.wait(next_full, turn & 1)
        tile = gl.max(next_tile.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(next_free, count=1)
        turn += 1
    tma.store_wait(pendings=0)


@gluon.jit
def produce(
    query, key, value_columns, scratch_ptr, queries, outputs, query_full, query_free,
    keys, values, key_full, key_free, value_full, value_free, turns,
    next_tile, next_full, next_free, batch_heads, seq_q, seq_kv, heads_q, group_size
):
    """The producer."""
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    tile = gl.program_id(0)
    tiles = gl.cdiv(seq_q, BLOCK_M) * batch_heads
    while tile < tiles:
        load_first(
            tile, turn, slot, phase, query, key, queries, outputs, query_full, query_free, keys, values, key_full,
            key_free, value_full, value_free, turns, batch_heads, seq_q, seq_kv, heads_q, group_size
        )
        coming = gl.atomic_add(scratch_ptr, 1) + gl.num_programs(0)
        slot, phase = load_rest(
            tile, slot, phase, key, value_columns, keys, values, key_full, key_free, value_full, value_free, turns,
            batch_heads, seq_q, seq_kv, heads_q, group_size
        )
        mbarrier.wait(next_free, (turn & 1) ^ 1)
        next_tile.store(gl.full([1], coming, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(next_full, count=1)
        tile = coming
        turn += 1
    if gl.atomic_add(scratch_ptr + 1, 1) == gl.num_programs(0) - 1:
        gl.store(scratch_ptr, 0)  # no program asks any more, and the next launch finds zeros
        gl.store(scratch_ptr + 1, 0)
    for free in gl.static_range(STAGES):  # the consumers' last arrivals
        wait_free_key(key_free, gl.to_tensor(free), phase)
        wait_free_value(value_free, gl.to_tensor(free), phase)


@gluon.jit
def forward(
    query, key, value_columns, output, value_ptr, stride_vb, stride_vh, stride_vs, value_columns_ptr, query_scale_ptr,
    key_scale_ptr, value_scale_ptr, lse_ptr, scratch_ptr,
    batch_heads, seq_q, seq_kv, heads_q, group_size, scale_log2
):
    """Each program computes one tile after another: BLOCK_M rows of one head of one sequence."""
    queries = gl.allocate_shared_memory(ELEMENT, [QUERY_STAGES * CONSUMERS, 1, 1, ROWS, WIDTH], query.layout)
    outputs = gl.allocate_shared_memory(RESULT, [CONSUMERS, 1, 1, ROWS, WIDTH_V], output.layout)
    keys = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, 1, BLOCK_N, WIDTH], key.layout)
    values = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, 1, WIDTH_V, BLOCK_N], value_columns.layout)
    query_full = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES * CONSUMERS, 1], mbarrier.MBarrierLayout())
    query_free = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES * CONSUMERS, 1], mbarrier.MBarrierLayout())
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(place), count=1)
    init_barriers(query_full, query_free, key_full, key_free, value_full, value_free)
    next_tile = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    next_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    next_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(next_full, count=1)
    mbarrier.init(next_free, count=CONSUMERS)
    shared = (queries, outputs, query_full, query_free, keys, values, key_full, key_free, value_full, value_free, turns)
    sizes = (batch_heads, seq_q, seq_kv, heads_q, group_size)
    results = (output, query_scale_ptr, key_scale_ptr, value_scale_ptr, lse_ptr, scratch_ptr,)
    gl.warp_specialize(
        [
            (consume, (0,) + results + shared + (next_tile, next_full, next_free) + sizes + (scale_log2,)),
            (consume, (1,) + results + shared + (next_tile, next_full, next_free) + sizes + (scale_log2,)),
            (produce, (query, key, value_columns, scratch_ptr) + shared + (next_tile, next_full, next_free) + sizes),
        ],
        [4, 1],  # warps; the first consumer has OPTIONS["num_warps"]
        [240, 24],  # registers of a thread; the first consumer has the rest
    )
    drop_barriers(query_full, query_free, key_full, key_free, value_full, value_free)
    for place in gl.static_range(CONSUMERS):
        mbarrier.invalidate(turns.index(place))
    mbarrier.invalidate(next_full)
    mbarrier.invalidate(next_free)
