"""Precompiled kernels say of their launches what the compiled kernel and its text say."""

from __future__ import annotations

import itertools
from pathlib import Path

import kernels
import pytest
from checkout_paths import CHECKOUT

from autoattn.codegen import precompiled
from autoattn.codegen.precompiled import PrecompiledKernel
from autoattn.core import kernel_kind, triton_release
from autoattn.core.variant import Source
from autoattn.errors import CompileError
from autoattn.kernels import compiler, manifest, precompiled_kernel, precompiler

PROBLEM = kernels.problem(head_dim=64)
SIZES = [(1, 2, 1, 100, 300), (3, 8, 2, 1, 4097), (2, 16, 16, 4096, 4096)]  # batch, heads, key heads, lengths
FUNCTIONS = "scratch", "arrivals", "tiles", "partials", "sums", "turns"


def shipped_kinds() -> list[Path]:
    """A shipped file of each template, operation, kind of mask and way to hold sequences."""
    chosen = {}
    for path in precompiled.paths_in(CHECKOUT / "cache"):
        kernel = precompiled.read(path)
        assert kernel is not None
        facts = kernel.facts
        if facts.release == triton_release.installed_release() or facts.variant.template.startswith("triton/"):
            roles = tuple(function.name for function in facts.functions)
            chosen.setdefault((facts.variant.template, facts.kind.mask.kind, facts.kind.packed, roles), path)
    return list(chosen.values())


def read(path: Path) -> PrecompiledKernel:
    kernel = precompiled.read(path)
    assert kernel is not None
    return kernel


@pytest.mark.parametrize("path", shipped_kinds(), ids=lambda path: path.stem)
def test_the_host_side_says_what_the_text_says(path: Path) -> None:
    kernel = read(path)
    facts = kernel.facts
    source = Source(name=facts.name, text=kernel.text, variant=facts.variant, traits=facts.traits)
    text = manifest.of(compiler.load_module(source))
    host = manifest.of(precompiled_kernel.host_side(kernel))
    for name in (
        "language",
        "signature",
        "descriptors",
        "programs_an_sm",
        "packs_all_heads",
        "packed_heads",
        "bias_tile",
    ):
        assert getattr(host, name) == getattr(text, name), name
    assert list(host.parts) == list(text.parts)
    for batch, heads, heads_kv, seq_q, seq_kv in SIZES:
        for ours, theirs, sizes in (
            (host.grid, text.grid, (batch, heads, seq_q, 132)),
            (host.grids, text.grids, (batch, heads, heads_kv, seq_q, seq_kv)),
            (host.grid_before, text.grid_before, (batch, heads_kv, seq_kv)),
            (host.turned, text.turned, (batch, heads_kv, seq_kv)),
            (host.copies, text.copies, (batch, heads, heads_kv, seq_q, seq_kv)),
            *((getattr(host, name), getattr(text, name), (batch, heads, seq_q)) for name in FUNCTIONS),
        ):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours(*sizes) == theirs(*sizes)
    names = [name for function in facts.functions for name, _ in function.arguments]
    assert set(names) <= set(text.signature)


@pytest.fixture(scope="module")
def source() -> Source:
    return kernels.source(PROBLEM)


@pytest.fixture(scope="module")
def kernel(source: Source) -> PrecompiledKernel:
    return precompiler.precompile(source, kernel_kind.of(PROBLEM), 90)


def test_a_kernel_has_the_machine_code_that_the_compiler_makes(source: Source, kernel: PrecompiledKernel) -> None:
    compiled = compiler.build(source, 90)
    (function,) = kernel.facts.functions
    assert kernel.code == {"forward": compiled.asm["cubin"]}
    assert (function.warps, function.shared_bytes) == (compiled.metadata.num_warps, compiled.metadata.shared)
    assert [name for name, _ in function.arguments] == list(manifest.of(compiler.load_module(source)).signature)
    assert kernel.facts.release == triton_release.installed_release()
    assert precompiled.decode(precompiled.encode(kernel), precompiled.path_of(Path(), 90, kernel.facts.key)).facts


def test_parameters_that_the_machine_code_does_not_take_are_refused(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters_of = precompiled_kernel.parameters_of
    monkeypatch.setattr(precompiler, "parameters_of", lambda function: parameters_of(function)[:-1])
    with pytest.raises(CompileError, match=r"PTX of forward must take the \d+ parameters that its signature says"):
        precompiler.precompile(source, kernel_kind.of(PROBLEM), 90)


def test_the_host_side_needs_no_kernel_language(kernel: PrecompiledKernel) -> None:
    imports = [line for line in kernel.launch_text.splitlines() if line.startswith(("import", "from"))]
    assert imports == ["import triton", "import triton.language as tl"]
    assert "@" not in "".join(itertools.takewhile(lambda line: "def " not in line, kernel.launch_text))
    assert ".jit" not in kernel.launch_text
