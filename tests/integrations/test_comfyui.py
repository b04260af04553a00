"""ComfyUI's contract of attention functions, by a stand-in for its module: ComfyUI is no package that pip installs."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from autoattn.errors import HostError
from autoattn.integrations import comfyui

SDPA = torch.nn.functional.scaled_dot_product_attention
BATCH, SEQ, HEADS, HEAD_DIM = 2, 10, 4, 16


def three(heads_kv: int = HEADS) -> list[Tensor]:
    """[batch, heads, seq, head_dim]"""
    torch.manual_seed(0)
    return [torch.randn(BATCH, heads, SEQ, HEAD_DIM) for heads in (HEADS, heads_kv, heads_kv)]


def joined(tensor: Tensor) -> Tensor:
    """[batch, seq, heads * head_dim]"""
    return tensor.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("heads_kv", [HEADS, 2])
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_axes_are_those_that_the_flags_say(heads_kv: int, skip_reshape: bool, skip_output_reshape: bool) -> None:
    tensors = three(heads_kv)
    expected = SDPA(*tensors, scale=0.5, enable_gqa=True)
    given = tensors if skip_reshape else [joined(tensor) for tensor in tensors]
    query, key, value = given
    output = comfyui.attention(
        query, key, value, HEADS, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, scale=0.5,
        transformer_options={},
    )  # fmt: skip
    expected = expected if skip_output_reshape else joined(expected)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("axes", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16])
def test_masks_are_read_by_their_axes(axes: int, dtype: torch.dtype) -> None:
    shape = {2: (SEQ, SEQ), 3: (BATCH, SEQ, SEQ), 4: (BATCH, HEADS, SEQ, SEQ)}[axes]
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    kept[..., 0] = True
    mask = kept if dtype is torch.bool else torch.zeros(shape, dtype=dtype).masked_fill(~kept, -torch.inf)
    four = kept[:, None] if axes == 3 else kept
    tensors = three()
    query, key, value = (joined(tensor) for tensor in tensors)
    output = comfyui.attention(query, key, value, HEADS, mask)
    torch.testing.assert_close(output, joined(SDPA(*tensors, attn_mask=four)), atol=1e-5, rtol=1e-5)


def test_an_override_takes_the_place_of_the_function_that_was_chosen() -> None:
    def chosen(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("the function before ran")

    tensors = three()
    output = comfyui.override(chosen, *tensors, HEADS, skip_reshape=True, transformer_options={})
    torch.testing.assert_close(output, joined(SDPA(*tensors)), atol=1e-5, rtol=1e-5)


def test_the_function_is_registered_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, Any] = {}
    stub = types.SimpleNamespace(register_attention_function=table.__setitem__)
    monkeypatch.setattr(comfyui, "import_module", {"comfy.ldm.modules.attention": stub}.__getitem__)
    assert comfyui.register() == "autoattn"
    assert table == {"autoattn": comfyui.attention}


@pytest.mark.parametrize("module", [types.SimpleNamespace(), None])
def test_what_is_missing_is_one_sentence(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        if module is None:
            raise ImportError(f"No module named {name!r}")
        return module

    monkeypatch.setattr(comfyui, "import_module", load)
    with pytest.raises(HostError, match="the ComfyUI function needs"):
        comfyui.register()
