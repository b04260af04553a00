"""Calls of F.scaled_dot_product_attention at random, right and wrong ones; a random.Random names each."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

WRONG = (
    "query dtype", "key dtype", "head dim", "heads", "batch", "one axis", "mask shape", "mask dtype", "mask axes",
    "dropout", "is_causal", "enable_gqa", "scale", "no tensor", "value tokens",
)  # fmt: skip
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float64, torch.bfloat16, torch.float16)
DIVIDES_BY_HEADS = torch.__version__ < (2, 13)
SIZES = (0, 1, 1, 2, 3, 5, 5, 7)  # of a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaCall:
    """One call; the tensors are leaves, of which some need a gradient."""

    query: Any
    key: Any
    value: Any
    given: dict[str, Any]
    wrong: str  # what was spoilt; empty where nothing was

    @property
    def learners(self) -> tuple[Tensor, ...]:
        """The tensors that need a gradient."""
        tensors = (self.query, self.key, self.value, self.given.get("attn_mask"))
        return tuple(tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad)

    @property
    def is_empty(self) -> bool:
        """Whether a tensor has no elements."""
        return any(isinstance(tensor, Tensor) and tensor.numel() == 0 for tensor in (self.query, self.key, self.value))

    def __str__(self) -> str:
        def text(argument: Any) -> str:
            return (
                f"{argument.dtype} {tuple(argument.shape)}" + " learns" * argument.requires_grad
                if isinstance(argument, Tensor)
                else repr(argument)
            )

        words = {name: text(argument) for name, argument in self.given.items()}
        return f"{text(self.query)}, {text(self.key)}, {text(self.value)}, {words}, wrong: {self.wrong or 'nothing'}"


def by_pytorch(query: Any, key: Any, value: Any, *words: Any, **given: Any) -> Any:
    """F.scaled_dot_product_attention, which ends the process for no heads up to torch 2.11 unless its formula answers.

    (2.12 was not tried.)
    """
    tensors = (query, key, value)
    plain = all(isinstance(tensor, Tensor) and not tensor.is_nested for tensor in tensors)
    if not DIVIDES_BY_HEADS or not plain or all(0 not in tensor.shape[-3:-2] for tensor in tensors):
        return scaled_dot_product_attention(*tensors, *words, **given)
    if query.shape[-3:-2] == key.shape[-3:-2] == (0,):
        given.pop("enable_gqa", None)
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*tensors, *words, **given)


def drawn(rng: random.Random, *, spoilt: bool = False) -> SdpaCall:
    """A call that PyTorch takes, or one in which one thing is wrong."""
    dtype, rank = rng.choice(DTYPES), rng.choice((2, 3, 3, 4, 4, 4, 4, 4, 5))
    gqa = rank > 2 and rng.random() < 0.3
    outer = [rng.choice((1, 2, 2, 3)) for _ in range(rank - 2)]
    if rng.random() < 0.1 and outer and not (spoilt and DIVIDES_BY_HEADS):  # the formula alone takes some wrong calls
        outer[rng.randrange(len(outer))] = 0
    heads_kv = outer[-1] if outer else 1
    if gqa:
        outer[-1] = heads_kv * rng.choice((1, 2, 3))
    seq_q, seq_kv = rng.choice(SIZES), rng.choice(SIZES)
    head_dim = rng.choice((1, 4, 8, 8, 8, 257)) if rng.random() < 0.95 else 0
    head_dim_v = rng.choice((head_dim, head_dim, 8, 3, 513)) if head_dim else 4
    front_kv = [*outer[:-1], heads_kv] if outer else []
    shapes = [[*outer, seq_q, head_dim], [*front_kv, seq_kv, head_dim], [*front_kv, seq_kv, head_dim_v]]
    if not gqa and rng.random() < 0.25:
        shapes = [_narrower(rng, shape) for shape in shapes]
    learns = rng.random() < 0.5
    tensors: list[Any] = [_normal(rng, shape, dtype, learns and rng.random() < 0.8) for shape in shapes]
    given: dict[str, Any] = {"enable_gqa": True} if gqa else {}
    if rng.random() < 0.4:
        given["attn_mask"] = _mask(rng, [*outer, seq_q, seq_kv], dtype, rng.random() < 0.2)
    if rng.random() < (0.1 if "attn_mask" in given else 0.5):
        given["is_causal"] = True
    if rng.random() < 0.3:
        given["scale"] = rng.choice((0.3, 2, 1.0, 0.0, -0.5))
    if rng.random() < 0.15:
        given["dropout_p"] = rng.choice((0.0, 0.25, 1.0))
    call = SdpaCall(query=tensors[0], key=tensors[1], value=tensors[2], given=given, wrong="")
    return _spoilt(rng, call) if spoilt else call


def _normal(rng: random.Random, shape: list[int], dtype: torch.dtype, learns: bool) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if len(shape) > 2 and rng.random() < 0.2:  # as a projection leaves heads
        tensor = tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
    return tensor.requires_grad_(learns)


def _narrower(rng: random.Random, shape: list[int]) -> list[int]:
    """The same with some axes in front of the last two that are broadcast, or missing."""
    outer = [1 if size and rng.random() < 0.4 else size for size in shape[:-2]]
    return [*outer[rng.choice((0, 0, 1)) if 0 not in outer else 0 :], *shape[-2:]]


def _mask(rng: random.Random, shape: list[int], dtype: torch.dtype, learns: bool) -> Tensor:
    shape = [1 if size and rng.random() < 0.3 else size for size in shape]
    shape = shape[rng.randrange(len(shape) - 1) :] if 0 not in shape[:-2] else shape
    numbers = _normal(rng, shape, torch.float32, False)
    if rng.random() < 0.5:
        return numbers > -0.7
    return numbers.to(rng.choice((dtype, torch.float32))).contiguous().requires_grad_(learns)


def _spoilt(rng: random.Random, call: SdpaCall) -> SdpaCall:
    """The call with one thing wrong."""
    query, key, value, given = call.query, call.key, call.value, dict(call.given)
    wrong = rng.choice(WRONG)
    if wrong == "query dtype":
        query, key, value = (
            tensor.detach().to(rng.choice((torch.int32, torch.complex64))) for tensor in (query, key, value)
        )
    elif wrong == "key dtype":
        key = key.detach().to(torch.float32 if key.dtype is torch.float64 else torch.float64)
    elif wrong == "head dim":
        key = key.detach().repeat(*[1] * (key.dim() - 1), 2)[..., : key.shape[-1] * 2]
    elif wrong == "heads":
        key = (
            torch.cat([key.detach()[:1]] * 7) if key.dim() == 3 else key.detach().expand(7, *[-1] * key.dim())[..., :1]
        )
    elif wrong == "batch":
        key = torch.cat([key.detach()] * 4)
    elif wrong == "one axis":
        query = query.detach().flatten()
    elif wrong == "mask shape":
        given["attn_mask"] = torch.ones(query.shape[-2] + 2, key.shape[-2] + 2)
    elif wrong == "mask dtype":
        dtypes = (torch.int64, torch.float64 if query.dtype is not torch.float64 else torch.float16)
        given["attn_mask"] = torch.zeros(query.shape[-2], key.shape[-2], dtype=rng.choice(dtypes))
    elif wrong == "mask axes":
        given["attn_mask"] = rng.choice((torch.ones(key.shape[-2]), torch.ones((), dtype=torch.bool), [[True]]))
    elif wrong == "no tensor":
        key = rng.choice((None, 1.0, [[1.0]]))
    elif wrong == "value tokens":
        value = torch.cat([value.detach()] * 2, dim=-2)[..., : value.shape[-2] + 1, :]
    else:
        values: dict[str, tuple[Any, ...]] = {
            "dropout": (1.5, -0.5, "much", None), "is_causal": (1, None, "top-left"), "enable_gqa": (1, None),
            "scale": ("large", [1.0]),
        }  # fmt: skip
        given["dropout_p" if wrong == "dropout" else wrong] = rng.choice(values[wrong])
    return SdpaCall(query=query, key=key, value=value, given=given, wrong=wrong)
