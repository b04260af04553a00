"""A manifest says of rendered kernels what their text holds, and of a text without names that there is nothing."""

from __future__ import annotations

import dataclasses
import inspect
import re
from types import SimpleNamespace
from typing import Any

import gluon_kernels
import gradient_kernels
import hopper_gradients
import kernels
import pytest
import torch

from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Precision
from autoattn.core.variant import Source
from autoattn.kernels import manifest
from autoattn.kernels.compiler import Kernel, load_module
from autoattn.kernels.manifest import Language, Manifest

FUNCTIONS = {
    *("grid", "grids", "grid_before", "turned", "scratch", "arrivals", "tiles", "partials"),
    *("rows", "sums", "turns", "key_sums", "copies"),
}
TABLES = {
    "SIGNATURE": "signature", "PARTS": "parts", "PERSISTENT": "programs_an_sm", "PACK_GQA": "packs_all_heads",
    "RAGGED": "ragged", "HEADS": "packed_heads", "QUERIES_BLOCK_M": "bias_tile",
}  # fmt: skip
LONG = {"batch": 1, "heads_q": 8, "heads_kv": 8, "seq_q": 4, "seq_kv": 4096, "head_dim": 64}


def gluon_float8() -> Source:
    return gluon_kernels.source(gluon_kernels.problem(dtype=DType.FLOAT8, head_dim=128))


def turned_gradients() -> Source:
    problem = gradient_kernels.problem(dtype=DType.FLOAT32, precision=Precision.TF32)
    return gradient_kernels.source(problem, copies="turned", products="as_asked")


SOURCES = {
    "triton": lambda: kernels.source(kernels.problem()),
    "triton, persistent": lambda: kernels.source(kernels.problem(), PERSISTENT=2),
    "triton, shared tiles": lambda: kernels.source(kernels.problem(**LONG), SPLITS=4),
    "triton, packed heads": lambda: kernels.source(kernels.problem(), PACK_GQA=1),
    "triton, packed sequences": lambda: kernels.source(
        kernels.problem(layout=Layout.PACKED, tokens_q=70, tokens_kv=110), PACK_GQA=1
    ),
    "triton, gradients": lambda: gradient_kernels.source(gradient_kernels.problem()),
    "triton, gradients in boxes": lambda: gradient_kernels.source(
        gradient_kernels.problem(), queries_loads="descriptor", keys_loads="descriptor"
    ),
    "triton, gradients of a bias": lambda: gradient_kernels.source(
        gradient_kernels.problem(modifiers=Modifiers(bias=Bias.LEARNED))
    ),
    "triton, turned gradients": turned_gradients,
    "gluon": lambda: gluon_kernels.source(gluon_kernels.problem(head_dim=128)),
    "gluon, maximum that is kept": lambda: gluon_kernels.source(
        gluon_kernels.problem(head_dim=128), softmax="first_max"
    ),
    "gluon, heads together": lambda: gluon_kernels.source(gluon_kernels.problem(head_dim=64), PACK_GQA=4),
    "gluon, float8": gluon_float8,
    "gluon, gradients": lambda: hopper_gradients.source(hopper_gradients.problem()),
    "gluon, gradients of packed sequences": lambda: hopper_gradients.source(
        hopper_gradients.problem(layout=Layout.PACKED)
    ),
    "gluon, gradients in order": lambda: hopper_gradients.source(
        hopper_gradients.problem(), order="ascending", schedule="one_tile"
    ),
    "gluon, gradients of shared keys": lambda: hopper_gradients.source(hopper_gradients.problem(), WALKED_HEADS=2),
}
every_text = pytest.mark.parametrize("name", SOURCES)


@every_text
def test_a_manifest_has_what_the_text_defines_and_nothing_else(name: str) -> None:
    source = SOURCES[name]()
    text_manifest = manifest.of(load_module(source))
    defined = set(re.findall(r"^def (\w+)\(", source.text, re.M))
    assert {each for each in FUNCTIONS if getattr(text_manifest, each) is not None} == FUNCTIONS & defined
    for table, field in TABLES.items():
        assert bool(getattr(text_manifest, field)) == (re.search(rf"^{table} = ", source.text, re.M) is not None), table
    assert (
        (text_manifest.language is Language.GLUON) == name.startswith("gluon") == ("experimental.gluon" in source.text)
    )
    assert set(text_manifest.descriptors) == {
        each for each, kind in text_manifest.signature.items() if kind.startswith("tensordesc<")
    }
    if text_manifest.language is Language.GLUON:  # whose table of boxes names them all
        assert set(text_manifest.descriptors) == set(load_module(source).DESCRIPTORS)


@every_text
def test_a_kernel_before_the_main_one_has_a_grid_and_only_then(name: str) -> None:
    source = SOURCES[name]()
    text_manifest = manifest.of(load_module(source))
    assert (text_manifest.grid_before is not None) == (f"def {source.name}_before(" in source.text)


def test_every_field_is_told_of_some_text() -> None:
    manifests = [manifest.of(load_module(make())) for make in SOURCES.values()]
    for field in dataclasses.fields(Manifest):
        assert {bool(getattr(each, field.name)) for each in manifests} >= {True}, field.name
        assert field.name in ("language", "signature") or any(not getattr(each, field.name) for each in manifests)


def test_sizes_are_the_texts() -> None:
    shared = manifest.of(load_module(SOURCES["triton, shared tiles"]()))
    assert shared.arrivals is not None
    assert shared.arrivals(1, 8, 4) == 8
    team = manifest.of(load_module(SOURCES["gluon, heads together"]()))
    assert (team.packed_heads, team.packs_all_heads) == (4, False)
    assert manifest.of(load_module(SOURCES["triton, packed heads"]())).packs_all_heads
    assert manifest.of(load_module(SOURCES["triton, gradients of a bias"]())).bias_tile == (16, 16)


@pytest.mark.parametrize("name", SOURCES)
def test_functions_on_the_host_give_what_those_of_the_text_do_as_plain_numbers(name: str) -> None:
    module: Any = load_module(SOURCES[name]())
    text_manifest, held = manifest.of(module), [function for function in FUNCTIONS if hasattr(module, function)]
    assert held
    for function in held:
        required = [
            parameter
            for parameter in inspect.signature(getattr(module, function)).parameters.values()
            if parameter.default is parameter.empty
        ]
        sizes = (2, 8, 4, 301, 503, 2, 8)[: len(required)]
        ours, own = getattr(text_manifest, function)(*sizes), getattr(module, function)(*sizes)
        assert ours == own
        assert "constexpr" not in repr(ours)


@pytest.mark.parametrize("module", [SimpleNamespace(), None], ids=["empty", "none"])
def test_a_module_without_names_lacks_all(module: Any) -> None:
    empty_manifest = manifest.of(module)
    assert all(
        getattr(empty_manifest, field.name) == getattr(Manifest(), field.name) for field in dataclasses.fields(Manifest)
    )
    assert not any(
        getattr(empty_manifest, field.name) for field in dataclasses.fields(Manifest) if field.name != "language"
    )


def test_a_kernel_reads_its_module_once() -> None:
    module: Any = SimpleNamespace(tiles=lambda *sizes: 3)
    kernel = Kernel(source=None, module=module, compiled=None, device=torch.device("cpu"), sm_count=1)  # type: ignore[arg-type]
    assert kernel.manifest.tiles is module.tiles
    del module.tiles
    assert kernel.manifest.tiles is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernel.manifest.tiles = None  # type: ignore[misc]
