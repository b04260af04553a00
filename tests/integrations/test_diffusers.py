"""diffusers' native attention backend on autoattn: the numbers stay, and the backend comes back."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from replaced_calls import calls  # noqa: F401 - a fixture
from torch import Tensor

from autoattn.errors import HostError
from autoattn.integrations import diffusers as integration


@pytest.fixture(scope="session")
def dispatch() -> Any:
    return pytest.importorskip("diffusers.models.attention_dispatch", reason="needs diffusers, which is not installed")


@pytest.fixture
def registered(dispatch: Any) -> Iterator[integration.Registration]:
    registration = integration.register()
    yield registration
    registration.remove()


def three(heads_kv: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 10, heads, 16) for heads in (4, heads_kv, heads_kv)]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param({}, id="plain"),
        pytest.param({"is_causal": True, "scale": 0.5}, id="causal"),
        pytest.param({"attn_mask": torch.arange(10) < torch.tensor([[10], [6]])}, id="padding"),
        pytest.param({"attn_mask": torch.linspace(-1, 1, 100).view(1, 1, 10, 10)}, id="numbers"),
        pytest.param({"enable_gqa": True}, id="fewer key heads"),
    ],
)
def test_the_numbers_are_those_of_the_backend_before(
    words: dict[str, Any], dispatch: Any, calls: list[Any], request: pytest.FixtureRequest
) -> None:
    tensors = three(2 if "enable_gqa" in words else 4)
    expected = dispatch.dispatch_attention_fn(*tensors, **words)
    request.getfixturevalue("registered")
    torch.testing.assert_close(dispatch.dispatch_attention_fn(*tensors, **words), expected, atol=1e-5, rtol=1e-5)
    assert calls == [(2, 4, 10, 16)]


def test_a_model_runs_on_it(registered: integration.Registration, calls: list[Any]) -> None:
    models: Any = pytest.importorskip("diffusers", reason="needs diffusers, which is not installed")
    torch.manual_seed(0)
    model = models.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=False,
    ).eval()  # fmt: skip
    given = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }  # fmt: skip
    with torch.no_grad():
        output = model(**given).sample
        assert len(calls) == 2
        registered.remove()
        torch.testing.assert_close(output, model(**given).sample, atol=1e-5, rtol=1e-5)
    assert len(calls) == 2


def test_removal_brings_the_backend_back(dispatch: Any) -> None:
    backends: dict[Any, Any] = vars(dispatch)["_AttentionBackendRegistry"].__dict__["_backends"]
    before = dict(backends)
    registration = integration.register()
    assert backends != before
    registration.remove()
    registration.remove()
    assert backends == before


def test_context_parallelism_goes_to_the_backend_before(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    given: list[Any] = []
    registry = types.SimpleNamespace(
        _backends={"native": lambda *tensors, **words: given.append(words["_parallel_config"])},
        _supported_arg_names={"native": integration.ARGUMENTS | {"_parallel_config"}},
    )
    stub = types.SimpleNamespace(_AttentionBackendRegistry=registry)
    monkeypatch.setattr(integration, "import_module", lambda name: stub)
    integration.register()
    registry._backends["native"](*three(), _parallel_config="ring")
    assert (given, calls) == (["ring"], [])


@pytest.mark.parametrize("stub", [types.SimpleNamespace(), None])
def test_another_release_is_one_sentence(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        if stub is None:
            raise ImportError("No module named 'diffusers'")
        return stub

    monkeypatch.setattr(integration, "import_module", load)
    with pytest.raises(HostError, match=r"diffusers.*0\.35"):
        integration.register()
