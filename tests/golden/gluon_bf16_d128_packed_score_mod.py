"""Forward attention in Gluon for Hopper (sm_90), for one kind of problem.

    bfloat16, head dim 128, causal (bottom-right), packed, mod-e61f4c49
    BLOCK_M=128 BLOCK_N=128 HEAD_GROUP=1 mask_loop=split num_stages=2 output_buffer=own overlap=1 ping_pong=mbarrier
    producer_registers=24 queries_in=shared query_stages=2 row_order=descending row_sum=last schedule=dynamic
    slot_release=named softmax=first_max software_exp2=4 v_wait=late

Rendered by autoattn from the template gluon/forward; it imports only triton and stands alone. One warp, the producer,
has the TMA unit bring tiles of queries, keys and values into shared memory; CONSUMERS warpgroups of four warps own
ROWS rows of queries each, walk the keys from the last block that a tile sees to the first, and keep a running softmax
(FlashAttention-2 and -3: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608). Scores are counted in powers
of two, so that exp is a single exp2. What the TMA unit reads beyond a tensor's end is zero, and it writes nothing
there. To launch:

    forward[grid(batch, heads_q, tokens_q, sm_count)](*arguments in the order of SIGNATURE, **OPTIONS)

where scale_log2 = scale * log2(e), scale > 0, and lse is in natural logarithms, [heads_q, tokens_q].
The arguments in DESCRIPTORS are TMA descriptors of [batch, heads, seq, head_dim] views.
scratch is int32 and belongs to one launch at a time. [0] counts the tiles that were given out, [1] the programs that
have got their last; both must be 0 and are 0 again afterwards.
[2 + tile] is 1 if that tile had to be computed again, which its own program did after its other tiles, and else 0.
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
TOO_LARGE = gl.constexpr(1152921504606846976.0)  # a row whose weights sum to 2**60 is computed again
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3.0e38)  # below every score, but finite: LOWEST - LOWEST is 0, not NaN
ELEMENT = gl.constexpr(gl.bfloat16)
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=OUTPUTS, k_width=2))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
SCORE_KEYS = gl.constexpr(gl.SliceLayout(0, SCORES))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUTS))
OUTPUT_DIMS = gl.constexpr(gl.SliceLayout(0, OUTPUTS))

# TMA descriptors: argument -> block and layout of a [batch, heads, seq, head_dim] view
DESCRIPTORS = {
    "query": ([1, 1, 64, 128], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)),
    "key": ([1, 1, 128, 128], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)),
    "value": ([1, 1, 128, 128], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)),
    "output": ([1, 1, 64, 128], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)),
}
OPTIONS = {"num_warps": 4}
SIGNATURE = {
    **{name: f"tensordesc<bf16{block},{layout}>" for name, (block, layout) in DESCRIPTORS.items()},
    "value_ptr": "*bf16",
    "stride_vb": "i64",
    "stride_vh": "i64",
    "stride_vs": "i64",
    "output_ptr": "*bf16",
    "stride_oh": "i64",
    "stride_os": "i64",
    "lse_ptr": "*fp32",
    "scratch_ptr": "*i32",
    "cu_seqlens_q_ptr": "*i32",
    "cu_seqlens_kv_ptr": "*i32",
    "batch": "i32",
    "tokens_q": "i32",
    "tokens_kv": "i32",
    "heads_q": "i32",
    "group_size": "i32",
    "scale_log2": "fp32",
    "score_captured0_ptr": "*fp32",
    "score_captured0_stride0": "i32",
    "score_captured0_size0": "i32",
    "score_captured0_size1": "i32",
}
DIVISIBLE = {"output_ptr": 16, "stride_oh": 8, "stride_os": 8}


def grid(batch, heads_q, tokens_q, sm_count):
    """Programs to launch."""
    return (min(heads_q * (tokens_q // 128 + batch + 1), sm_count),)


def tiles(batch, heads_q, tokens_q):
    """Tiles of which scratch says whether they were computed again."""
    return heads_q * (tokens_q // 128 + batch + 1)


def scratch(batch, heads_q, tokens_q):
    """Numbers that a launch needs room for."""
    return 2 + 3 * heads_q * (tokens_q // 128 + batch + 1)


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
def place_of(tile, cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size):
    """First row, batch entry and head of a tile, and the blocks of keys from `begin` to before `end` that it sees."""
    # Programs that run together share a group of heads, whose keys then stay in the L2.
    batch_heads = heads_q
    row_tiles = tokens_q // BLOCK_M + batch + 1
    group = HEAD_GROUP if HEAD_GROUP > 0 else batch_heads
    first_head = tile // (group * row_tiles) * group
    members = gl.minimum(group, batch_heads - first_head)
    place = tile % (group * row_tiles)
    row_tile = row_tiles - 1 - place // members  # the longest rows start first
    # The tiles of sequence b begin at cu_seqlens_q[b] // BLOCK_M + b: at most one of them is empty, and the host needs
    # no lengths (vLLM's unified attention kernel). What lies behind the last sequence counts as one without keys.
    sequence = gl.to_tensor(0)
    upper = batch
    while sequence < upper:
        middle = (sequence + upper + 1) // 2
        before = gl.load(cu_seqlens_q_ptr + middle) // BLOCK_M + middle <= row_tile
        sequence = gl.where(before, middle, sequence)
        upper = gl.where(before, upper, middle - 1)
    begin_q = gl.minimum(gl.maximum(gl.load(cu_seqlens_q_ptr + sequence), 0), tokens_q)
    start_m = (row_tile - begin_q // BLOCK_M - sequence) * BLOCK_M
    seq_q = gl.load(cu_seqlens_q_ptr + sequence + 1, mask=sequence < batch, other=2147483647)
    seq_q = gl.minimum(seq_q, tokens_q) - begin_q
    begin_kv = gl.maximum(gl.load(cu_seqlens_kv_ptr + sequence), 0)
    seq_kv = gl.load(cu_seqlens_kv_ptr + sequence + 1, mask=sequence < batch, other=0)
    seq_kv = gl.where(start_m < seq_q, gl.maximum(gl.minimum(seq_kv, tokens_kv) - begin_kv, 0), 0)
    shift = seq_kv - seq_q  # the query at row i stands at key i + shift
    last = shift  # query i sees the keys up to i + last
    begin = 0
    end = gl.cdiv(gl.maximum(0, gl.minimum(seq_kv, start_m + BLOCK_M + last)), BLOCK_N)
    end = gl.maximum(end, begin + 1)  # a tile that sees nothing hides all of one block
    i_h = first_head + place % members
    return start_m, gl.to_tensor(0), i_h, begin, end, begin_q, seq_q, begin_kv, seq_kv, last, sequence


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
def load_values(value, i_b, i_kv, start_n, slot, phase, values, value_full, value_free):
    """The same for values."""
    wait_free_value(value_free, slot, phase)
    mbarrier.expect(value_full.index(slot), value.block_type.nbytes)
    # [BLOCK_N, WIDTH_V]
    tma.async_copy_global_to_shared(value, [i_b, i_kv, start_n, 0], value_full.index(slot), values.index(slot))


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
        key_free, value_full, value_free, turns, cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv,
        heads_q, group_size):
    """Asks for the queries of a tile and for its last block of keys."""
    start_m, i_b, i_h, begin, end, begin_q, seq_q, begin_kv, seq_kv, last, sequence = place_of(tile, cu_seqlens_q_ptr,
        cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size)
    load_keys(key, i_b, i_h // group_size, begin_kv + (end - 1) * BLOCK_N, slot, phase, keys, key_full, key_free)
    for c in gl.static_range(CONSUMERS):
        load_queries(query, i_b, i_h, begin_q + start_m + c * ROWS, c, turn, queries, query_full, query_free)


@gluon.jit
def load_rest(tile, slot, phase, key, value, keys, values, key_full, key_free, value_full, value_free, turns,
        cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size):
    """Asks for the other blocks of keys, and for all blocks of values; keys run one block ahead."""
    start_m, i_b, i_h, begin, end, begin_q, seq_q, begin_kv, seq_kv, last, sequence = place_of(tile, cu_seqlens_q_ptr,
        cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size)
    i_kv = i_h // group_size
    for block in range(end - 1, begin - 1, -1):
        value_slot = slot
        value_phase = phase
        slot, phase = advance(slot, phase)
        if block > begin:
            load_keys(key, i_b, i_kv, begin_kv + (block - 1) * BLOCK_N, slot, phase, keys, key_full, key_free)
        load_values(value, i_b, i_kv, begin_kv + block * BLOCK_N, value_slot, value_phase, values, value_full,
            value_free)
    return slot, phase


@gluon.jit
def reciprocal(value):
    """1 / value to the last bit (PTX), in one instruction; a quotient takes four, for the sake of float32's ends."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def exact_tanh(value):
    """The hyperbolic tangent, by way of an exponential that cannot overflow into NaN."""
    return 1.0 - 2.0 * reciprocal(1.0 + gl.exp2(value * 2.885390081777927))


