"""Peers: they are named, they mean the same as we do, and say in words what they do not do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import drawn
import kernels
import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch

from autoattn.baselines import external, flex_attention, pytorch_sdpa
from autoattn.baselines.external import PEERS
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Op, Precision, Problem
from autoattn.errors import UsageError
from autoattn.reference import attention_formula, inputs
from autoattn.tensors.operands import Operands
from autoattn.validation import gradient_check

CPU = torch.device("cpu")
LENGTHS = ((33, 50), (50, 33), (130, 300), (300, 130), (256, 256), (1, 200))
MASKS = ("causal", "causal:top-left", "window:40,9", "window:0,0", "window:-1,20", "window:20,-1", "window:200,0",
         "window:126,200", "window:200,126", "window:127,200")  # fmt: skip


def operands_of(problem: Problem) -> Operands:
    return inputs.make(problem, CPU, torch.Generator().manual_seed(0))


def assert_right(problem: Problem, operands: Operands, output: Tensor) -> None:
    expected, _ = attention_formula.attention(problem, operands)
    torch.testing.assert_close(output.double(), expected, rtol=5e-3, atol=5e-3)


# --- names ------------------------------------------------------------------------------------------------------------


def test_peers_are_found_by_name_each_once_in_the_order_given() -> None:
    assert [peer.name for peer in external.named("fa4, sdpa-flash,fa4")] == ["fa4", "sdpa-flash"]


@pytest.mark.parametrize("names", ["", "fa5", "fa4,,flex", "SDPA"])
def test_an_unknown_name_is_answered_with_all_names(names: str) -> None:
    with pytest.raises(UsageError, match=r"sdpa, sdpa-flash, .*fa4, flashinfer, got"):
        external.named(names)


# --- what is missing, and what they do not do -------------------------------------------------------------------------


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    external.why_not_loadable.cache_clear()
    yield
    external.why_not_loadable.cache_clear()


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
def test_what_is_not_installed_says_so_whatever_the_problem(name: str) -> None:
    assert (PEERS[name].why_not(kernels.problem()) or "").startswith("not installed (no module flash_attn")
    assert PEERS[name].version() == "of unknown version"


@pytest.mark.usefixtures("nothing_installed")
def test_a_package_of_which_another_part_is_installed_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 alone brings a package flash_attn without FlashAttention-2's functions."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert "not installed (flash_attn is there without it" in (PEERS["fa2"].why_not(kernels.problem()) or "")


def test_a_package_that_breaks_at_import_is_missing_with_its_own_words() -> None:
    def load() -> object:
        raise OSError("undefined symbol:\n_ZN3c10")

    broken = replace(PEERS["fa3"], load=load)
    assert broken.why_not(kernels.problem()) == "cannot be imported (OSError: undefined symbol: _ZN3c10)"


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("flex", {"layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 90}, "packed"),
    ("flex", {"dtype": DType.FLOAT8}, "float8"),
    ("flex", {"dtype": DType.FLOAT32, "precision": Precision.TF32X3}, "tf32x3"),
    ("flex", {"modifiers": Modifiers(sinks=True)}, "sinks"),
    ("flex", {"modifiers": Modifiers(bias=Bias.KEYS)}, "biases"),
    ("fa2", {"dtype": DType.FLOAT32}, "16-bit"),
    ("fa3", {"dtype": DType.FLOAT8}, "16-bit"),
    ("fa2", {"mask": "causal:top-left"}, "bottom-right"),
    ("fa4", {"mask": "blocks:16x16,0.5"}, "block tables"),
    ("fa4", {"modifiers": Modifiers(alibi=True)}, "alibi"),
    ("fa2", {"modifiers": Modifiers(dropout=True)}, "dropout"),
    ("fa2", {"op": Op.BACKWARD, "modifiers": Modifiers(alibi=True, learned_slopes=True)}, "learned_slopes"),
    ("flex", {"op": Op.BACKWARD, "modifiers": Modifiers(alibi=True, learned_slopes=True)}, "learned_slopes"),
    ("fa2", {"head_dim_v": 32}, "head dim"),
    ("fa4", {"head_dim": 20}, "multiples of 8"),
    ("sdpa-cudnn", {"modifiers": Modifiers(softcap=True)}, "softcap"),
    ("varlen-flash", {}, "packed"),
    ("flashinfer", {"op": Op.BACKWARD, "head_dim": 64}, "backward"),
    ("flashinfer", {"dtype": DType.FLOAT32, "head_dim": 64}, "16-bit"),
    ("flashinfer", {"head_dim": 80}, "head dims of 64"),
    ("flashinfer", {"head_dim": 64, "mask": "window:20,3"}, "windows that end"),
    ("flashinfer", {"head_dim": 64, "mask": "causal:top-left"}, "bottom-right"),
    ("flashinfer", {"head_dim": 64, "mask": "blocks:16x16,0.5"}, "block tables"),
    ("flashinfer", {"head_dim": 64, "modifiers": Modifiers(alibi=True)}, "alibi"),
    ("flashinfer", {"head_dim": 64, "modifiers": Modifiers(bias=Bias.KEYS)}, "biases"),
]


@pytest.mark.parametrize(("name", "changes", "word"), REFUSALS)
def test_what_a_peer_does_not_do_is_said_in_words(name: str, changes: dict[str, Any], word: str) -> None:
    assert word in (PEERS[name].refuses(kernels.problem(**changes)) or "")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("flex", {"mask": "window:40,9", "modifiers": Modifiers(softcap=True, alibi=True)}),
        ("flex", {"dtype": DType.FLOAT32, "precision": Precision.TF32, "head_dim_v": 32}),
        ("fa2", {"mask": "window:40,9", "modifiers": Modifiers(softcap=True, alibi=True)}),
        ("fa4", {"mask": "causal", "head_dim": 192, "head_dim_v": 128}),
        ("fa3", {"mask": "causal:top-left", "seq_q": 50}),
        ("fa4", {"layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 90}),
        ("varlen-flash", {"layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 90}),
    ],
)
def test_what_a_peer_may_do_is_not_refused(name: str, changes: dict[str, Any]) -> None:
    assert PEERS[name].refuses(kernels.problem(**changes)) is None


# --- they mean the same -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mask", MASKS)
def test_flex_gets_the_mask_that_trying_out_all_pairs_gives(mask: str, lengths: tuple[int, int]) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    problem = kernels.problem(mask=mask, seq_q=lengths[0], seq_kv=lengths[1])
    first, last = problem.band(*lengths)

    def kept(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        low = q >= -1 if first is None else k >= q + first
        return low & (q >= -1 if last is None else k <= q + last)

    block_mask = flex_attention.block_mask(problem, operands_of(problem))
    tried = create_block_mask(kept, None, None, *lengths, device="cpu")
    assert torch.equal(block_mask.to_dense(), tried.to_dense())
    rows, keys = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    pairs = kept(zero, zero, rows, keys)
    assert torch.equal(block_mask.mask_mod(zero, zero, rows, keys), pairs)
    for block, count in enumerate(block_mask.full_kv_num_blocks[0, 0].tolist()):
        for key in block_mask.full_kv_indices[0, 0, block, :count].tolist():
            whole = pairs[128 * block : 128 * (block + 1), 128 * key : 128 * (key + 1)]
            assert whole.all()
            assert whole.shape[1] == 128, "mask_mod must cut a block that the sequence does not fill"


def test_flex_gets_no_mask_where_there_is_none() -> None:
    problem = kernels.problem()
    assert flex_attention.block_mask(problem, operands_of(problem)) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": "causal", "layout": Layout.BSHD},
        {"mask": "window:20,3"},
        {"mask": "causal", "modifiers": Modifiers(softcap=True, alibi=True)},
        *({"modifiers": Modifiers(score_mod=text, softcap=True)} for text in drawn.SCORE_MODS),
    ],
)
def test_flex_means_what_we_mean(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    problem = kernels.problem(**changes)
    operands = operands_of(problem)
    assert_right(problem, operands, PEERS["flex"].prepare(problem, operands)())


def pretended(window: list[object], *, pair: bool) -> ModuleType:
    """A FlashAttention that computes with the reference, from what it is given."""

    def dense(q: Tensor, k: Tensor, v: Tensor, **facts: Any) -> Any:
        window.append(facts["window_size"])
        assert all(tensor.is_contiguous() for tensor in (q, k, v))
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        left, right = ((-1 if side is None else side) for side in facts["window_size"])
        mask = kernels.Mask.window(left, right, causal=facts["causal"])
        problem = Problem(
            dtype=DType.FLOAT16, batch=q.shape[0], heads_q=q.shape[2], heads_kv=k.shape[2], seq_q=q.shape[1],
            seq_kv=k.shape[1], head_dim=q.shape[3], head_dim_v=v.shape[3], mask=mask,
            modifiers=Modifiers(softcap="softcap" in facts, alibi="alibi_slopes" in facts),
        )  # fmt: skip
        operands = Operands(
            query=query, key=key, value=value, scale=facts["softmax_scale"], softcap=facts.get("softcap", 0.0),
            slopes=facts.get("alibi_slopes"),
        )  # fmt: skip
        output = attention_formula.attention(problem, operands)[0].half().transpose(1, 2)
        return (output, None) if pair else output

    def packed(q: Tensor, k: Tensor, v: Tensor, **facts: Any) -> Any:
        starts = facts.pop("cu_seqlens_q").tolist(), facts.pop("cu_seqlens_k").tolist()
        del facts["max_seqlen_q"], facts["max_seqlen_k"]
        output = v.new_zeros(*q.shape[:2], v.shape[2])
        for place in range(len(starts[0]) - 1):
            rows, keys = (slice(*start[place : place + 2]) for start in starts)
            part = dense(q[None, rows], k[None, keys], v[None, keys], **facts)
            output[rows] = (part[0] if pair else part)[0]
        return (output, None) if pair else output

    module = ModuleType("pretended")
    module.flash_attn_func, module.flash_attn_varlen_func = dense, packed  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(("name", "place"), [("fa2", "flash_attn"), ("fa3", "flash_attn_interface"), ("fa4", "cute")])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": "causal", "layout": Layout.BSHD},
        {"mask": "window:20,3"},
        {"mask": "window:-1,3", "modifiers": Modifiers(softcap=True)},
        {"mask": "causal", "layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 90},
    ],
)
def test_flash_attention_is_asked_for_what_we_mean(
    name: str, place: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: list[object] = []
    module = pretended(windows, pair=name == "fa4")
    monkeypatch.setitem(sys.modules, "flash_attn", module if place == "flash_attn" else ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute" if place == "cute" else place, module)
    external.why_not_loadable.cache_clear()
    problem = kernels.problem(**changes)
    operands = operands_of(problem)
    assert PEERS[name].why_not(problem) is None
    assert_right(problem, operands, PEERS[name].prepare(problem, operands)())
    unbounded = None if name == "fa4" else -1
    sides = tuple(unbounded if side is None else side for side in (problem.mask.left, problem.mask.right))
    assert set(windows) == {sides}
    external.why_not_loadable.cache_clear()


class PretendedWrapper:
    """A FlashInfer that computes with the reference, one sequence after the other."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")

    def plan(self, starts_q: Tensor, starts_kv: Tensor, *heads: int, **facts: Any) -> None:
        self.starts, self.heads, self.facts = (starts_q.tolist(), starts_kv.tolist()), heads, facts

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        facts = self.facts
        assert (*query.shape[1:], key.shape[1]) == (self.heads[0], self.heads[2], self.heads[1])
        assert value.shape[2] == facts["head_dim_vo"]
        assert facts["q_data_type"] == facts["kv_data_type"] == query.dtype
        output = value.new_zeros(*query.shape[:2], value.shape[2])
        attend = pretended([], pair=False).flash_attn_func
        given: dict[str, Any] = {"softmax_scale": facts["sm_scale"], "causal": facts["causal"]}
        given["window_size"] = (facts["window_left"], 0 if facts["causal"] else -1)
        if facts["logits_soft_cap"] is not None:
            given["softcap"] = facts["logits_soft_cap"]
        for place in range(len(self.starts[0]) - 1):
            rows, keys = (slice(*starts[place : place + 2]) for starts in self.starts)
            parts = (tensor.contiguous() for tensor in (query[None, rows], key[None, keys], value[None, keys]))
            output[rows] = attend(*parts, **given)[0]
        return output


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": "causal", "layout": Layout.BSHD},
        {"mask": "window:20,0", "modifiers": Modifiers(softcap=True)},
        {"mask": "causal", "layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 90},
    ],
)
def test_flashinfer_is_asked_for_what_we_mean(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = PretendedWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    external.why_not_loadable.cache_clear()
    problem = kernels.problem(head_dim=64, **changes)
    operands = operands_of(problem)
    assert PEERS["flashinfer"].why_not(problem) is None
    assert_right(problem, operands, PEERS["flashinfer"].prepare(problem, operands)())
    external.why_not_loadable.cache_clear()


class _Differentiated(torch.autograd.Function):
    """Stands in for FlashAttention's own function of autograd."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, attend: Any) -> Tensor:
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        with torch.enable_grad():
            ctx.output = attend(*leaves)
        ctx.leaves = leaves
        return ctx.output.detach().clone()

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> tuple[Tensor | None, ...]:
        assert pulls[0].is_contiguous()
        return (*torch.autograd.grad(ctx.output, ctx.leaves, pulls, retain_graph=True), None)


def steps_of(output: Tensor) -> set[str]:
    """The names of all that autograd runs behind an output."""
    names, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(node.name())
            waiting += [before for before, _ in node.next_functions]
    return names


@pytest.mark.parametrize("name", ["fa2", "fa4"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": "causal", "layout": Layout.BSHD, "deterministic": True},
        {"mask": "causal", "layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 90},
    ],
)
def test_autograd_copies_nothing_around_flash_attentions_backward_pass(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    deterministic: list[bool] = []
    whole = pretended([], pair=False)

    def dense(query: Tensor, key: Tensor, value: Tensor, **facts: Any) -> Tensor:
        deterministic.append(facts.pop("deterministic", False))
        packed = "cu_seqlens_q" in facts
        attend = whole.flash_attn_varlen_func if packed else whole.flash_attn_func
        output: Tensor = _Differentiated.apply(query, key, value, partial(attend, **facts))
        return output

    module = ModuleType("differentiated")
    module.flash_attn_func = module.flash_attn_varlen_func = dense  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    outputs: list[Tensor] = []
    differentiated = pytorch_sdpa.differentiated
    monkeypatch.setattr(
        pytorch_sdpa,
        "differentiated",
        lambda output, *facts: (outputs.append(output), differentiated(output, *facts))[1],
    )
    problem = kernels.problem(op=Op.BACKWARD, **changes)
    case = gradient_check.full_case(problem, CPU, torch.Generator().manual_seed(0))
    gradients = external.backward_pass(PEERS[name], problem, case.operands, case.saved.output_grad)()
    for gradient, (error, _) in gradient_check.errors_by_name(gradients, case).items():
        assert error <= 4.0 * case.allowed[gradient]
    assert deterministic == [problem.deterministic]
    views = {"TransposeBackward0", "UnsqueezeBackward0", "SqueezeBackward1"}
    assert steps_of(outputs[0]) <= views | {"_DifferentiatedBackward", "torch::autograd::AccumulateGrad"}


@pytest.mark.parametrize("name", ["sdpa", "sdpa-flash"])
def test_pytorchs_backends_are_called_one_by_one(name: str) -> None:
    problem = kernels.problem(mask="causal")
    operands = operands_of(problem)
    assert_right(problem, operands, PEERS[name].prepare(problem, operands)())


# --- how they are run -------------------------------------------------------------------------------------------------


def test_a_compiled_backward_pass_runs_again_and_in_the_thread_that_asks() -> None:
    """FlexAttention's is compiled, and what was saved for it must outlive it."""

    def body(tensor: Tensor) -> Tensor:
        return (tensor.exp() * tensor).softmax(-1).sin().exp()

    before = torch.get_float32_matmul_precision()
    tensor = torch.randn(4, 4, requires_grad=True)
    with external.settled(kernels.problem(op=Op.BACKWARD)):
        output = torch.compile(body, backend="aot_eager", dynamic=False)(tensor)
        first, second = (
            pytorch_sdpa.differentiated(output, (tensor,), torch.ones_like(output), repeated=False) for _ in range(2)
        )
        assert not functorch.donated_buffer
        assert not torch._C._is_multithreading_enabled()
    assert torch.equal(first[0], second[0])
    assert torch._C._is_multithreading_enabled()
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("set_before", [{}, {"TRITON_CACHE_DIR": "/here", "TRITON_PTXAS_PATH": "/ptxas"}])
def test_tritons_environment_is_as_it_was_after_a_peer_compiled(
    set_before: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile sets the folder of Triton's cache, where none of our kernels lies."""
    for name in ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with external.settled(kernels.problem()):
        os.environ["TRITON_CACHE_DIR"] = "/elsewhere"
        os.environ.pop("TRITON_PTXAS_PATH", None)
    assert dict(os.environ) == before


def test_the_peers_of_the_finals_are_none_of_pytorchs_backends_and_have_a_title() -> None:
    for name in external.FINALS_PEERS:
        assert name not in (pytorch_sdpa.SDPA, *pytorch_sdpa.BACKENDS)
        assert PEERS[name].title
