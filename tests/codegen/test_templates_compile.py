"""Every template compiles for every architecture, with whatever Triton is installed; no GPU is needed.

`make test-wheel` runs this file, as all others, with what pip brings.
"""

from __future__ import annotations

import inspect as inspect_source
import linecache
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels
import pytest
import triton
from rarely import rarely
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autoattn.codegen import render, resources, search_space
from autoattn.core import device_profiles
from autoattn.core.key_cache import KeyCache
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias
from autoattn.core.problem import DType, Layout, Op, Precision, Problem
from autoattn.core.variant import Source, Traits, Variant
from autoattn.errors import CompileError
from autoattn.kernels.compiler import build, inspect, load_module

pytestmark = [pytest.mark.usefixtures("nothing_compiled_before"), pytest.mark.sampled]

CARDS = {80: "a30", 86: "rtx3090", 89: "l4", 90: "h200", 100: "b200", 120: "rtx5090"}
# To these Triton gives the tensor cores' instructions of 80, so that each compiles a part of what 80 does.
ALIKE = (86, 89)
EACH = rarely(CARDS, lambda arch: arch in (80, 90))
# Those for every card; test_gluon_compile.py has the family for Hopper, test_backward_compile.py the gradients.
TEMPLATES = [name for name in resources.template_names(Op.FORWARD) if name.startswith("triton/")]


def kinds() -> Iterator[tuple[Problem, Traits]]:
    """Every type of numbers, mask, head dim class and trait, in few calls; large enough for every parameter value."""
    sizes = {"batch": 16, "heads_q": 32, "heads_kv": 8, "seq_q": 4096, "seq_kv": 8192}
    for numbers, head_dim, mask, alignment, wide, lse in (
        (kernels.NUMBERS[0], 64, "full", 8, False, False),
        (kernels.NUMBERS[0], 57, "causal:top-left", 1, True, True),
        (kernels.NUMBERS[1], 128, "causal", 8, True, False),
        (kernels.NUMBERS[1], 80, "full", 2, False, True),
        (kernels.NUMBERS[2], 16, "causal", 4, False, True),
        (kernels.NUMBERS[3], 40, "causal:top-left", 4, False, False),
        (kernels.NUMBERS[3], 32, "full", 1, False, False),
    ):
        dtype, precision = numbers
        problem = kernels.problem(dtype=dtype, precision=precision, head_dim=head_dim, mask=mask, **sizes)
        yield problem, Traits(alignment=alignment, wide=wide, lse=lse)
    few = sizes | {"batch": 1, "heads_q": 8, "heads_kv": 2, "seq_q": 4}
    yield kernels.problem(dtype=DType.BFLOAT16, head_dim=64, **few), Traits(lse=True)
    cached = sizes | {"seq_q": 1, "seq_kv": 65536}
    yield kernels.problem(dtype=DType.BFLOAT16, head_dim=64, mask="full", cache=KeyCache(page=16), **cached), Traits()


