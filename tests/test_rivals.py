"""The other ways to compute the same attention: they mean the same, and those that cannot are left out."""

from __future__ import annotations

from typing import Any

import kernels
import pytest
import torch

from autoattn import inputs, reference, rivals
from autoattn.operands import Operands

CPU = torch.device("cpu")


def operands_of(one: Any) -> Operands:
    return inputs.make(one, CPU, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mask", kernels.MASKS)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 9), (9, 5), (7, 7)])
def test_every_rival_that_takes_the_inputs_gives_the_references_answer(mask: str, seq_q: int, seq_kv: int) -> None:
    one = kernels.problem(seq_q=seq_q, seq_kv=seq_kv, mask=mask)
    operands = operands_of(one)
    found = rivals.calls(one, operands)
    assert rivals.SDPA in found
    expected, _ = reference.attention(one, operands)
    for name, call in found.items():
        torch.testing.assert_close(call().double(), expected, rtol=5e-3, atol=5e-3, msg=name)


def test_a_backend_that_does_not_take_the_inputs_is_left_out_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    one = kernels.problem()
    found = rivals.calls(one, operands_of(one))
    assert "sdpa-cudnn" not in found, "there is no cuDNN on a CPU"
    assert [warning for warning in recwarn if "kernel" in str(warning.message).lower()] == []


def test_a_named_backend_is_the_one_that_runs() -> None:
    one = kernels.problem()
    with pytest.raises(RuntimeError):
        rivals.sdpa(one, operands_of(one), backend="sdpa-cudnn")


def test_rivals_are_named_as_the_cache_knows_them() -> None:
    assert [rivals.SDPA, *rivals.BACKENDS] == ["sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient"]
