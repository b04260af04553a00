"""The other ways to compute the same attention: they mean the same, and those that cannot are left out."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import kernels
import pytest
import torch
from torch.nn.attention import sdpa_kernel

from autoattn.baselines import pytorch_sdpa
from autoattn.core.problem import DType
from autoattn.reference import attention_formula, inputs
from autoattn.tensors.operands import Operands

CPU = torch.device("cpu")


def operands_of(problem: Any) -> Operands:
    return inputs.make(problem, CPU, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mask", kernels.MASKS)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 9), (9, 5), (7, 7)])
def test_every_rival_that_takes_the_inputs_gives_the_references_answer(mask: str, seq_q: int, seq_kv: int) -> None:
    problem = kernels.problem(seq_q=seq_q, seq_kv=seq_kv, mask=mask)
    operands = operands_of(problem)
    calls = pytorch_sdpa.calls(problem, operands)
    assert pytorch_sdpa.SDPA in calls
    expected, _ = attention_formula.attention(problem, operands)
    for name, call in calls.items():
        torch.testing.assert_close(call().double(), expected, rtol=5e-3, atol=5e-3, msg=name)


def test_a_backend_that_does_not_take_the_inputs_is_left_out_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    problem = kernels.problem()
    calls = pytorch_sdpa.calls(problem, operands_of(problem))
    assert "sdpa-cudnn" not in calls, "there is no cuDNN on a CPU"
    assert [warning for warning in recwarn if "kernel" in str(warning.message).lower()] == []


def test_a_named_backend_is_the_one_that_runs() -> None:
    problem = kernels.problem()
    with pytest.raises(RuntimeError):
        pytorch_sdpa.sdpa(problem, operands_of(problem), backend="sdpa-cudnn")


SWITCHES = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
)


@pytest.mark.parametrize("backend", pytorch_sdpa.BACKENDS)
@pytest.mark.parametrize("raises", [False, True])
def test_a_backend_is_named_to_pytorch_for_the_call_alone(backend: str, raises: bool) -> None:
    torch.backends.cuda.enable_math_sdp(False)
    before = [enabled() for enabled in SWITCHES]
    try:
        with pytest.raises(KeyError) if raises else contextlib.nullcontext(), pytorch_sdpa.only_backend(backend):
            ours = [enabled() for enabled in SWITCHES]
            if raises:
                raise KeyError
        assert [enabled() for enabled in SWITCHES] == before
        with sdpa_kernel(pytorch_sdpa.BACKENDS[backend]):
            assert [enabled() for enabled in SWITCHES] == ours
    finally:
        torch.backends.cuda.enable_math_sdp(True)


def test_threads_that_name_backends_take_turns() -> None:
    before = [enabled() for enabled in SWITCHES]
    seen: dict[str, set[tuple[bool, ...]]] = {backend: set() for backend in pytorch_sdpa.BACKENDS}

    def work(backend: str) -> None:
        for _ in range(300):
            with pytorch_sdpa.only_backend(backend):
                for _ in range(5):
                    seen[backend].add(tuple(enabled() for enabled in SWITCHES))
                    time.sleep(0)

    threads = [threading.Thread(target=work, args=(backend,)) for backend in pytorch_sdpa.BACKENDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(states) for states in seen.values()] == [1, 1, 1]
    assert [enabled() for enabled in SWITCHES] == before


@pytest.mark.parametrize("mask", kernels.MASKS)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 9), (9, 5), (7, 7)])
def test_a_bound_call_gives_the_bits_of_an_unbound_one(mask: str, seq_q: int, seq_kv: int) -> None:
    problem = kernels.problem(seq_q=seq_q, seq_kv=seq_kv, mask=mask)
    operands = operands_of(problem)
    call = pytorch_sdpa.bind(problem, operands.scale)
    assert call is not None
    assert torch.equal(call(operands.query, operands.key, operands.value), pytorch_sdpa.sdpa(problem, operands))


@pytest.mark.parametrize(
    ("facts", "one_operator"),
    [
        ({"mask": "causal"}, True),
        ({"mask": "full", "seq_kv": 9}, True),
        ({"mask": "causal:top-left", "seq_kv": 9}, False),  # backends align it in different ways
        ({"mask": "causal", "seq_kv": 9}, False),
        ({"dtype": DType.FLOAT32}, False),
        ({"heads_kv": 2}, False),
        ({"head_dim": 20, "head_dim_v": 20}, False),
        ({"head_dim_v": 8}, False),
    ],
)
def test_a_backend_is_called_by_its_operator_where_that_means_the_same(
    facts: dict[str, Any], one_operator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = kernels.problem(**{"seq_q": 7, "seq_kv": 7, "heads_q": 4, "heads_kv": 4, "dtype": DType.FLOAT16, **facts})
    called: list[dict[str, Any]] = []

    def operator(*three: torch.Tensor, **said: Any) -> torch.Tensor:
        called.append(said)
        return three[0]

    monkeypatch.setitem(pytorch_sdpa.OPERATORS, "sdpa-flash", operator)
    call, operands = pytorch_sdpa.bind(problem, 0.5, "sdpa-flash", learns=False), operands_of(problem)
    assert call is not None
    with contextlib.suppress(RuntimeError):  # the CPU's FlashAttention takes not all of them
        call(operands.query, operands.key, operands.value)
    assert called == ([{"causal": problem.mask.causal, "learns": False, "scale": 0.5}] if one_operator else [])


def test_rivals_are_named_as_the_cache_knows_them() -> None:
    assert [pytorch_sdpa.SDPA, *pytorch_sdpa.BACKENDS] == ["sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient"]