def every_axis(arch: int) -> Iterator[Source]:
    """Few kernels that hold every mask, modifier, type of numbers, pair of head dims and loop; others on each card."""
    numbers = [each for each in kernels.NUMBERS if each[0] is not DType.FLOAT8 or arch >= 89]  # older cards have none
    turn = list(CARDS).index(arch)
    for place, kind in enumerate(kernels.KINDS):
        if arch in ALIKE and place % 2 != ALIKE.index(arch):
            continue
        dtype, precision = numbers[(place + turn) % len(numbers)]
        if dtype is DType.FLOAT8 and kind["mask"] in SMALL_BLOCKS:
            dtype = DType.BFLOAT16  # a float8 product sums over at least 32 keys
        head_dim, head_dim_v = DIMS[(place + 2 * turn) % len(DIMS)]
        modifiers = kernels.MODIFIERS[(place + turn) % len(kernels.MODIFIERS)]
        if "layout" in kind:
            modifiers = replace(modifiers, bias=Bias.NONE)  # packed sequences take none
        problem = kernels.problem(
            dtype=dtype, precision=precision, head_dim=head_dim, head_dim_v=head_dim_v, modifiers=modifiers, **kind
        )
        each_head = modifiers.bias is not Bias.NONE or modifiers.score_mod or modifiers.dropout or problem.mask.sparse
        yield kernels.source(
            problem,
            render.natural_traits(problem, lse=bool(place % 2)),
            BLOCK_M=32 if kind.get("mask") != "blocks:16x32,0.5" else 16,
            BLOCK_N=32 if kind["mask"] not in SMALL_BLOCKS else 16,
            num_warps=4,
            num_stages=2,
            softmax=("online", "lazy", "first_max")[(place + turn) % 3],
            mask_loop=("split", "every", "branch")[(place + turn) // 3 % 3],
            HEAD_SPLIT=(place + turn) % 2,
            PERSISTENT=place // 2 % 2,
            SPLITS=4 if place // 2 % 2 == 0 and (place + turn) % 2 else 1,
            PACK_GQA=int((place + turn) % 3 == 0 and not each_head),
        )


SMALL_BLOCKS = [kind["mask"] for kind in kernels.KINDS if isinstance(kind["mask"], Mask)]  # of 16 keys
DIMS = ((16, 16), (80, 80), (57, 57), (64, 128), (96, 17))


def sources(template: str, arch: int) -> list[Source]:
    """Few kernels that the search could try on a card of `arch`: every kind, and every value of every parameter.

    On a card like another one, every kind alone.
    """
    device = device_profiles.named(CARDS[arch])
    points = search_space.load(template)
    implied = set(points.implied.items())
    missing = {(name, value) for name, values in points.choices.items() for value in values} - implied
    rng = random.Random(arch)
    pool = []
    for problem, traits in kinds():
        for _ in range(60):
            variant = next(points.feasible(problem, device, rng))
            pool.append((problem, traits, variant))
    chosen = []
    for kind in kinds():  # one of each kind, then whatever values are still missing
        best = max((item for item in pool if item[:2] == kind), key=lambda item: gain(item[2], missing))
        chosen.append(best)
        missing -= set(best[2].params)
    while missing and arch not in ALIKE:
        best = max(pool, key=lambda item: (bool(missing & set(item[2].params)), gain(item[2], missing)))
        assert missing & set(best[2].params), f"no feasible variant has any of {sorted(missing, key=str)}"
        chosen.append(best)
        missing -= set(best[2].params)
    return [render.render(problem, variant, traits) for problem, traits, variant in chosen]


def gain(variant: Variant, missing: set[tuple[str, Any]]) -> float:
    """How many missing values it has, less something for a warp's share of a tile: a large one compiles for long."""
    share = int(variant["BLOCK_M"]) * int(variant["BLOCK_N"]) / int(variant["num_warps"])
    return len(missing & set(variant.params)) - share / 512


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_value_of_every_parameter_compiles(template: str, arch: int) -> None:
    for source in sources(template, arch):
        compiled = build(source, arch)
        assert compiled.asm["cubin"], source.variant
        assert compiled.metadata.num_warps == source.variant["num_warps"]
        assert f".target sm_{arch}" in compiled.asm["ptx"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", CARDS)
def test_every_mask_modifier_and_precision_compiles_on_every_card(arch: int) -> None:
    compile_all(list(every_axis(arch)), arch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "part"),
    rarely([(80, slice(0, 2)), (80, slice(2, 6)), (90, slice(6, None))], lambda case: case[1] == slice(0, 2)),
    ids=str,
)  # all, between them
@pytest.mark.exhaustive
def test_every_mask_modifier_and_precision_compiles_on_some_card(arch: int, part: slice) -> None:
    compile_all(list(every_axis(arch))[part], arch)


def compile_all(sources: list[Source], arch: int) -> None:
    assert sources
    for source in sources:
        compiled = build(source, arch)
        assert compiled.asm["cubin"], source.variant
        assert f".target sm_{arch}" in compiled.asm["ptx"]


@pytest.mark.parametrize("point", kernels.covering({
    "mask_loop": ("split", "every", "branch"),
    "softmax": ("online", "lazy", "first_max"),
    "barrier": ("none", "after_qk", "before_pv", "loop_end"),
    "PERSISTENT": (0, 2),
    "mask": kernels.MASKS,
}), ids=str)  # fmt: skip
def test_every_pair_of_structures_compiles(point: dict[str, Any]) -> None:
    point = dict(point)
    problem = kernels.problem(mask=point.pop("mask"))
    assert build(kernels.source(problem, BLOCK_N=32, **point), 80).asm["cubin"]


STAGED = [  # facts, whether the head dim is in pieces, and stages of which one more is too many for an SM of Hopper
    ({"dtype": DType.FLOAT32, "precision": Precision.TF32, "head_dim": 128, "mask": "causal"}, 0, 2),
    ({"dtype": DType.BFLOAT16, "head_dim": 256}, 0, 2),
    ({"dtype": DType.FLOAT16, "head_dim": 160}, 1, 4),
]


@pytest.mark.parametrize(("facts", "split", "stages"), rarely(STAGED, lambda case: case is STAGED[0]), ids=str)
@pytest.mark.exhaustive
def test_rules_know_how_many_stages_of_warpgroup_products_fit(facts: dict[str, Any], split: int, stages: int) -> None:
    params = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "HEAD_SPLIT": split}
    problem = kernels.problem(seq_q=512, seq_kv=1024, **facts)
    space, card = search_space.load("triton/forward"), device_profiles.named("h200")
    sizes, reasons = [], []
    for count in (stages, stages + 1):
        chosen = kernels.variant(num_stages=count, **params)
        reasons.append(space.why_infeasible(chosen, problem, card) or "")
        sizes.append(inspect(render.render(problem, chosen), 90).shared_bytes)
    assert sizes[0] <= card.shared_bytes_per_block < sizes[1]
    assert reasons[0] == ""
    assert "shared memory of one block" in reasons[1]


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(each, marks=pytest.mark.exhaustive) if each in kernels.NUMBERS[3:5] else each
        for each in kernels.NUMBERS[1:5]
    ],
    ids=lambda numbers: "-".join(part.value for part in numbers),
)
def test_the_widest_head_compiles_with_the_smallest_tile(numbers: Any) -> None:
    dtype, precision = numbers
    problem = kernels.problem(dtype=dtype, precision=precision, head_dim=256 if dtype is not DType.FLOAT32 else 200)
    num_warps = 4 if numbers == kernels.NUMBERS[2] else 1  # without tensor cores more warps share the work
    assert build(kernels.source(problem, num_warps=num_warps), 80).asm["cubin"]


