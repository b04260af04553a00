"""What it costs the TMA unit to copy rows of a head, by where they begin in lines and sectors of memory.

A box has 128 bytes of each row, or what is left of it. Where rows begin with a line, a box asks the L2 for one line of
each; where they do not, for its sectors, and for more of them where rows begin or end within one. `copy_times.py`
measures copies alone. The numbers are those with which the times of kernels are the likeliest.
"""

from __future__ import annotations

import math

LINE_BYTES = 128  # of the L2's lines, and of the widest box with swizzled rows
SECTOR_BYTES = 32
# Of a box, in times of one of rows that begin with a line (docs/decisions/head-dims.md).
OF_SECTORS = 1.3  # where all rows begin with a sector
CUT_SECTORS = 2.2  # where they do not


def box_cost(row_bytes: int) -> float:
    """Of a box of rows that lie one behind another."""
    if row_bytes % LINE_BYTES == 0 or LINE_BYTES % row_bytes == 0:
        return 1.0
    return OF_SECTORS if row_bytes % SECTOR_BYTES == 0 else CUT_SECTORS


def boxes_of_row(row_bytes: int) -> int:
    """How many boxes hold a row."""
    return -(-row_bytes // LINE_BYTES)


def lines_over_row(row_bytes: int) -> float:
    """Bytes of the lines that hold a part of a row, over those of the row; the mean of rows that lie side by side."""
    return 1.0 + (LINE_BYTES - math.gcd(row_bytes, LINE_BYTES)) / row_bytes
