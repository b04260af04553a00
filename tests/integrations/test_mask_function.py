"""Masks of Transformers as structure: they keep the same pairs as the tensor that Transformers would make."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_models import CHUNK, WINDOW, padded
from torch import Tensor

pytest.importorskip("transformers", reason="needs Hugging Face Transformers, which is not installed")
from transformers import masking_utils

from autoattn.integrations import once
from autoattn.integrations.huggingface import mask_function, mask_pattern
from autoattn.integrations.huggingface.structured_mask import StructuredMask

CAUSAL = masking_utils.causal_mask_function
BIDIRECTIONAL = masking_utils.bidirectional_mask_function


@pytest.fixture(autouse=True)
def warnings_anew() -> Iterator[None]:
    once.forget()
    yield
    once.forget()


def window() -> Callable[..., Any]:
    return masking_utils.sliding_window_causal_mask_function(WINDOW)


def chunks(mask: Tensor | None, batch: int = 2) -> Callable[..., Any]:
    left = torch.zeros(batch, dtype=torch.long) if mask is None else (mask.cumsum(-1) == 0).sum(-1)
    return masking_utils.chunked_causal_mask_function(CHUNK, left)


def packed(function: Callable[..., Any], positions: Tensor) -> Callable[..., Any]:
    ids = masking_utils.find_packed_sequence_indices(positions)
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # older releases count through the row
        function = masking_utils.remap_positions_for_packed_sequence(function, positions)
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(ids))


def create(function: Callable[..., Any], q_length: int, kv_length: int, **given: Any) -> Any:
    mask = given.pop("attention_mask", None)
    return mask_function.create_mask(
        batch_size=2, q_length=q_length, kv_length=kv_length, mask_function=function,
        attention_mask=None if mask is None else mask.bool(), **given,
    )  # fmt: skip


def pairs_of(mask: StructuredMask) -> Tensor:
    """[batch, 1, seq_q, seq_kv] bool: the pairs that the fields of a mask keep."""
    batch, _, seq_q, seq_kv = mask.shape
    query = torch.arange(mask.keys - seq_q, mask.keys)[:, None]  # the last query stands at the last filled key
    if not mask.causal and mask.window is None:
        query = torch.arange(seq_q)[:, None]
    key = torch.arange(seq_kv)[None]
    kept = (key < mask.keys) & torch.ones(seq_q, 1, dtype=torch.bool)
    if mask.causal:
        kept = kept & (key <= query)
    if mask.window is not None:
        left, right = mask.window
        kept = kept & (key >= query - left) & ((key <= query + right) | torch.tensor(right < 0))
    kept = kept.expand(batch, 1, seq_q, seq_kv).clone()
    if mask.padding is not None:
        kept[..., : mask.keys] &= mask.padding
    if mask.packing is not None:
        places = torch.arange(batch * seq_q)
        sequence = torch.bucketize(places, mask.packing.offsets[1:].long(), right=True).view(batch, seq_q)
        kept[..., : mask.keys] &= (sequence[:, :, None] == sequence[:, None, :])[:, None]
        assert int(mask.packing.offsets.diff().max()) == mask.packing.longest
    return kept


LEFT, RIGHT, BOTH = padded(2, 20, left=11), padded(2, 20, right=3), padded(2, 20, left=5, right=3)
POSITIONS = torch.cat([torch.arange(9), torch.arange(11)]).expand(2, -1)
STATIC = torch.tensor(0)


@pytest.mark.parametrize(
    ("function", "sizes", "given", "fields"),
    [
        pytest.param(CAUSAL, (20, 20), {}, set(), id="causal"),
        pytest.param(CAUSAL, (20, 20), {"attention_mask": padded(2, 20)}, set(), id="no padding"),
        pytest.param(window(), (WINDOW, WINDOW), {}, set(), id="a window as long as the text"),
        pytest.param(chunks(None), (CHUNK, CHUNK), {}, set(), id="one chunk"),
        pytest.param(CAUSAL, (20, 20), {"attention_mask": LEFT}, {"padding"}, id="causal, padding on the left"),
        pytest.param(CAUSAL, (20, 20), {"attention_mask": BOTH}, {"padding"}, id="causal, padding on both sides"),
        pytest.param(CAUSAL, (5, 25), {"q_offset": 20}, set(), id="a prompt that goes on"),
        pytest.param(CAUSAL, (5, 25), {"q_offset": 20, "attention_mask": LEFT}, {"padding"}, id="and is padded"),
        pytest.param(CAUSAL, (20, 32), {"q_offset": STATIC, "attention_mask": LEFT}, {"padding"}, id="static cache"),
        pytest.param(CAUSAL, (20, 32), {"q_offset": STATIC}, set(), id="static cache, without padding"),
        pytest.param(CAUSAL, (5, 32), {"q_offset": STATIC + 20}, set(), id="static cache, filled before"),
        pytest.param(window(), (20, 20), {}, {"window"}, id="window"),
        pytest.param(window(), (20, 20), {"attention_mask": BOTH}, {"window", "padding"}, id="window, padding"),
        pytest.param(window(), (5, 11), {"q_offset": 20, "kv_offset": 14}, {"window"}, id="window, sliding cache"),
        pytest.param(window(), (5, 32), {"q_offset": STATIC + 8}, {"window"}, id="window, static cache"),
        pytest.param(
            masking_utils.sliding_window_bidirectional_mask_function(3), (20, 20),
            {"allow_is_bidirectional_skip": True, "attention_mask": RIGHT}, {"window", "padding"}, id="both sides",
        ),
        pytest.param(
            BIDIRECTIONAL, (6, 20), {"allow_is_bidirectional_skip": True, "attention_mask": RIGHT}, {"padding"},
            id="cross attention",
        ),
        pytest.param(chunks(None), (20, 20), {}, {"packing"}, id="chunks"),
        pytest.param(chunks(LEFT), (20, 20), {"attention_mask": LEFT}, {"packing"}, id="chunks, left"),
        pytest.param(chunks(BOTH), (20, 20), {"attention_mask": BOTH}, {"packing"}, id="chunks, both"),
        pytest.param(chunks(None), (20, 32), {"q_offset": STATIC}, {"packing"}, id="chunks, static cache"),
        pytest.param(packed(CAUSAL, POSITIONS), (20, 20), {}, {"packing"}, id="packed"),
        pytest.param(packed(window(), POSITIONS), (20, 20), {}, {"packing", "window"}, id="packed, window"),
        pytest.param(packed(chunks(None), POSITIONS), (20, 20), {}, {"packing"}, id="packed, chunks"),
    ],
)  # fmt: skip
def test_the_structure_keeps_the_pairs_of_the_tensor(
    function: Callable[..., Any], sizes: tuple[int, int], given: dict[str, Any], fields: set[str]
) -> None:
    mask = create(function, *sizes, **given)
    assert isinstance(mask, StructuredMask)
    assert {name for name in ("window", "padding", "packing") if getattr(mask, name) is not None} == fields
    expected = mask.pairs()
    assert mask.shape == expected.shape
    rows = torch.ones(2, sizes[0], dtype=torch.bool)
    if (
        mask.packing is not None and "attention_mask" in given
    ):  # queries that are padding see padding, which is no matter
        rows = given["attention_mask"].bool()
    assert torch.equal(pairs_of(mask)[:, 0][rows], expected[:, 0, :, : mask.shape[3]][rows])
    assert not expected[..., mask.keys :].any()


@pytest.mark.parametrize(
    ("function", "sizes", "given"),
    [
        pytest.param(CAUSAL, (1, 20), {"q_offset": 19}, id="one query"),
        pytest.param(window(), (1, WINDOW), {"q_offset": 30, "kv_offset": 31 - WINDOW}, id="a sliding cache"),
        pytest.param(BIDIRECTIONAL, (6, 20), {"allow_is_bidirectional_skip": True}, id="cross attention"),
    ],
)
def test_no_mask_where_every_query_sees_every_key(
    function: Callable[..., Any], sizes: tuple[int, int], given: dict[str, Any]
) -> None:
    assert create(function, *sizes, **given) is None


@pytest.mark.parametrize(
    ("function", "sizes", "given"),
    [
        pytest.param(CAUSAL, (1, 20), {"q_offset": 19, "attention_mask": LEFT}, id="one query"),
        pytest.param(CAUSAL, (1, 32), {"q_offset": STATIC + 9, "allow_is_causal_skip": False}, id="static cache"),
        pytest.param(chunks(None), (1, CHUNK), {"q_offset": 20, "kv_offset": 13}, id="a chunk behind the first"),
        pytest.param(chunks(None), (5, 25), {"q_offset": 20}, id="chunks, a prompt that goes on"),
        pytest.param(CAUSAL, (20, 20), {"allow_is_causal_skip": False}, id="a caller that needs a tensor"),
    ],
)
def test_a_tensor_where_structure_says_less(
    function: Callable[..., Any], sizes: tuple[int, int], given: dict[str, Any]
) -> None:
    mask = create(function, *sizes, **given)
    given = {**given, "attention_mask": given["attention_mask"].bool()} if "attention_mask" in given else given
    given = {**given, "allow_is_causal_skip": False}
    expected = masking_utils.sdpa_mask(2, *sizes, mask_function=function, **given)
    assert isinstance(mask, Tensor)
    assert torch.equal(mask, expected)


def test_padding_between_tokens_is_no_packed_sequence() -> None:
    mask = padded(2, 20)
    mask[0, 6:9] = 0
    dense_mask = create(chunks(mask), 20, 20, attention_mask=mask)
    assert isinstance(dense_mask, Tensor)
    assert torch.equal(
        dense_mask, masking_utils.sdpa_mask(2, 20, 20, mask_function=chunks(mask), attention_mask=mask.bool())
    )


def test_an_unknown_pattern_becomes_a_tensor_and_says_so_once() -> None:
    def every_second(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx % 2) == 0

    function = masking_utils.and_masks(CAUSAL, every_second)
    with pytest.warns(RuntimeWarning, match="pattern that autoattn does not know"):
        mask = create(function, 20, 20)
    assert isinstance(mask, Tensor)
    assert torch.equal(mask, masking_utils.sdpa_mask(2, 20, 20, mask_function=function, allow_is_causal_skip=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create(function, 20, 20)
        create(masking_utils.or_masks(CAUSAL, every_second), 1, 20)  # one query loses nothing


def test_a_model_that_looks_into_a_mask_sees_the_tensor() -> None:
    mask = create(window(), 20, 20, attention_mask=LEFT)
    pairs = mask.pairs()
    assert (mask.ndim, mask.dim(), mask.dtype, mask.size(-1)) == (4, 4, torch.bool, 20)
    assert torch.equal(~mask, ~pairs)
    assert torch.equal(1.0 - mask.float(), 1.0 - pairs.float())
    assert torch.equal(pairs & mask, pairs)
    assert torch.equal(mask & mask, pairs)
    assert mask.expand(2, 4, 20, 20).shape == (2, 4, 20, 20)
    scores = torch.randn(2, 4, 20, 20)
    for summed in (scores + mask, mask + scores, torch.add(scores, mask)):
        assert torch.equal(summed, scores.masked_fill(~pairs, torch.finfo(torch.float32).min))
    assert torch.equal(mask + pairs, pairs + pairs)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mask.no_such_name
    assert torch.equal(mask[:, :, -3:], pairs[:, :, -3:])
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(pairs, 0.0, -1.0))
    assert torch.equal(torch.cat([mask, pairs]), torch.cat([pairs, pairs]))
    assert torch.equal(mask.to(torch.float32), pairs.float())
    moved = mask.to("cpu")
    assert isinstance(moved, StructuredMask)
    assert torch.equal(moved.pairs(), pairs)
    assert torch.equal(moved.padding, mask.padding)


@pytest.mark.skipif(
    not hasattr(masking_utils, "remap_positions_for_packed_sequence"), reason="this release does not remap positions"
)
def test_positions_without_their_sequences_are_unknown() -> None:
    remapped = masking_utils.remap_positions_for_packed_sequence(CAUSAL, POSITIONS)
    assert mask_pattern.read(masking_utils.and_masks(remapped, CAUSAL)) is None
    assert mask_pattern.read(masking_utils.and_masks(window(), window())) is None


def test_a_mask_that_was_made_before_is_kept() -> None:
    mask = create(window(), 20, 20)
    assert create(CAUSAL, 20, 20).window is None
    assert mask_function.create_mask(batch_size=2, q_length=20, kv_length=20, attention_mask=mask) is mask


def test_a_graph_knows_the_patterns_that_need_no_tensor() -> None:
    def create_in_graph(tensor: Tensor, function: Any, **given: Any) -> tuple[Tensor, Any]:
        return tensor + 1, mask_function.create_mask(2, 20, 20, mask_function=function, **given)

    def parts(mask: Any) -> Any:
        return mask.causal, mask.window, mask.padding, mask.packed

    def causal_in_graph(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor + 1, parts(mask_function.create_mask(2, 20, 20, mask_function=CAUSAL))

    def window_in_graph(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor + 1, parts(mask_function.create_mask(2, 20, 20, mask_function=window(), local_size=WINDOW))

    compiled = torch.compile(create_in_graph, backend="eager", fullgraph=True)
    compiled_causal = torch.compile(causal_in_graph, backend="eager", fullgraph=True)
    assert compiled_causal(torch.ones(1))[1] == (True, None, None, False)
    given: dict[str, Any] = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    assert compiled(torch.ones(1), BIDIRECTIONAL, **given)[1] is None
    compiled_window = torch.compile(window_in_graph, backend="eager", fullgraph=True)
    assert compiled_window(torch.ones(1))[1] == (True, (WINDOW - 1, 0), None, False)