@gluon.jit
def score_mod(score, b, h, q_idx, kv_idx, captured0_ptr, captured0_stride0, captured0_size0, captured0_size1):
    """The caller's change of a scaled score."""
    return ((4 * exact_tanh((score / 4))) + gl.load(captured0_ptr + b * captured0_stride0 + kv_idx))


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
    return warpgroup_mma(weights, values.index(slot).reshape([BLOCK_N, WIDTH_V]), acc, is_async=True)


@gluon.jit
def apply_score_mod(scores, start_m, start_n, seq_q, seq_kv, scale, b, i_h, score_captured0_ptr,
        score_captured0_stride0, score_captured0_size0, score_captured0_size1):
    """Scaled scores as the caller changes them."""
    q_idx = start_m + gl.arange(0, ROWS, SCORE_ROWS)
    kv_idx = start_n + gl.arange(0, BLOCK_N, SCORE_KEYS)
    # Indices beyond the sequence belong to nobody, and a tensor of the caller's has no element for them.
    q_idx = gl.minimum(q_idx, gl.maximum(seq_q - 1, 0))
    kv_idx = gl.minimum(kv_idx, gl.maximum(seq_kv - 1, 0))
    return score_mod(scores * scale, b, i_h, q_idx[:, None], kv_idx[None, :], score_captured0_ptr,
        score_captured0_stride0, score_captured0_size0, score_captured0_size1).to(gl.float32)


