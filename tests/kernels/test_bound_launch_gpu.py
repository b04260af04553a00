"""The scratch that launches on a stream share, on a Hopper card: zeroed by each launch, never used by two at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import streams
import torch
from functional_calls_gpu import no_shipped_cache, normal  # noqa: F401 - a fixture
from threads import together
from torch import Tensor

import autoattn
from autoattn.hardware import nvidia
from autoattn.kernels.zeroed_scratch import POOLS

pytestmark = pytest.mark.gpu

CAUSAL: dict[str, Any] = {"causal": True}
SCRATCH = POOLS["scratch_ptr"]


@pytest.fixture(autouse=True)
def hopper(no_shipped_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    card = nvidia.present()
    if card is None or card.arch != 90:
        pytest.skip("needs a Hopper card: only its kernels have a scratch")
    monkeypatch.setattr(SCRATCH, "buffers", {})


def three(*, trips: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Enough tiles for programs that take turns; with `trips`, most of them are computed again."""
    query, key, value = (normal(2, 8, 4096, 128, dtype=torch.bfloat16) for _ in range(3))
    if trips:
        key[:, :, :1024] *= 20.0
    variant = autoattn.explain(query, key, value, causal=True).variant
    assert variant is not None
    assert (variant.template, variant["schedule"], variant["softmax"]) == ("gluon/forward", "dynamic", "first_max")
    return query, key, value


def prepared_call(*, trips: bool = False) -> tuple[Callable[[], Tensor], Tensor]:
    """A call that was prepared, and its answer."""
    tensors = three(trips=trips)
    wanted = autoattn.attention(*tensors, **CAUSAL)
    assert torch.equal(autoattn.attention(*tensors, **CAUSAL), wanted)
    torch.cuda.synchronize()
    return lambda: autoattn.attention(*tensors, **CAUSAL), wanted


@pytest.mark.parametrize("trips", [False, True])
def test_each_launch_leaves_the_counters_at_zero(trips: bool) -> None:
    call, wanted = prepared_call(trips=trips)
    for _ in range(50):
        assert torch.equal(call(), wanted)
    (room,) = SCRATCH.buffers.values()
    assert room.tensor[:2].tolist() == [0, 0]


def test_streams_run_at_once_and_each_has_its_own() -> None:
    (call, wanted), (other, of_other) = prepared_call(), prepared_call(trips=True)
    for outputs, right in zip(streams.at_once([other, call], 20), (of_other, wanted), strict=True):
        assert all(torch.equal(output, right) for output in outputs)
    assert len(SCRATCH.buffers) == 1 + streams.STREAMS


def test_threads_may_share_a_stream() -> None:
    calls = [prepared_call(trips=bool(number % 2)) for number in range(4)]
    shared, wrong = torch.cuda.Stream(), []

    def work(number: int) -> None:
        call, wanted = calls[number]
        with torch.cuda.stream(shared):
            for _ in range(50):
                if not torch.equal(call(), wanted):
                    wrong.append(number)

    together(work)
    assert wrong == []


def test_graphs_are_replayed_beside_one_another_and_beside_calls() -> None:
    (call, wanted), (other, of_other) = prepared_call(), prepared_call(trips=True)

    def beside() -> None:
        assert torch.equal(call(), wanted)

    outputs = streams.replayed([call, other, call], 10, beside=beside)
    for replays, right in zip(outputs, (wanted, of_other, wanted), strict=True):
        assert all(torch.equal(output, right) for output in replays)


def test_a_thread_in_which_pytorch_did_nothing_may_launch() -> None:
    """As autograd's threads: their first call of CUDA may be the driver's, for a descriptor of a tensor that is new."""
    prepared_call()
    others = [three() for _ in range(4)]
    expected = [autoattn.attention(*(tensor.clone() for tensor in tensors), **CAUSAL) for tensors in others]
    outputs: list[tuple[int, Tensor]] = []
    together(lambda number: outputs.append((number, autoattn.attention(*others[number], **CAUSAL))))
    assert len(outputs) == len(others)
    assert all(torch.equal(output, expected[number]) for number, output in outputs)