@pytest.mark.parametrize(("head_dim", "split"), [(16, 0), (80, 1), (72, 1)])
def test_float8_products_sum_over_enough_elements(head_dim: int, split: int) -> None:
    problem = kernels.problem(dtype=DType.FLOAT8, head_dim=head_dim)
    source = kernels.source(problem, BLOCK_N=32, HEAD_SPLIT=split)
    assert build(source, 90).asm["cubin"]
    with pytest.raises(CompileError, match="fp8e4nv not supported"):
        build(source, 80)


@pytest.mark.parametrize("persistent", [0, 2])
def test_an_exported_file_compiles_when_triton_takes_sizes_of_one_as_constants(persistent: int) -> None:
    """A plain launch of the file does that; autoattn's own launch passes them as numbers."""
    problem = kernels.problem(mask="causal")
    source = kernels.source(problem, Traits(alignment=1, lse=True), PERSISTENT=persistent, HEAD_GROUP=4)
    module = load_module(source)
    ones = (
        "stride_qd",
        "stride_kd",
        "stride_vd",
        "stride_od",
        "batch_heads",
        "heads_q",
        "group_size",
        "seq_q",
        "seq_kv",
    )
    signature = {name: "constexpr" if name in ones else kind for name, kind in module.SIGNATURE.items()}
    kernel = ASTSource(
        fn=module.forward,
        signature=signature,
        constexprs={(list(signature).index(name),): 1 for name in ones},
    )
    compiled = triton.compile(
        kernel, target=GPUTarget("cuda", 80, 32), options={**module.OPTIONS, "enable_fp_fusion": True}
    )
    assert compiled.asm["cubin"]