@gluon.jit
def hide(scores, start_m, start_n, seq_q, seq_kv, last):
    """-inf where the mask hides the key."""
    o_m = start_m + gl.arange(0, ROWS, SCORE_ROWS)
    o_n = start_n + gl.arange(0, BLOCK_N, SCORE_KEYS)
    return gl.where(o_n[None, :] <= o_m[:, None] + last, scores, float("-inf"))


@gluon.jit
def clear_beyond(values, slot, start_n, seq_kv):
    """Sets the values of a block that belong to the next sequence to 0: weights of 0 would make NaN of its NaN."""
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    value_tile = values.index(slot).reshape([BLOCK_N, WIDTH_V])
    for part in gl.static_range(2):
        if start_n + (part + 1) * 64 > seq_kv:
            rows = value_tile.slice(part * 64, 64)
            o_n = start_n + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, spread))
            nothing = gl.zeros([64, WIDTH_V], ELEMENT, spread)
            rows.store(gl.where((o_n < seq_kv)[:, None], rows.load(spread), nothing))
    fence_async_shared()
    gl.thread_barrier()  # of this warpgroup, whose next product reads what all its threads wrote


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
POWERS_AROUND = gl.constexpr(powers("min.NaN.f32 x, x, 0f42FE0000;"))  # at most 2**127, which is too large for a sum
POWERS_REGISTERS = gl.constexpr("=f,=f,=f,=f,f,f,f,f")


