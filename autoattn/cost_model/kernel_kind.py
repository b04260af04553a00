"""Kinds of kernels for the cost model: how programs divide their work, and which machine code they are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from autoattn.codegen import search_space
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Variant

ROWS = 64  # of a warpgroup that computes, in kernels whose warps specialise
WARPGROUP = ("HGMMA", "QGMMA")  # products of a warpgroup, of 16 or 32 bits and of 8
SYNCHRONOUS = ("HMMA", "QMMA")  # of a warp, which waits for them


class Path(str, Enum):
    """Kinds of machine code that each have constants of their own."""

    WARPGROUP = "warpgroup"  # wgmma, as Triton's compiler arranges it
    SPECIALISED = "specialised"  # wgmma, by warpgroups beside one that loads
    SYNCHRONOUS = "synchronous"  # mma.sync of cards whose tensor cores know nothing else: Ampere's and Ada's
    SMALL_TILES = "small tiles"  # mma.sync of tiles that are too small for wgmma
    LANES = "lanes"  # float32 without tensor cores


def path_of(report: StaticReport, template: str) -> Path:
    """Whose constants hold for a kernel of a template."""
    if search_space.load(template).specialised:
        return Path.SPECIALISED
    if any(opcode.startswith(WARPGROUP) for opcode in report.loop):
        return Path.WARPGROUP
    if not any(opcode.startswith(SYNCHRONOUS) for opcode in report.loop):
        return Path.LANES
    return Path.SMALL_TILES if report.arch >= 90 else Path.SYNCHRONOUS


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program is one worker, or several that walk the same keys, each with rows of its own."""

    block_m: int  # query rows of all workers
    block_n: int  # keys of a pass
    workers: int
    rows: int  # of a worker
    warps: int  # of a worker
    specialised: bool  # other warps load, so that these wait less
    persistent: int  # programs an SM that walk all tiles; 0 is a program a tile
    dealt: bool  # tiles are dealt out round robin, whoever is ready first
    ahead: bool  # a worker's next product runs beside its softmax


def program_of(variant: Variant, report: StaticReport) -> Program:
    """From a variant's parameters, and from what its template says of its warps."""
    params = search_space.load(variant.template).all_params_of(variant)
    block_m, block_n = int(params["BLOCK_M"]), int(params["BLOCK_N"])
    if not search_space.load(variant.template).specialised:
        return Program(
            block_m=block_m, block_n=block_n, workers=1, rows=block_m, warps=report.num_warps,
            specialised=False, persistent=int(params["PERSISTENT"]), dealt=True, ahead=False,
        )  # fmt: skip
    walking = params["schedule"] != "one_tile"
    return Program(
        block_m=block_m, block_n=block_n, workers=max(1, block_m // ROWS), rows=min(ROWS, block_m), warps=4,
        specialised=True, persistent=int(params.get("CTAS", 1)) if walking else 0,
        dealt=params["schedule"] == "persistent", ahead=bool(params["overlap"]),
    )  # fmt: skip