def test_divisible_strides_give_wide_loads_and_unknown_ones_do_not() -> None:
    problem = kernels.problem(head_dim=64)
    loads = {
        alignment: build(kernels.source(problem, Traits(alignment=alignment), num_stages=3), 80).asm["ptx"]
        for alignment in (8, 1)
    }
    assert "cp.async.cg.shared.global" in loads[8], "16 bytes at a time"
    assert "cp.async.cg.shared.global" not in loads[1]


@pytest.mark.exhaustive
def test_a_register_cap_reaches_the_compiler() -> None:
    problem = kernels.problem(dtype=DType.BFLOAT16, head_dim=128)
    tile: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    free, capped = (inspect(kernels.source(problem, maxnreg=cap, **tile), 80) for cap in (0, 168))
    assert free.registers > 168 >= capped.registers


def test_a_compiler_that_refuses_is_quoted_in_one_sentence() -> None:
    source = kernels.source(kernels.problem())
    broken = replace(source, text=source.text.replace("tl.dot(query, key)", "tl.dot(query, nothing)"))
    with pytest.raises(
        CompileError, match=rf"^Triton {triton.__version__} cannot compile this variant for sm_80: "
    ) as caught:
        build(broken, 80)
    assert "\n" not in str(caught.value)


def test_a_kernel_is_compiled_from_the_text_that_its_digest_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path))
    source = kernels.source(kernels.problem(head_dim=24))
    module = load_module(source)
    assert module.__file__ is not None
    assert source.digest in module.__file__
    linecache.checkcache()
    assert "".join(linecache.getlines(module.__file__)) == source.text
    assert inspect_source.getsource(getattr(module, source.name).fn) in source.text
    assert list(tmp_path.iterdir()) == [], "no file is written"


FLOAT32 = {"dtype": DType.FLOAT32, "head_dim": 64}
PACKED = {"layout": Layout.PACKED, "tokens_q": 66, "tokens_kv": 100}
SEEN_BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two tiles, and whole ones when computed anew": ({"head_dim": 80, "mask": "causal"}, {"HEAD_SPLIT": 1}),
    "two tiles of queries and one of values": ({"head_dim": 96, "head_dim_v": 64, "mask": "causal"}, {"HEAD_SPLIT": 1}),
    "two tiles around the first maximum": ({"head_dim": 96}, {"HEAD_SPLIT": 1, "softmax": "first_max"}),
    "six bfloat16 products": (FLOAT32, {"products": "bf16x6"}),
    "three bfloat16 products": ({**FLOAT32, "precision": Precision.TF32}, {"products": "bf16x3"}),
    "keys in tf32's order": ({**FLOAT32, "precision": Precision.TF32, "mask": "causal"}, {"softmax": "lazy"}),
    "packed float8": ({"dtype": DType.FLOAT8, "head_dim": 64, **PACKED}, {}),
    "a block table around its first block": ({"mask": "blocks:64x64,0.5"}, {"softmax": "first_max"}),
}


@pytest.mark.parametrize(
    ("name", "arch"),
    rarely(
        [(name, arch) for name in SEEN_BROKEN for arch in (80, 90)],
        lambda case: case[1] == (80 if [*SEEN_BROKEN].index(case[0]) % 2 else 90),
    ),
)
def test_what_once_did_not_compile_does(name: str, arch: int) -> None:
    facts, params = SEEN_BROKEN[name]
    problem = kernels.problem(**facts)
    if problem.dtype is DType.FLOAT8 and arch < 89:
        pytest.skip("float8 products need compute capability 8.9")
    source = kernels.source(problem, None, BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2, **params)
    assert build(source, arch).asm["cubin"]
