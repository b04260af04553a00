"""Calls that torch.compile, torch.export, dispatch modes and torch.func see: one operator, and right numbers."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import formula
import pytest
import torch
from functional_calls import (
    ARGUMENTS,
    SINKS,
    SLOPES,
    close,
    inputs,
    noise,
    nothing_planned,  # noqa: F401 - a fixture
    packed,
)
from rarely import rarely
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import autoattn
from autoattn import functional, masks
from autoattn.errors import AutoattnError, TensorError
from autoattn.runtime.plan import planner

pytestmark = pytest.mark.sampled

ATTENTION = torch.ops.autoattn.attention.default
Function = Callable[..., Any]
STRENGTH = noise(4, seed=11)


@pytest.fixture(autouse=True)
def nothing_traced() -> None:
    torch._dynamo.reset()
    counters.clear()


def whole(function: Function, backend: Any = "aot_eager", **given: Any) -> Function:
    """Compiled without a break."""
    compiled: Function = torch.compile(function, backend=backend, fullgraph=True, **given)
    return compiled


def attention(**given: Any) -> Function:
    return lambda *tensors: autoattn.attention(*tensors, **given)


def gradients(function: Function, *tensors: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    output.backward(noise(*output.shape, seed=12).to(output.dtype))
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARGUMENTS)
def test_whatever_is_asked_is_traced_whole_and_means_the_same(name: str) -> None:
    given, meant = ARGUMENTS[name]
    close(whole(attention(**given))(*inputs()), formula.attention(*inputs(), **meant)[0])


def test_the_graph_holds_the_operator_and_nothing_else() -> None:
    report = torch._dynamo.explain(attention(causal=True, softcap=2.0, sinks=SINKS))(*inputs())
    assert (report.graph_count, report.graph_break_count) == (1, 0)
    operations = [node for node in report.graphs[0].graph.nodes if node.op == "call_function"]
    assert operations[0].target is ATTENTION
    assert len(operations) == 2  # and the choice of the output


@pytest.mark.parametrize("layout", rarely(["bhsd", "bshd"], lambda layout: layout == "bhsd"))
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("learns", [False, True])
def test_another_length_is_not_compiled_again(learns: bool, dynamic: bool | None, layout: str) -> None:
    """By default the first change of a length makes it a symbol, and the second costs nothing."""
    counter = CompileCounterWithBackend("aot_eager")
    function = attention(causal=True, softcap=2.0, layout=layout)
    traced = whole(function, counter, dynamic=dynamic)
    compiled = []
    for seq_q, seq_kv in ((5, 7), (9, 8), (30, 3), (3, 30), (17, 17)):
        tensors = inputs(seq_q, seq_kv, layout=layout)
        if learns:
            for mine, other in zip(gradients(traced, *tensors), gradients(function, *tensors), strict=True):
                torch.testing.assert_close(mine, other)
        else:
            assert torch.equal(traced(*tensors), function(*tensors))
        compiled.append(counter.frame_count)
    assert [count - compiled[0] for count in compiled] == ([0] * 5 if dynamic else [0, 1, 1, 1, 1])


def test_a_training_step_that_pytorch_says_in_full_is_pytorchs() -> None:
    """Nobody tuned gradients here, and the operator would compute the call twice."""
    counter = CompileCounterWithBackend("aot_eager")
    function, compiled = attention(), []
    traced = whole(function, counter)
    for seq_q, seq_kv in ((5, 7), (9, 8), (30, 3), (3, 30), (17, 17)):
        for mine, other in zip(
            gradients(traced, *inputs(seq_q, seq_kv)), gradients(function, *inputs(seq_q, seq_kv)), strict=True
        ):
            torch.testing.assert_close(mine, other)
        compiled.append(counter.frame_count)
    assert compiled == [1, 2, 2, 2, 2]
    targets = [node.target for graph in counter.graphs for node in graph.graph.nodes]
    assert torch.nn.functional.scaled_dot_product_attention in targets
    assert ATTENTION not in targets


def test_packed_sequences_are_traced_whole_and_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def function(*given: Any) -> Tensor:
        output, lse = autoattn.packed_attention(*given, causal=True, return_lse=True)
        return torch.cat((output.flatten(), lse.clamp(min=-1e30).flatten()))

    traced = whole(function, counter)
    for queries in ((3, 0, 5, 2, 4), (6, 1, 5, 2, 4), (9, 1, 5, 2, 9), (2, 7, 8, 1, 1)):
        given = packed(queries=queries)
        assert torch.equal(traced(*given), function(*given))
    assert counter.frame_count <= 3  # tokens and the longest sequence are numbers that become symbols one after another


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_padded_batch_may_be_packed_inside_the_graph() -> None:
    """Then not even the compiler's symbols have a size."""
    keep = torch.arange(8) < torch.tensor([[5], [8]])

    def function(padded: Tensor, keep: Tensor) -> Tensor:
        query, key, value = padded[:, keep]
        offsets = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).int()
        output = autoattn.packed_attention(query, key, value, offsets, offsets, 8, 8, causal=True)
        assert isinstance(output, Tensor)
        return output

    padded = noise(3, 2, 8, 4, 16)
    traced = whole(function)
    assert torch.equal(traced(padded, keep), function(padded, keep))
    torch.testing.assert_close(
        gradients(lambda batch: traced(batch, keep), padded), gradients(lambda batch: function(batch, keep), padded)
    )