@gluon.jit
def sum_of(weights):
    """[ROWS, 8]: sums of the weights of each row that one thread holds, so that nothing is sent between threads."""
    return gl.sum(gl.reshape(weights, [ROWS, BLOCK_N // 8, 8]), 1)


@gluon.jit
def weigh(scores, row_max, row_sum, scale_log2):
    """Weights of a block around a maximum that follows each row's, and what sums from before shrink by."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    shrink = gl.exp2(row_max - new_max)
    weights = gl.inline_asm_elementwise(
        POWERS, POWERS_REGISTERS, [scores * scale_log2 - new_max[:, None]], dtype=gl.float32, is_pure=True, pack=4
    )
    row_sum = row_sum * gl.convert_layout(shrink, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return weights, new_max, row_sum + sum_of(weights), shrink


@gluon.jit
def weigh_around(scores, row_max, row_sum, scale_log2):
    """Weights of a block around the maximum that each row came with."""
    weights = gl.inline_asm_elementwise(
        POWERS_AROUND, POWERS_REGISTERS, [scores * scale_log2 - row_max[:, None]], dtype=gl.float32, is_pure=True,
        pack=4
    )
    return weights, row_sum + sum_of(weights)


@gluon.jit
def rescale(acc, shrink):
    """The outputs so far in terms of a new maximum."""
    shrink = gl.convert_layout(shrink, OUTPUT_ROWS)[:, None]
    return acc * shrink


@gluon.jit
def as_factor(weights):
    """Weights as the left factor of a product: 16 bits wide, and where the thread holds them already."""
    return gl.convert_layout(weights.to(ELEMENT), WEIGHTS)


@gluon.jit
def halves(pairs):
    """[..., 2]: the two numbers of 16 bits in each number of 32."""
    low = pairs.to(gl.int16).to(ELEMENT, bitcast=True)
    return gl.join(low, (pairs >> 16).to(gl.int16).to(ELEMENT, bitcast=True))


@gluon.jit
def packed(weights):
    """[ROWS, BLOCK_N / 2] int32: a pair of 16-bit weights in each.

    A loop that carried them as they are would unpack and pack them again in each step, where ptxas is in the mood.
    """
    even, odd = gl.split(gl.reshape(weights, [ROWS, BLOCK_N // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpacked(pairs):
    """Packed weights as the left factor of a product."""
    return gl.convert_layout(gl.reshape(halves(pairs), [ROWS, BLOCK_N]), WEIGHTS)




@gluon.jit
def step_inside(
    c: gl.constexpr, block, begin, acc, weights, row_max, row_sum, shrink, slot, phase, value_slot, value_phase,
    query_tile, keys, values, key_full, key_free, value_full, value_free, turns,
    start_m, seq_q, seq_kv, last, scale_log2, scale, b, i_h, score_captured0_ptr, score_captured0_stride0,
    score_captured0_size0, score_captured0_size1
):
    """A block of keys that all rows see; the softmax runs while the block before it is multiplied with its values."""
    take_turn(c, turns, slot, phase)
    score_token = multiply_keys(query_tile, keys, slot)
    mbarrier.wait(value_full.index(value_slot), value_phase)
    factor = unpacked(weights)
    acc_token = multiply_values(factor, values, value_slot, acc)
    pass_turn(c, turns)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(score_token,))
    free_key(key_free, slot)
    scores = apply_score_mod(scores, start_m, block * BLOCK_N, seq_q, seq_kv, scale, b, i_h, score_captured0_ptr,
        score_captured0_stride0, score_captured0_size0, score_captured0_size1)
    new_weights, row_sum = weigh_around(scores, row_max, row_sum, scale_log2)
    # To wait here for the next keys ends a basic block; else ptxas moves the wait for acc above the softmax.
    slot, phase = advance(slot, phase)
    mbarrier.wait(key_full.index(slot), phase, pred=block > begin)
    read_slot = value_slot
    value_slot, value_phase = advance(value_slot, value_phase)
    acc, factor = warpgroup_mma_wait(num_outstanding=0, deps=(acc_token, factor))
    free_value(value_free, read_slot)
    weights = packed(new_weights)
    return acc, weights, row_max, row_sum, shrink, slot, phase, value_slot, value_phase


@gluon.jit
def step_cut(
    c: gl.constexpr, block, acc, row_max, row_sum, slot, phase,
    query_tile, keys, values, key_full, key_free, value_full, value_free, turns,
    start_m, seq_q, seq_kv, last, scale_log2, scale, b, i_h, score_captured0_ptr, score_captured0_stride0,
    score_captured0_size0, score_captured0_size1
):
    """A block of keys that the mask may cut."""
    mbarrier.wait(key_full.index(slot), phase)
    take_turn(c, turns, slot, phase)
    score_token = multiply_keys(query_tile, keys, slot)
    pass_turn(c, turns)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(score_token,))
    free_key(key_free, slot)
    scores = apply_score_mod(scores, start_m, block * BLOCK_N, seq_q, seq_kv, scale, b, i_h, score_captured0_ptr,
        score_captured0_stride0, score_captured0_size0, score_captured0_size1)
    scores = hide(scores, start_m, block * BLOCK_N, seq_q, seq_kv, last)
    weights, row_max, row_sum, shrink = weigh(scores, row_max, row_sum, scale_log2)
    acc = rescale(acc, shrink)
    weights = as_factor(weights)
    mbarrier.wait(value_full.index(slot), phase)
    if (block + 1) * BLOCK_N > seq_kv:
        clear_beyond(values, slot, block * BLOCK_N, seq_kv)
    acc_token = multiply_values(weights, values, slot, acc)
    acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=(acc_token, weights))
    free_value(value_free, slot)
    slot, phase = advance(slot, phase)
    return acc, row_max, row_sum, slot, phase


@gluon.jit
def attend(
    c: gl.constexpr, tile, turn, slot, phase,
    output, output_ptr, stride_oh, stride_os, lse_ptr, scratch_ptr, queries, outputs, query_full, query_free,
    keys, values, key_full, key_free, value_full, value_free, turns,
    cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size, scale_log2, scale,
    score_captured0_ptr, score_captured0_stride0, score_captured0_size0, score_captured0_size1
):
    """A consumer's part in a tile."""
    start_m, i_b, i_h, begin, end, begin_q, seq_q, begin_kv, seq_kv, last, sequence = place_of(tile, cu_seqlens_q_ptr,
        cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size)
    start_m += c * ROWS
    b = gl.minimum(sequence, batch - 1)
    # All rows see all keys of the blocks before inner_end. The first row's last key is in none of them, so that every
    # row that sees any key has met one when they come.
    inner_end = gl.maximum(begin, gl.minimum(end - 1, gl.maximum(0, start_m + last) // BLOCK_N))

    query_place, query_phase = query_slot(c, turn)
    mbarrier.wait(query_full.index(query_place), query_phase)
    query_tile = queries.index(query_place).reshape([ROWS, WIDTH])
    row_max = gl.full([ROWS], LOWEST, gl.float32, SCORE_ROWS)
    row_sum = sum_of(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES))
    acc = gl.zeros([ROWS, WIDTH_V], gl.float32, OUTPUTS)
    for block in range(end - 1, inner_end, -1):
        acc, row_max, row_sum, slot, phase = step_cut(
            c, block, acc, row_max, row_sum, slot, phase,
            query_tile, keys, values, key_full, key_free, value_full, value_free, turns,
            start_m, seq_q, seq_kv, last, scale_log2, scale, b, i_h, score_captured0_ptr, score_captured0_stride0,
            score_captured0_size0, score_captured0_size1
        )
    # The block that may be cut at its right, before whose values the next block's keys are multiplied.
    value_slot = slot
    value_phase = phase
    mbarrier.wait(key_full.index(slot), phase)
    take_turn(c, turns, slot, phase)
    score_token = multiply_keys(query_tile, keys, slot)
    pass_turn(c, turns)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(score_token,))
    free_key(key_free, slot)
    scores = apply_score_mod(scores, start_m, inner_end * BLOCK_N, seq_q, seq_kv, scale, b, i_h, score_captured0_ptr,
        score_captured0_stride0, score_captured0_size0, score_captured0_size1)
    scores = hide(scores, start_m, inner_end * BLOCK_N, seq_q, seq_kv, last)
    weights, row_max, row_sum, shrink = weigh(scores, row_max, row_sum, scale_log2)
    acc = rescale(acc, shrink)
    weights = packed(weights)
    if (inner_end + 1) * BLOCK_N > seq_kv:
        mbarrier.wait(value_full.index(value_slot), value_phase)
        clear_beyond(values, value_slot, inner_end * BLOCK_N, seq_kv)
    slot, phase = advance(slot, phase)
    mbarrier.wait(key_full.index(slot), phase, pred=inner_end > begin)
    for block in range(inner_end - 1, begin - 1, -1):
        acc, weights, row_max, row_sum, shrink, slot, phase, value_slot, value_phase = step_inside(
            c, block, begin, acc, weights, row_max, row_sum, shrink, slot, phase, value_slot, value_phase,
            query_tile, keys, values, key_full, key_free, value_full, value_free, turns,
            start_m, seq_q, seq_kv, last, scale_log2, scale, b, i_h, score_captured0_ptr, score_captured0_stride0,
            score_captured0_size0, score_captured0_size1
        )
    mbarrier.wait(value_full.index(value_slot), value_phase)
    factor = unpacked(weights)
    acc_token = multiply_values(factor, values, value_slot, acc)
    acc, factor = warpgroup_mma_wait(num_outstanding=0, deps=(acc_token, factor))
    free_value(value_free, value_slot)
    mbarrier.arrive(query_free.index(query_place), count=1)

    # A row that sees no key has sum 0: its output is 0 and its LSE -inf.
    total = gl.convert_layout(gl.sum(row_sum, 1), SCORE_ROWS)
    share = gl.where(total == 0.0, 0.0, 1.0 / total)
    # [ROWS, WIDTH_V]
    rounded = (acc * gl.convert_layout(share, OUTPUT_ROWS)[:, None]).to(ELEMENT)
    tma.store_wait(pendings=0)
    output_tile = outputs.index(c)
    output_tile.reshape([ROWS, WIDTH_V]).store(rounded)
    fence_async_shared()
    if start_m + ROWS <= seq_q:
        tma.async_copy_shared_to_global(output, [i_b, i_h, begin_q + start_m, 0], output_tile)
    elif start_m < seq_q:
        # The next sequence's rows follow, which the TMA unit would overwrite.
        o_m = start_m + gl.arange(0, ROWS, OUTPUT_ROWS)
        o_d = gl.arange(0, WIDTH_V, OUTPUT_DIMS)
        row_ptrs = output_ptr + i_h.to(gl.int64) * stride_oh + (begin_q + o_m).to(gl.int64) * stride_os
        m_o = (o_m < seq_q)[:, None]
        gl.store(row_ptrs[:, None] + o_d[None, :], rounded, mask=m_o)
    o_m = start_m + gl.arange(0, ROWS, SCORE_ROWS)
    log_sum = gl.where(total == 0.0, float("-inf"), (row_max + gl.log2(total)) * 0.6931471805599453)
    gl.store(lse_ptr + i_h.to(gl.int64) * tokens_q + begin_q + o_m, log_sum, mask=o_m < seq_q)
    # A sum that outgrew its bound, or an output that is no finite number, has the tile computed again.
    right = (total < TOO_LARGE) & (gl.convert_layout(gl.sum(acc * 0.0, 1), SCORE_ROWS) == 0.0)
    rows = start_m + gl.arange(0, ROWS, SCORE_ROWS)
    wrong = (rows < seq_q) & (right == 0)
    gl.store(scratch_ptr + 2 + tile + rows * 0, 1, mask=wrong)
    tiles = (tokens_q // BLOCK_M + batch + 1) * heads_q
    gl.store(scratch_ptr + 2 + tiles + gl.program_id(0) + rows * 0, 1, mask=wrong)
    return slot, phase


@gluon.jit
def wait_written():
    """Waits until the outputs that this thread sent lie in memory, where others may then overwrite them."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.thread_barrier()


@gluon.jit
def has_wild(values, slot):
    """Whether a block of values holds any NaN or inf."""
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    value_tile = values.index(slot).reshape([BLOCK_N, WIDTH_V])
    spoilt = gl.zeros([16, WIDTH_V], gl.float32, spread)
    for part in gl.static_range(BLOCK_N // 16):
        spoilt += value_tile.slice(part * 16, 16).load(spread).to(gl.float32) * 0.0
    return gl.max(gl.max(gl.where(spoilt == 0.0, 0, 1), 1), 0)


@gluon.jit
def add_by_key(acc, weights, value_ptr, stride_vs, start_n, seq_kv):
    """Adds a block of values key by key; one that is no finite number reaches only the rows that see its key.

    The weight of a hidden pair is -1.
    """
    o_n = gl.arange(0, BLOCK_N, SCORE_KEYS)
    o_even, o_odd = gl.split(gl.reshape(gl.arange(0, WIDTH_V, OUTPUT_DIMS), [WIDTH_V // 2, 2]))
    o_pairs = o_even // 2
    pairs_ptr = value_ptr.to(gl.pointer_type(gl.int32), bitcast=True)  # half as many registers
    for n in range(BLOCK_N):
        m_d = (o_pairs < 64) & (start_n + n < seq_kv)
        pairs = gl.load(pairs_ptr + ((start_n + n).to(gl.int64) * stride_vs >> 1) + o_pairs, mask=m_d, other=0)
        number = gl.convert_layout(gl.reshape(halves(pairs), [WIDTH_V]), OUTPUT_DIMS).to(gl.float32)[None, :]
        weight = gl.convert_layout(gl.sum(gl.where((o_n == n)[None, :], weights, 0.0), 1), OUTPUT_ROWS)[:, None]
        seen = gl.where(weight >= 0.0, number, 0.0)
        acc += gl.where(number * 0.0 == 0.0, gl.maximum(weight, 0.0) * number, seen)
    return acc


@gluon.jit
def attend_again(
    c: gl.constexpr, tile, turn, slot, phase, value_ptr, stride_vb, stride_vh, stride_vs,
    output, output_ptr, stride_oh, stride_os, lse_ptr, scratch_ptr, queries, outputs, query_full, query_free,
    keys, values, key_full, key_free, value_full, value_free, turns,
    cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size, scale_log2, scale,
    score_captured0_ptr, score_captured0_stride0, score_captured0_size0, score_captured0_size1
):
    """A consumer's part in a tile that is computed again: around each row's own maximum, and past wild values."""
    start_m, i_b, i_h, begin, end, begin_q, seq_q, begin_kv, seq_kv, last, sequence = place_of(tile, cu_seqlens_q_ptr,
        cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size)
    start_m += c * ROWS
    b = gl.minimum(sequence, batch - 1)
    # All rows see all keys of the blocks before inner_end. The first row's last key is in none of them, so that every
    # row that sees any key has met one when they come.
    inner_end = gl.maximum(begin, gl.minimum(end - 1, gl.maximum(0, start_m + last) // BLOCK_N))

    value_ptr += begin_kv.to(gl.int64) * stride_vs + (i_h // group_size).to(gl.int64) * stride_vh
    query_place, query_phase = query_slot(c, turn)
    mbarrier.wait(query_full.index(query_place), query_phase)
    query_tile = queries.index(query_place).reshape([ROWS, WIDTH])
    row_max = gl.full([ROWS], LOWEST, gl.float32, SCORE_ROWS)
    row_sum = sum_of(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES))
    acc = gl.zeros([ROWS, WIDTH_V], gl.float32, OUTPUTS)
    for block in range(end - 1, begin - 1, -1):
        mbarrier.wait(key_full.index(slot), phase)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(multiply_keys(query_tile, keys, slot),))
        free_key(key_free, slot)
        mbarrier.wait(value_full.index(slot), phase)
        if (block + 1) * BLOCK_N > seq_kv:
            clear_beyond(values, slot, block * BLOCK_N, seq_kv)
        wild = has_wild(values, slot)  # now, while there are few numbers in registers
        scores = apply_score_mod(scores, start_m, block * BLOCK_N, seq_q, seq_kv, scale, b, i_h, score_captured0_ptr,
            score_captured0_stride0, score_captured0_size0, score_captured0_size1)
        if block >= inner_end:
            scores = hide(scores, start_m, block * BLOCK_N, seq_q, seq_kv, last)
        weights, row_max, row_sum, shrink = weigh(scores, row_max, row_sum, scale_log2)
        acc = rescale(acc, shrink)
        if wild == 1:
            weights = gl.where(scores == float("-inf"), -1.0, weights)
            acc = add_by_key(acc, weights, value_ptr, stride_vs, block * BLOCK_N, seq_kv)
        else:
            factor = as_factor(weights)
            acc_token = multiply_values(factor, values, slot, acc)
            acc, factor = warpgroup_mma_wait(num_outstanding=0, deps=(acc_token, factor))
        free_value(value_free, slot)
        slot, phase = advance(slot, phase)


    # A row that sees no key has sum 0: its output is 0 and its LSE -inf.
    total = gl.convert_layout(gl.sum(row_sum, 1), SCORE_ROWS)
    share = gl.where(total == 0.0, 0.0, 1.0 / total)
    # [ROWS, WIDTH_V]
    rounded = (acc * gl.convert_layout(share, OUTPUT_ROWS)[:, None]).to(ELEMENT)
    output_tile = outputs.index(c)
    output_tile.reshape([ROWS, WIDTH_V]).store(rounded)
    fence_async_shared()
    if start_m + ROWS <= seq_q:
        tma.async_copy_shared_to_global(output, [i_b, i_h, begin_q + start_m, 0], output_tile)
    elif start_m < seq_q:
        # The next sequence's rows follow, which the TMA unit would overwrite.
        o_m = start_m + gl.arange(0, ROWS, OUTPUT_ROWS)
        o_d = gl.arange(0, WIDTH_V, OUTPUT_DIMS)
        row_ptrs = output_ptr + i_h.to(gl.int64) * stride_oh + (begin_q + o_m).to(gl.int64) * stride_os
        m_o = (o_m < seq_q)[:, None]
        gl.store(row_ptrs[:, None] + o_d[None, :], rounded, mask=m_o)
    o_m = start_m + gl.arange(0, ROWS, SCORE_ROWS)
    log_sum = gl.where(total == 0.0, float("-inf"), (row_max + gl.log2(total)) * 0.6931471805599453)
    gl.store(lse_ptr + i_h.to(gl.int64) * tokens_q + begin_q + o_m, log_sum, mask=o_m < seq_q)
    tma.store_wait(pendings=0)
    mbarrier.arrive(query_free.index(query_place), count=1)
    return slot, phase


@gluon.jit
def consume(
    c: gl.constexpr, output, output_ptr, stride_oh, stride_os, lse_ptr, scratch_ptr, queries, outputs, query_full,
    query_free,
    keys, values, key_full, key_free, value_full, value_free, turns,
    next_tile, next_full, next_free, cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q,
    group_size, scale_log2, scale, score_captured0_ptr, score_captured0_stride0, score_captured0_size0,
    score_captured0_size1
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
    tiles = (tokens_q // BLOCK_M + batch + 1) * heads_q
    while tile < tiles:
        slot, phase = attend(
            c, tile, turn, slot, phase, output, output_ptr, stride_oh, stride_os, lse_ptr, scratch_ptr, queries,
            outputs, query_full, query_free,
            keys, values, key_full, key_free, value_full, value_free, turns,
            cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size, scale_log2, scale,
            score_captured0_ptr, score_captured0_stride0, score_captured0_size0, score_captured0_size1
        )
        mbarrier.wait(next_full, turn & 1)
        tile = gl.max(next_tile.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(next_free, count=1)
        turn += 1
    tma.store_wait(pendings=0)


@gluon.jit
def consume_again(
    c: gl.constexpr, tile, value_ptr, stride_vb, stride_vh, stride_vs, output, output_ptr, stride_oh, stride_os,
    lse_ptr, scratch_ptr, queries, outputs, query_full, query_free,
    keys, values, key_full, key_free, value_full, value_free, turns,
    cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size, scale_log2, scale,
    score_captured0_ptr, score_captured0_stride0, score_captured0_size0, score_captured0_size1
):
    """Consumer `c`, for the tiles that must be computed again."""
    wait_written()
    for free in gl.static_range(STAGES):
        free_key(key_free, gl.to_tensor(free))
        free_value(value_free, gl.to_tensor(free))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tiles = (tokens_q // BLOCK_M + batch + 1) * heads_q
    while tile >= 0:
        if gl.load(scratch_ptr + 2 + tile) == 1:
            slot, phase = attend_again(
                c, tile, turn, slot, phase, value_ptr, stride_vb, stride_vh, stride_vs, output, output_ptr, stride_oh,
                stride_os, lse_ptr, scratch_ptr, queries, outputs, query_full, query_free,
                keys, values, key_full, key_free, value_full, value_free, turns,
                cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size, scale_log2, scale,
                score_captured0_ptr, score_captured0_stride0, score_captured0_size0, score_captured0_size1
            )
            turn += 1
        tile = gl.load(scratch_ptr + 2 + 2 * tiles + tile)


@gluon.jit
def produce(
    query, key, value, scratch_ptr, queries, outputs, query_full, query_free,
    keys, values, key_full, key_free, value_full, value_free, turns,
    next_tile, next_full, next_free, cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q,
    group_size
):
    """The producer."""
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    tile = gl.program_id(0)
    tiles = (tokens_q // BLOCK_M + batch + 1) * heads_q
    # Consumers that write 1 do so after these stores of 0, since they wait for what is loaded below.
    gl.store(scratch_ptr + 2 + tiles + tile, 0)
    before = gl.to_tensor(-1)
    while tile < tiles:
        gl.store(scratch_ptr + 2 + tile, 0)
        gl.store(scratch_ptr + 2 + 2 * tiles + tile, before)
        before = tile
        load_first(
            tile, turn, slot, phase, query, key, queries, outputs, query_full, query_free, keys, values, key_full,
            key_free, value_full, value_free, turns, cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv,
            heads_q, group_size
        )
        coming = gl.atomic_add(scratch_ptr, 1) + gl.num_programs(0)
        slot, phase = load_rest(
            tile, slot, phase, key, value, keys, values, key_full, key_free, value_full, value_free, turns,
            cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size
        )
        coming = gl.where(coming < tiles, coming, tiles + tile)  # which tells forward where to begin again
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
def produce_again(
    tile, query, key, value, scratch_ptr, queries, outputs, query_full, query_free,
    keys, values, key_full, key_free, value_full, value_free, turns,
    cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size
):
    """The producer, for the tiles that must be computed again."""
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    tiles = (tokens_q // BLOCK_M + batch + 1) * heads_q
    while tile >= 0:
        if gl.load(scratch_ptr + 2 + tile) == 1:
            load_first(
                tile, turn, slot, phase, query, key, queries, outputs, query_full, query_free, keys, values, key_full,
                key_free, value_full, value_free, turns, cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q,
                tokens_kv, heads_q, group_size
            )
            slot, phase = load_rest(
                tile, slot, phase, key, value, keys, values, key_full, key_free, value_full, value_free, turns,
                cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size
            )
            turn += 1
        tile = gl.load(scratch_ptr + 2 + 2 * tiles + tile)
    for free in gl.static_range(STAGES):  # the consumers' last arrivals
        wait_free_key(key_free, gl.to_tensor(free), phase)
        wait_free_value(value_free, gl.to_tensor(free), phase)


@gluon.jit
def forward(
    query, key, value, output, value_ptr, stride_vb, stride_vh, stride_vs, output_ptr, stride_oh, stride_os, lse_ptr,
    scratch_ptr,
    cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size, scale_log2,
    score_captured0_ptr, score_captured0_stride0, score_captured0_size0, score_captured0_size1
):
    """Each program computes one tile after another: BLOCK_M rows of one head of one sequence."""
    scale = scale_log2 / LOG2E
    scale_log2 = gl.to_tensor(LOG2E)  # of scores that the caller has changed
    queries = gl.allocate_shared_memory(ELEMENT, [QUERY_STAGES * CONSUMERS, 1, 1, ROWS, WIDTH], query.layout)
    outputs = gl.allocate_shared_memory(ELEMENT, [CONSUMERS, 1, 1, ROWS, WIDTH_V], output.layout)
    keys = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, 1, BLOCK_N, WIDTH], key.layout)
    values = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, 1, BLOCK_N, WIDTH_V], value.layout)
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
    sizes = (cu_seqlens_q_ptr, cu_seqlens_kv_ptr, batch, tokens_q, tokens_kv, heads_q, group_size)
    results = (output, output_ptr, stride_oh, stride_os, lse_ptr, scratch_ptr,)
    gl.warp_specialize(
        [
            (consume,
            (0,) + results + shared + (next_tile, next_full, next_free) + sizes + (scale_log2, scale,
            score_captured0_ptr, score_captured0_stride0, score_captured0_size0, score_captured0_size1,)),
            (consume,
            (1,) + results + shared + (next_tile, next_full, next_free) + sizes + (scale_log2, scale,
            score_captured0_ptr, score_captured0_stride0, score_captured0_size0, score_captured0_size1,)),
            (produce, (query, key, value, scratch_ptr) + shared + (next_tile, next_full, next_free) + sizes),
        ],
        [4, 1],  # warps; the first consumer has OPTIONS["num_warps"]
        [240, 24],  # registers of a thread; the first consumer has the rest
    )
    # Here the warps are together again, and most often nothing is left to do. Roles of their own, rather than a second
    # loop in those above, leave the registers of these as they are.
    tiles = (tokens_q // BLOCK_M + batch + 1) * heads_q
    if gl.load(scratch_ptr + 2 + tiles + gl.program_id(0)) == 1:
        tile = gl.max(next_tile.load(gl.BlockedLayout([1], [32], [4], [0])), 0) - tiles
        drop_barriers(query_full, query_free, key_full, key_free, value_full, value_free)
        init_barriers(query_full, query_free, key_full, key_free, value_full, value_free)
        gl.warp_specialize(
            [
                (consume_again,
                (0, tile, value_ptr, stride_vb, stride_vh, stride_vs) + results + shared + sizes + (scale_log2, scale,
                score_captured0_ptr, score_captured0_stride0, score_captured0_size0, score_captured0_size1,)),
                (consume_again,
                (1, tile, value_ptr, stride_vb, stride_vh, stride_vs) + results + shared + sizes + (scale_log2, scale,
                score_captured0_ptr, score_captured0_stride0, score_captured0_size0, score_captured0_size1,)),
                (produce_again, (tile, query, key, value, scratch_ptr) + shared + sizes),
            ],
            [4, 1],
            [240, 24],
        )
    drop_barriers(query_full, query_free, key_full, key_free, value_full, value_free)
    for place in gl.static_range(CONSUMERS):
        mbarrier.invalidate(turns.index(place))
    mbarrier.invalidate(next_full)
    mbarrier.invalidate(next_free)
