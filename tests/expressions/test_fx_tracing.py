"""Functions become expressions that compute the same; the grids hold hidden pairs and indices below 0 too."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import interpreted
import kernels
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.errors import ProblemError, TensorError
from autoattn.expressions import captures, language
from autoattn.expressions.fx_tracing import trace
from autoattn.expressions.language import MASK_NAMES, SCORE_NAMES
from autoattn.reference import attention_formula
from autoattn.workers.worker_pool import Pool

B, H, Q, K = 2, 3, 7, 9
GRID = (
    torch.linspace(-3.0, 3.0, Q * K).reshape(Q, K),
    torch.arange(B)[:, None, None, None],
    torch.arange(H)[:, None, None],
    torch.arange(Q)[:, None],
    torch.arange(K),
)
RNG = torch.Generator().manual_seed(0)
IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 3, 3, 3, 4, 4, 4, 4, 4]])
SLOPES = torch.tensor([0.5, 0.25, 0.125])
TABLE = torch.randn(H, Q + K, generator=RNG)
KEPT = torch.rand(B, K, generator=RNG) < 0.6
LENGTH, CAP = torch.tensor(4), torch.tensor(2.0)
WINDOW = 2


def evaluated(function: Callable[..., Any] | str, names: tuple[str, ...]) -> Tensor:
    text, tensors = trace(function, names)
    known = dict(zip(SCORE_NAMES, GRID, strict=True)) | {
        f"captured{place}": tensor for place, tensor in enumerate(tensors)
    }
    answer = language.parse(text, names).evaluate(known, attention_formula.FUNCTIONS)
    return torch.as_tensor(answer).expand(B, H, Q, K)


def called(function: Callable[..., Any], names: tuple[str, ...]) -> Tensor:
    return torch.as_tensor(function(*GRID[-len(names) :])).expand(B, H, Q, K)


MASKS: dict[str, Callable[..., Any]] = {
    "all": lambda b, h, q, k: True,
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k <= WINDOW) & (k <= q),
    "documents": lambda b, h, q, k: IDS[b, q] == IDS[b, k],
    "prefix": lambda b, h, q, k: (k < LENGTH) | (q >= k),
    "dilated": lambda b, h, q, k: ((q - k) % 3 == 0) & ((q - k).abs() <= 6),
    "negative divisor": lambda b, h, q, k: ((q - k) % -3 == -1) | ((q - k) // -2 == 1),
    "checkerboard": lambda b, h, q, k: ((q // 2) ^ (k // 2)) & 1 == 0,
    "padding": lambda b, h, q, k: KEPT[b, k],
    "logic": lambda b, h, q, k: torch.logical_or(torch.logical_not(q < k), torch.logical_and(h == 1, b > 0)),
    "of numbers": lambda b, h, q, k: torch.logical_xor(h, q - k),
    "added": lambda b, h, q, k: (q > k) + (q == k) * (k > 1),
    "not": lambda b, h, q, k: ~(q == k),
    "union": or_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: k < 3),
    "intersection": and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: IDS[b, q] == IDS[b, k]),
    "per head": lambda b, h, q, k: q - k < 2 ** (h + 1).float(),
    "halves": lambda b, h, q, k: (q / 2 > k) | ((q - k).float() / -0.7 > 2),
}
SCORES: dict[str, Callable[..., Any]] = {
    "as it is": lambda score, b, h, q, k: score,
    "hidden": lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf")),
    "alibi": lambda score, b, h, q, k: score - SLOPES[h] * (q - k).abs(),
    "alibi by power": lambda score, b, h, q, k: score + torch.exp2(-((h + 1) * 8.0 / H)) * (k - q),
    "softcap": lambda score, b, h, q, k: CAP * torch.tanh(score / CAP),
    "relative": lambda score, b, h, q, k: score + TABLE[h, q - k + K - 1],
    "relative below 0": lambda score, b, h, q, k: score + TABLE[h, q - k],
    "filled": lambda score, b, h, q, k: score.masked_fill(q < k, torch.finfo(torch.float32).min),
    "clamped": lambda score, b, h, q, k: score.clamp(-1, 1.5) + (q - k).clamp(min=-2) * torch.clamp(k, max=3),
    "powers": lambda score, b, h, q, k: score**2 + score**3.0 - (k + 1) ** 0.5 + (k + 1.0) ** -1 + 3.0**-h,
    "roots": lambda score, b, h, q, k: torch.sqrt(k) + torch.rsqrt(q + 1) + score.square() + (k + 1.5).reciprocal(),
    "waves": lambda score, b, h, q, k: torch.sin(score) + torch.cos(q) + torch.sigmoid(k - q),
    "logs": lambda score, b, h, q, k: torch.log(k + 1) + torch.log2(q + 1.0) + torch.exp(score) + torch.relu(score),
    "rounded": lambda score, b, h, q, k: torch.floor(score) + torch.div(q - k, 3, rounding_mode="trunc") + score // 0.4,
    "floors": lambda score, b, h, q, k: torch.div(q - k, 2, rounding_mode="floor") + torch.floor_divide(5 - k, 2),
    "rests": lambda score, b, h, q, k: score % 0.7 + score % -0.7 + torch.remainder(q - k, 4),
    "casts": lambda score, b, h, q, k: (
        score.to(torch.int32) + (q > k).float() * 2 + (q - k).bool().int() + score.long()
    ),
    "constants": lambda score, b, h, q, k: score + torch.tensor(3.0) * q.new_ones(()) + torch.zeros_like(score),
    "extremes": lambda score, b, h, q, k: torch.minimum(score, torch.tensor(0.5)) + torch.maximum(q, k),
    "one head": lambda score, b, h, q, k: score + TABLE[1, k] + TABLE[-1, q],
    "weighted": lambda score, b, h, q, k: torch.add(score, q - k, alpha=2) - torch.rsub(k, q),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_masks_expression_keeps_what_the_function_keeps(name: str) -> None:
    assert torch.equal(evaluated(MASKS[name], MASK_NAMES), called(MASKS[name], MASK_NAMES))


@pytest.mark.parametrize("name", SCORES)
def test_a_score_mods_expression_computes_what_the_function_computes(name: str) -> None:
    expected = called(SCORES[name], SCORE_NAMES).float()
    torch.testing.assert_close(evaluated(SCORES[name], SCORE_NAMES).float(), expected, rtol=1e-6, atol=1e-6)


def test_tables_may_be_indexed_one_axis_after_the_other() -> None:
    text, tensors = trace(lambda score, b, h, q, k: score + TABLE[h][q], SCORE_NAMES)
    assert "captured0[h, q_idx]" in text
    assert tensors[0] is TABLE or torch.equal(tensors[0], TABLE)


NUMBERS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * 0.5,
    lambda x, y: x * 3,
    lambda x, y: x / 4,
    lambda x, y: x // 3,
    lambda x, y: x % -5,
    lambda x, y: 7 - x,
    lambda x, y: -x,
    lambda x, y: torch.abs(x),
    lambda x, y: torch.where(x > y, x, y * 2),
    lambda x, y: torch.minimum(x, y),
    lambda x, y: torch.clamp(x, -2, 2),
    lambda x, y: torch.tanh(x * 0.1),
    lambda x, y: torch.floor(x),
    lambda x, y: (x > y) * x,
    lambda x, y: torch.div(x, 3, rounding_mode="trunc"),
]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, len(NUMBERS) - 1), st.integers(0, 99), st.integers(0, 99)), max_size=8))
def test_any_chain_of_operations_computes_what_pytorch_computes(chain: list[tuple[int, int, int]]) -> None:
    def score_mod(*arguments: Tensor) -> Tensor:
        values = list(arguments)
        for act, left, right in chain:
            values.append(NUMBERS[act](values[left % len(values)], values[right % len(values)]))
        return values[-1] + values[0]

    expected = called(score_mod, SCORE_NAMES).float()
    torch.testing.assert_close(evaluated(score_mod, SCORE_NAMES).float(), expected, rtol=1e-5, atol=1e-5)


# --- what is captured -------------------------------------------------------------------------------------------------


def test_numbers_written_into_a_captured_tensor_count_later() -> None:
    for ids in (torch.tensor([0, 0, 1, 1]), torch.zeros(8, dtype=torch.int64)[::2]):

        def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor, ids: Tensor = ids) -> Tensor:
            return ids[q] == ids[k]

        trace(same, MASK_NAMES)
        ids[0] = 9
        assert trace(same, MASK_NAMES)[1][0].tolist() == ids.tolist()
        assert trace(same, MASK_NAMES)[1][0].is_contiguous()


def test_a_tensor_without_axes_is_read_at_0() -> None:
    text, (cap,) = trace(SCORES["softcap"], SCORE_NAMES)
    assert "captured0[0]" in text
    assert cap.shape == (1,)
    assert cap.data_ptr() == CAP.data_ptr()


def test_another_number_or_tensor_in_a_closure_is_traced_anew() -> None:
    width, slopes = 3, SLOPES

    def near(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(q - k < width, score, slopes[h])

    first = trace(near, SCORE_NAMES)
    assert trace(near, SCORE_NAMES)[0] is first[0]
    width = 5
    assert "< 5" in trace(near, SCORE_NAMES)[0]
    slopes = torch.ones(3)
    assert trace(near, SCORE_NAMES)[1][0] is not first[1][0]
    assert trace(near, SCORE_NAMES)[1][0].tolist() == [1.0, 1.0, 1.0]


def test_another_number_in_a_module_is_traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "<= 2" in trace(MASKS["window"], MASK_NAMES)[0]
    monkeypatch.setitem(globals(), "WINDOW", 6)
    assert "<= 6" in trace(MASKS["window"], MASK_NAMES)[0]


def test_a_mod_that_asks_an_objects_attribute_is_traced_each_time() -> None:
    class Facts:
        width = 3

    facts = Facts()

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < facts.width

    assert "< 3" in trace(near, MASK_NAMES)[0]
    facts.width = 4
    assert "< 4" in trace(near, MASK_NAMES)[0]


def test_a_function_is_not_kept_alive() -> None:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    trace(mod, MASK_NAMES)
    gone = weakref.ref(mod)
    del mod
    gc.collect()
    assert gone() is None


def test_a_tensor_that_needs_a_gradient_is_read_where_none_is_computed() -> None:
    learned = torch.ones(3, requires_grad=True)

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * learned[h]

    with torch.no_grad():
        assert not trace(mod, SCORE_NAMES)[1][0].requires_grad
    with pytest.raises(ProblemError, match="gradient"):
        trace(mod, SCORE_NAMES)


# --- what is refused --------------------------------------------------------------------------------------------------

WIDE = torch.zeros(2, 2, 2, 2, 2)
BYTES = torch.zeros(9, dtype=torch.uint8)
REFUSED: dict[str, tuple[Any, str]] = {
    "control flow": (lambda b, h, q, k: q if q > 3 else k, "torch.where"),
    "unknown": (lambda b, h, q, k: torch.erf(q.float()) > 0, "erf"),
    "no index": (lambda b, h, q, k: IDS > 0, "not indexed"),
    "axes left": (lambda b, h, q, k: IDS[b] == q, "not indexed"),
    "arguments": (lambda b, h: b > h, "arguments"),
    "numbers": (lambda b, h, q, k: q - k, "boolean"),
    "a list": (lambda b, h, q, k: [q > k], "no number"),
    "too many axes": (lambda b, h, q, k: WIDE[b, h, b, h, b] > q, "0 to 4 axes"),
    "bytes": (lambda b, h, q, k: BYTES[q] > 0, "uint8"),
    "rounding": (lambda b, h, q, k: q.half() > k, "float16"),
    "large powers": (lambda b, h, q, k: q**9 > k, "pow"),
    "no function": (3, "function"),
    "text": ("q_idx >", "arithmetic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_expression_cannot_say_is_refused_with_the_way_out(name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(ProblemError, match=words) as caught:
        trace(function, MASK_NAMES)
    assert "\n" not in str(caught.value)


def test_a_text_comes_back_as_it_is() -> None:
    assert trace("q_idx >= kv_idx", MASK_NAMES) == ("q_idx >= kv_idx", ())


def test_captured_tensors_are_checked_against_what_is_declared_and_asked() -> None:
    text = "captured0: int64[2]\ncaptured0[b, q_idx] == captured0[b, kv_idx - 1]"
    sizes = {"b": 2, "h": 1, "q_idx": 9, "kv_idx": 50}
    captures.check(text, MASK_NAMES, (IDS,), sizes)
    wrong: list[tuple[tuple[Tensor, ...], dict[str, int], str]] = [
        ((), {}, "none"),
        ((IDS.int(),), {}, "int32"),
        ((IDS[0],), {}, r"int64\[1\]"),
        ((IDS,), {"q_idx": 10}, "10 values of q_idx"),
        ((IDS,), {"b": 3}, "3 values of b"),
    ]
    for tensors, changes, words in wrong:
        with pytest.raises(TensorError, match=words):
            captures.check(text, MASK_NAMES, tensors, sizes | changes)


# --- through a kernel -------------------------------------------------------------------------------------------------


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["relative below 0", "rounded", "rests", "casts", "powers", "weighted", "extremes"])
def test_a_kernel_computes_a_traced_score_mod(child: Pool, name: str) -> None:
    text, _ = trace(SCORES[name], SCORE_NAMES)
    problem = kernels.problem(batch=1, heads_q=2, heads_kv=2, seq_q=17, seq_kv=20, modifiers=Modifiers(score_mod=text))
    result = interpreted.run(child, problem)
    assert result.ok, result


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["documents", "padding", "negative divisor", "checkerboard", "added", "of numbers"])
def test_a_kernel_keeps_the_pairs_of_a_traced_mask(child: Pool, name: str) -> None:
    text, _ = trace(MASKS[name], MASK_NAMES)
    mask = Mask.blocks(16, 16, 0.8, text)
    result = interpreted.run(child, kernels.problem(batch=2, heads_q=2, heads_kv=2, seq_q=33, seq_kv=40, mask=mask))
    assert result.ok, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCORES)
def test_on_a_gpu_attention_computes_a_score_mod(name: str) -> None:
    from autoattn import attention, explain

    for table in (IDS, SLOPES, TABLE, KEPT, LENGTH, CAP):
        table.data = table.data.cuda()
    try:
        query = torch.randn(B, H, Q, 16, device="cuda", dtype=torch.float16)
        key, value = (torch.randn(B, H, K, 16, device="cuda", dtype=torch.float16) for _ in range(2))
        scores = query.double() @ key.double().transpose(2, 3) * 0.25
        changed = SCORES[name](scores, *(index.cuda() for index in GRID[1:])).double().expand_as(scores)
        assert explain(query, key, value, score_mod=SCORES[name]).variant is not None
        actual = attention(query, key, value, score_mod=SCORES[name])
        torch.testing.assert_close(actual.double(), torch.softmax(changed, 3) @ value.double(), rtol=2e-2, atol=2e-2)
    finally:
        for table in (IDS, SLOPES, TABLE, KEPT, LENGTH, CAP):
            table.data = table.data.cpu()