@pytest.mark.parametrize("name", ["Attention", "MultiheadAttention", "dilated", "SDPA", "flash", "flash packed"])
def test_every_door_is_traced_whole(name: str) -> None:
    query, key, value = inputs()
    swapped, tokens = inputs(layout="bshd"), noise(2, 6, 16)
    dilation: dict[str, Any] = {"segment_lengths": [2, 4], "dilation_rates": [1, 2]}
    multihead = autoattn.MultiheadAttention(16, 4, batch_first=True, num_kv_heads=2, causal=True)
    doors: dict[str, tuple[Function, tuple[Any, ...]]] = {
        "Attention": (autoattn.Attention(causal=True, softcap=1.5, dropout=0.5).eval(), (query, key, value)),
        "MultiheadAttention": (lambda tokens: multihead(tokens, need_weights=False)[0], (tokens,)),
        "dilated": (lambda tensor: autoattn.dilated_attention(tensor, tensor, tensor, **dilation), (swapped[0],)),
        "SDPA": (functional.scaled_dot_product_attention, (query, query, query, None, 0.0, True)),
        "flash": (functional.flash_attn_func, (*swapped, 0.0, None, True, (2, 1), 1.5)),
        "flash packed": (functional.flash_attn_varlen_func, (*packed(), 0.0, None, True)),
    }
    door, given = doors[name]
    torch.testing.assert_close(whole(door)(*given), door(*given))


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
@pytest.mark.skipif(" " in torch.__file__, reason="Inductor gives its linker PyTorch's path without quotes")
def test_inductor_compiles_a_training_step() -> None:
    def function(*tensors: Tensor) -> Tensor:
        return 2.0 * autoattn.attention(*(tensor.sin() for tensor in tensors), causal=True, alibi_slopes=SLOPES)

    for mine, other in zip(
        gradients(whole(function, "inductor"), *inputs()), gradients(function, *inputs()), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_a_compiled_module_can_be_copied_and_pickled() -> None:
    module = autoattn.Attention(causal=True, softcap=1.5)
    expected = module(*inputs())
    traced = whole(module)
    assert torch.equal(traced(*inputs()), expected)
    assert torch.equal(copy.deepcopy(traced)(*inputs()), expected)
    assert torch.equal(whole(pickle.loads(pickle.dumps(module)))(*inputs()), expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_autocast_around_and_inside_a_compiled_function(dtype: torch.dtype | None) -> None:
    def inside(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return autoattn.attention(*tensors, precision="ieee", alibi_slopes=SLOPES)

    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(whole(inside)(*inputs()), inside(*inputs()))
        around = attention(softcap=1.5)
        assert torch.equal(whole(around)(*inputs()), around(*inputs()))
        assert whole(around)(*inputs()).dtype is torch.float16


def test_dropout_draws_anew_and_its_gradients_know_what_fell() -> None:
    function = attention(dropout=0.5)
    traced = whole(function)
    assert not torch.equal(traced(*inputs()), traced(*inputs()))
    gradient_lists = []
    for attend in (traced, function):
        torch.manual_seed(3)
        gradient_lists.append(gradients(attend, *inputs()))
    for mine, other in zip(*gradient_lists, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_activation_checkpointing_gives_the_same_gradients(dropout: float) -> None:
    def block(*tensors: Tensor) -> Tensor:
        return autoattn.attention(*tensors, softcap=2.0, dropout=dropout).sin()

    gradient_lists = []
    for kept in (lambda *tensors: checkpoint(block, *tensors, use_reentrant=False), block):
        torch.manual_seed(3)
        gradient_lists.append(gradients(whole(kept), *inputs()))
    for mine, other in zip(*gradient_lists, strict=True):
        torch.testing.assert_close(mine, other)


# --- what is no tensor ------------------------------------------------------------------------------------------------


def test_a_table_of_blocks_is_traced_with_what_it_captures() -> None:
    near = torch.tensor([1, 5, 2, 0, 3])
    mask = masks.from_mod(lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < near[q_idx], seq_q=5, seq_kv=7)
    for function in (attention(mask=mask), autoattn.Attention(mask=mask)):
        assert torch.equal(whole(function)(*inputs()), function(*inputs()))
    traced = whole(lambda query, key, value, mask: autoattn.attention(query, key, value, mask=mask))
    assert torch.equal(traced(*inputs(), mask), attention(mask=mask)(*inputs()))


def test_a_function_whose_code_says_all_becomes_text() -> None:
    function = attention(score_mod=lambda score, b, h, q_idx, kv_idx: torch.where(q_idx > kv_idx, score * 0.5, score))
    assert torch.equal(whole(function)(*inputs()), function(*inputs()))


def steeper(by: float) -> Function:
    return lambda score, b, h, q_idx, kv_idx: score * by


def of_tensors(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score * STRENGTH[h]


def test_a_function_of_its_surroundings_breaks_the_graph_and_is_never_stale() -> None:
    """Dynamo knows such a function by its code alone, so that another number in it would go unseen."""
    traced = torch.compile(lambda *given: autoattn.attention(*given[:3], score_mod=given[3]), backend="aot_eager")
    for mod in (steeper(0.5), steeper(2.0), steeper(0.5), of_tensors):
        assert torch.equal(traced(*inputs(), mod), attention(score_mod=mod)(*inputs()))
    assert counters["graph_break"]


def test_a_score_that_was_made_before_is_traced_whole_and_never_stale() -> None:
    traced = whole(lambda *given: autoattn.attention(*given[:3], score_mod=given[3]))
    for mod in (steeper(0.5), steeper(2.0), steeper(0.5), of_tensors):
        score = masks.score(mod)
        assert torch.equal(autoattn.attention(*inputs(), score_mod=score), attention(score_mod=mod)(*inputs()))
        assert torch.equal(traced(*inputs(), score), attention(score_mod=mod)(*inputs()))
    score = masks.score(of_tensors)
    before = traced(*inputs(), score)
    STRENGTH.mul_(2.0)
    after = traced(*inputs(), score)
    STRENGTH.mul_(0.5)
    assert not torch.allclose(before, after)


@pytest.mark.parametrize(
    "given",
    [
        {"mask": create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 1, 1, 5, 7, device="cpu")},
        {"score_mod": of_tensors},
    ],
    ids=["BlockMask", "function"],
)
def test_what_cannot_be_traced_breaks_the_graph_or_says_the_way_out(given: dict[str, Any]) -> None:
    function = attention(**given)
    assert torch.equal(torch.compile(function, backend="aot_eager")(*inputs()), function(*inputs()))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"what autoattn\.masks\.from_block_mask or"):
        whole(function)(*inputs())


@pytest.mark.parametrize(
    "given",
    rarely([
        {"causal": "left"}, {"window": (1.5, 2)}, {"layout": "sbhd"}, {"softcap": -1.0}, {"scale": "large"},
        {"mask": "causal", "window": (1, 1)}, {"mask": torch.ones(5, 7), "bias": torch.ones(5, 7)}, {"mask": "round"},
        {"bias": torch.ones(3, 7)}, {"sinks": 1.0}, {"numerics": "bad"}, {"precision": 3}, {"dropout": 0.5, "seed": -1},
    ], lambda given: not given.keys() & {"window", "scale", "bias", "dropout", "numerics", "sinks"}),
    ids=str,
)  # fmt: skip
def test_a_mistake_is_the_functions_sentence(given: dict[str, Any]) -> None:
    function = attention(**given)
    with pytest.raises(AutoattnError) as expected:
        function(*inputs())
    with pytest.raises(AutoattnError) as caught:
        torch.compile(function, backend="aot_eager")(*inputs())
    assert (type(caught.value), str(caught.value)) == (type(expected.value), str(expected.value))


# --- others who watch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_it_can_be_exported_with_lengths_that_change(strict: bool) -> None:
    module = autoattn.Attention(causal=True, softcap=1.5)
    queries, keys = torch.export.Dim("queries"), torch.export.Dim("keys")
    exported = torch.export.export(module, inputs(), dynamic_shapes=({2: queries}, {2: keys}, {2: keys}), strict=strict)
    kept = io.BytesIO()
    torch.export.save(exported, kept)
    kept.seek(0)
    assert torch.equal(torch.export.load(kept).module()(*inputs(9, 11)), module(*inputs(9, 11)))
    assert ATTENTION in [node.target for node in exported.graph.nodes]


def test_fake_tensors_get_the_shapes_of_the_answer() -> None:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs(layout="bshd")]
        output, lse = autoattn.attention(*fakes, softcap=2.0, layout="bshd", return_lse=True)
    assert (output.shape, lse.shape, lse.dtype) == ((2, 5, 4, 16), (2, 4, 5), torch.float32)
    assert autoattn.attention(*fakes, layout="bshd", dropout=0.5, seed=1).shape == (2, 5, 4, 16)


def test_modes_see_the_operator() -> None:
    seen: list[Any] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensors = inputs()
    expected = autoattn.attention(*tensors)  # so that the next call is one that was answered before
    with Watching():
        output = autoattn.attention(*tensors)
    assert seen == [ATTENTION]
    assert torch.equal(output, expected)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_flops_are_counted_as_pytorch_counts_its_own(layout: str) -> None:
    query, key, value = (tensor.shape for tensor in inputs(heads_kv=4))
    expected = sdpa_flop_count(query, key, value) + sdpa_backward_flop_count(query, query, key, value)
    with FlopCounterMode(display=False) as counter:
        gradients(attention(causal=True, layout=layout), *inputs(heads_kv=4, layout=layout))
    assert counter.get_total_flops() == expected


def test_flops_of_packed_sequences_are_those_with_the_longest_ones_keys() -> None:
    with FlopCounterMode(display=False) as counter:
        autoattn.packed_attention(*packed(), causal=True)
    assert counter.get_total_flops() == 2 * 17 * 4 * 6 * (16 + 24)


def test_make_fx_records_the_operator_with_a_functions_text() -> None:
    strength, mask = STRENGTH, create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 1, 1, 5, 7, device="cpu")
    function = attention(mask=mask, score_mod=lambda score, b, h, q_idx, kv_idx: score * strength[h])
    graph = make_fx(function)(*inputs())
    assert next(node.target for node in graph.graph.nodes if node.op == "call_function") is ATTENTION
    other = [2.0 * tensor for tensor in inputs()]
    assert torch.equal(graph(*other), function(*other))


def test_classes_with_rules_of_their_own_keep_pytorchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    function = attention(causal="top-left")
    ours = [TwoTensor(tensor, 2.0 * tensor) for tensor in inputs()]
    expected, eager = function(*(2.0 * tensor for tensor in inputs())), function(*ours)
    monkeypatch.setattr(planner, "why_no_kernel", None)  # Dynamo need not ask
    for output in (eager, whole(function)(*ours)):
        assert isinstance(output, TwoTensor)
        close(output.b, expected)
    torch._dynamo.reset()
    graphs = torch._dynamo.explain(function)(*ours).graphs
    assert ATTENTION not in [node.target for graph in graphs for node in graph.graph.nodes]


@pytest.mark.parametrize("given", [{}, {"softcap": 1.5, "causal": True}], ids=str)
def test_vmap_is_the_call_for_each(given: dict[str, Any]) -> None:
    function = attention(**given)
    query, key, value = inputs()
    queries = torch.stack((query, 2.0 * query, -query), dim=1)
    expected = torch.stack([function(queries[:, place], key, value) for place in range(3)], dim=1)
    mapped = torch.vmap(function, in_dims=(1, None, None), out_dims=1)
    assert torch.equal(mapped(queries, key, value), expected)
    assert torch.equal(whole(lambda *tensors: mapped(*tensors))(queries, key, value), expected)


@pytest.mark.parametrize("given", [{}, {"softcap": 1.5, "causal": True}], ids=str)
def test_torch_func_grad_is_pytorchs(given: dict[str, Any]) -> None:
    def total(*tensors: Tensor) -> Tensor:
        return (attention(**given)(*tensors) * noise(2, 4, 5, 16, seed=12)).sum()

    for mine, other in zip(
        torch.func.grad(total, (0, 1, 2))(*inputs()), gradients(attention(**given), *inputs()), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_torch_func_grad_of_what_pytorch_knows_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "why_no_kernel", lambda problem, operands: None)  # as on a card with kernels

    def total(*tensors: Tensor) -> Tensor:
        return autoattn.attention(*tensors, causal="top-left").sin().sum()

    traced = whole(lambda *tensors: torch.func.grad(total)(*tensors))
    torch.testing.assert_close(traced(*inputs()), torch.func.grad(total)(*inputs()))


def test_a_second_derivative_of_a_compiled_call_is_refused() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in inputs())
    output = whole(attention(softcap=2.0), "eager")(query, key, value)
    (first,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(TensorError, match="differentiated once"):
        first.sum().backward()
