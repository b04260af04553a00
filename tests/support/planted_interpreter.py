"""A kernel of what the interpreters of some releases cannot do, as our templates write it; imported by the children."""

import triton
import triton.language as tl


@triton.jit
def rows_of_a_shared_tile(output_ptr, rows, parts):
    """Adds 1 to the first rows of [4, 8] for each of the parts, under a mask that a scalar comparison is a part of."""
    o_m = tl.arange(0, 4)
    o_d = tl.arange(0, 8)
    sums = tl.zeros([4, 8], tl.float32)
    for _ in tl.range(0, parts, 1):
        sums += 1.0
    writes = parts == 1
    if parts > 1:
        writes = parts > 1
    m_o = ((o_m < rows) & writes)[:, None]
    tl.store(output_ptr + o_m[:, None] * 8 + o_d[None, :], sums, mask=m_o)


@triton.jit
def ones(rows: tl.constexpr):
    """A device function."""
    return tl.zeros([rows], tl.float32) + 1.0


@triton.jit
def rows_of_a_device_function(output_ptr):
    """Sets a row of [4, 8] to 1 in each program."""
    tl.store(output_ptr + tl.program_id(0) * 8 + tl.arange(0, 8), ones(8))


@triton.jit
def sum_of_two(output_ptr, first, second):
    """Adds two numbers in 32 bits, which wrap around."""
    tl.store(output_ptr, first + second)
