"""The host side of an append: a bound launch gives the kernel what the ordinary one gives it."""

from __future__ import annotations

from typing import Any

import fake_device
import pytest
import torch
from fake_device import Launches
from noted_launches import same
from torch import Tensor

from autoattn.codegen import render
from autoattn.kernels import append, compiler
from autoattn.kernels.compiler import Kernel
from autoattn.tensors.appended import Append
from autoattn.tensors.operands import CachedKeys


def given(*, latent: bool, float8: bool) -> Append:
    """Two new tokens for each of three sequences, in pages of four."""

    def tensor(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2)

    def stored(*shape: int) -> Tensor:
        return tensor(*shape).to(torch.float8_e4m3fn) if float8 else tensor(*shape)

    new_key, key = tensor(3, 2, 1, 96), stored(9, 4, 1, 96)
    cache = CachedKeys(lengths=torch.zeros(3).int(), capacity=12, pages=torch.arange(9).int().view(3, 3))
    scales: dict[str, Any] = {name: torch.ones(3, 1) for name in ("key_scale", "value_scale")} if float8 else {}
    return Append(
        new_key=new_key,
        new_value=new_key[..., :64] if latent else tensor(3, 2, 1, 64),
        key=key,
        value=key[..., :64] if latent else stored(9, 4, 1, 64),
        latent=latent,
        cache=cache,
        **scales,
    )


@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "float8"])
@pytest.mark.parametrize("latent", [False, True], ids=["keys and values", "latents"])
def test_a_bound_append_launches_what_the_ordinary_one_does(
    latent: bool, float8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_device.set_context(monkeypatch)
    fake_device.set_streams(monkeypatch, lambda index: ("stream of", index))
    launches, first, second = Launches(), given(latent=latent, float8=float8), given(latent=latent, float8=float8)
    source = render.append_source(append.kind_of(first))
    kernel = Kernel(
        source=source, module=compiler.load_module(source), compiled=launches, device=fake_device.CUDA, sm_count=132
    )
    append.launch(kernel, first)
    tensors = [
        *(second.new_key, second.key, second.value, second.cache.lengths, second.cache.pages, second.new_key),
        *(second.new_value, second.key_scale, second.value_scale, torch.zeros(3).int()),
    ]
    append.bind(kernel, first)(tuple(tensor.data_ptr() for tensor in tensors if tensor is not None))
    same(launches.ordinary[0], launches.prepared[0])
    names = dict(zip(kernel.parameters, launches.prepared[0][1], strict=True))
    assert names["key_ptr"] == second.key.data_ptr()
    assert names["new_key_ptr"] == second.new_key.data_ptr()
    assert names["lengths_ptr"] == second.cache.lengths.data_ptr()
    assert names["total_lengths_ptr"] == tensors[-1].data_ptr()
    assert ("value_ptr" in names) is not latent
    if float8:
        assert second.key_scale is not None
        assert names["key_scale_ptr"] == second.key_scale.data_ptr()
