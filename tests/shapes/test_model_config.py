"""Configs in the style of published models, as the problems of their attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import BERT, DEEPSEEK, GEMMA_2, GEMMA_3, GPT_2, GPT_OSS, LLAMA, MISTRAL, QWEN_2, T5

from autoattn.core.problem import DType, Op, Problem
from autoattn.errors import ShapesError
from autoattn.shapes import model_config, shapes_file


def facts(config: dict[str, Any]) -> tuple[Any, ...]:
    """(dtype, heads, key heads, head dims, masks, modifiers, longest sequence)"""
    model = model_config.read(config, "config.json")
    dims = (model.head_dim, model.head_dim_v)
    return model.dtype, model.heads, model.heads_kv, dims, model.masks, model.modifiers, model.max_length


def problems(config: dict[str, Any], group: str, **choices: Any) -> list[Problem]:
    document = model_config.document(model_config.read(config, "config.json"), **choices)
    return [named.problem for named in shapes_file.parse(document, "config.json") if group in named.groups]


BF16 = DType.BFLOAT16
ENCODER = (None, 12, 12, (64, 64))
LIKE_LLAMA = (BF16, 32, 8, (128, 128))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, (*LIKE_LLAMA, ("causal",), (), 8192)),
        (MISTRAL, (*LIKE_LLAMA, ("window:4095,0",), (), 32768)),
        (MISTRAL | {"sliding_window": None}, (*LIKE_LLAMA, ("causal",), (), 32768)),
        (GEMMA_2, (BF16, 16, 8, (256, 256), ("causal", "window:4095,0"), ("softcap",), 8192)),
        (GEMMA_3, (BF16, 8, 4, (256, 256), ("causal", "window:1023,0"), (), 131072)),
        (QWEN_2, (*LIKE_LLAMA, ("causal",), (), 8192)),
        (QWEN_2 | {"use_sliding_window": True}, (*LIKE_LLAMA, ("causal", "window:32767,0"), (), 8192)),
        (
            QWEN_2 | {"use_sliding_window": True, "max_window_layers": 32},
            (*LIKE_LLAMA, ("causal",), (), 8192),
        ),
        (
            QWEN_2 | {"use_sliding_window": True, "max_window_layers": 0},
            (*LIKE_LLAMA, ("window:32767,0",), (), 8192),
        ),
        (DEEPSEEK, (BF16, 128, 128, (192, 128), ("causal",), (), 8192)),
        (BERT, (*ENCODER, ("full",), (), 512)),
        (BERT | {"is_decoder": True}, (*ENCODER, ("causal",), (), 512)),
        (BERT | {"model_type": "xlm-roberta", "max_position_embeddings": 514}, (*ENCODER, ("full",), (), 512)),
        (BERT | {"model_type": "modernbert", "local_attention": 128}, (*ENCODER, ("full", "window:64,64"), (), 512)),
        (GPT_2, (*ENCODER, ("causal",), (), 1024)),
        (GPT_OSS, (BF16, 64, 8, (64, 64), ("causal", "window:127,0"), ("sinks",), 8192)),
        (LLAMA | {"use_bidirectional_attention": True}, (*LIKE_LLAMA, ("full",), (), 8192)),
        (LLAMA | {"dtype": "float16"}, (DType.FLOAT16, 32, 8, (128, 128), ("causal",), (), 8192)),
        ({**LLAMA, "multi_query": True, "alibi": True}, (BF16, 32, 1, (128, 128), ("causal",), ("alibi",), 8192)),
        (
            {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "max_seq_len": 2048, "attn_config": {"alibi": True}},
            (None, 32, 32, (128, 128), ("causal",), ("alibi",), 2048),
        ),
        (
            {"model_type": "gpt_neo", "hidden_size": 2048, "num_heads": 16, "max_position_embeddings": 2048,
             "window_size": 256, "attention_types": [[["global", "local"], 12]]},
            (None, 16, 16, (128, 128), ("causal", "window:255,0"), (), 2048),
        ),
        ({**LLAMA, "layer_types": ["linear_attention", "full_attention"]}, (*LIKE_LLAMA, ("causal",), (), 8192)),
    ],
)  # fmt: skip
def test_a_config_is_read_as_its_attention(config: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert facts(config) == expected


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (T5, "adds a learned bias for each pair of tokens to the scores (relative_attention_num_buckets)"),
        ({**BERT, "model_type": "deberta", "relative_attention": True}, "adds scores of relative positions"),
        ({**LLAMA, "is_encoder_decoder": True}, "is an encoder and a decoder"),
        ({}, "must say num_attention_heads, but does not"),
        ({"num_attention_heads": 8}, "must say hidden_size, but does not"),
        ({**LLAMA, "num_attention_heads": 33}, "where there is no head_dim, got 4096 and 33"),
        ({**LLAMA, "num_attention_heads": [8, 16]}, "num_attention_heads must be a whole number from 1 to"),
        ({**LLAMA, "num_attention_heads": True}, "num_attention_heads must be a whole number from 1 to"),
        ({**LLAMA, "torch_dtype": "int8"}, "dtype must be float16, bfloat16 or float32, got 'int8'"),
        ({**LLAMA, "layer_types": ["odd_attention"]}, "got 'odd_attention'; write its problems in a shapes file"),
        ({**LLAMA, "layer_types": "full_attention"}, "layer_types must be a list of words"),
        ({**LLAMA, "layer_types": ["sliding_attention"]}, "must say sliding_window, but does not"),
        ({**LLAMA, "layer_types": ["mamba"]}, "has no layers of attention"),
        ({**DEEPSEEK, "v_head_dim": None}, "must say v_head_dim"),
        ([1], "must be a model's config, a mapping of names to values"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(config: object, fault: str) -> None:
    with pytest.raises(ShapesError) as caught:
        model_config.read(config, "config.json")
    message = str(caught.value)
    assert message.startswith("config.json")
    assert "\n" not in message
    assert fault in message


def test_a_language_model_is_prefilled_trained_and_decoded() -> None:
    prefill, training, decode = (problems(LLAMA, group) for group in ("prefill", "training", "decode"))
    assert [(problem.seq_q, problem.seq_kv) for problem in prefill] == [(1024, 1024), (4096, 4096), (8192, 8192)]
    assert [(problem.seq_q, problem.op) for problem in training] == [
        *((length, Op.FORWARD) for length in (1024, 4096, 8192)),
        *((length, Op.BACKWARD) for length in (1024, 4096, 8192)),
    ]
    assert [(problem.seq_q, problem.seq_kv) for problem in decode] == [(1, 1024), (1, 4096), (1, 8192)]
    assert {(problem.heads_q, problem.heads_kv, problem.head_dim, str(problem.mask)) for problem in prefill} == {
        (32, 8, 128, "causal:bottom-right")
    }


def test_an_encoder_has_no_decoding() -> None:
    document = model_config.document(model_config.read(BERT, "bert"))
    assert list(document["groups"]) == ["inference", "training"]
    assert [problem.seq_q for problem in problems(BERT, "inference")] == [512]


def test_lengths_batch_and_dtype_may_be_chosen() -> None:
    (problem,) = problems(LLAMA, "prefill", lengths=[100_000], batch=3, dtype="fp32:tf32")
    assert (problem.seq_q, problem.batch, problem.dtype) == (100_000, 3, DType.FLOAT32)
    lengths = [call.seq_q for call in problems({**LLAMA, "max_position_embeddings": None}, "prefill")]
    assert lengths == list(model_config.LENGTHS)


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [(512, [512]), (1024, [1024]), (2048, [1024, 2048]), (16384, [1024, 4096, 16384]), (131072, [1024, 4096, 16384])],
)
def test_lengths_end_where_the_model_does(longest: int, lengths: list[int]) -> None:
    assert [problem.seq_q for problem in problems({**LLAMA, "max_position_embeddings": longest}, "prefill")] == lengths


def test_a_window_that_is_no_shorter_than_the_sequence_is_the_mask_it_comes_to() -> None:
    assert [str(problem.mask) for problem in problems(MISTRAL, "prefill")] == [
        "causal:bottom-right", "causal:bottom-right", "window:4095,0",
    ]  # fmt: skip


def test_notes_say_what_was_assumed_or_left_out() -> None:
    def notes(config: dict[str, Any], **choices: Any) -> str:
        return " ".join(model_config.notes(model_config.read(config, "config.json"), **choices))

    assert "names no dtype, so bfloat16 is taken" in notes(BERT)
    assert notes(BERT, dtype="fp16") == ""
    assert "names no longest sequence" in notes({**LLAMA, "max_position_embeddings": None})
    assert "vision and audio parts are left out" in notes(GEMMA_3)
    assert "absorbed form" in notes(DEEPSEEK)
    assert "layers of linear_attention have no softmax, and are left out" in notes(
        {**LLAMA, "layer_types": ["linear_attention", "full_attention"]}
    )
    assert "64 on each side" in notes({**BERT, "model_type": "modernbert", "local_attention": 128})
    assert notes(LLAMA) == ""


def test_a_file_or_its_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert model_config.read_file(tmp_path) == model_config.read_file(tmp_path / "config.json") == LLAMA


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (None, "must be a model's config.json, but there is none"),
        (b"{", "but it does not parse"),
        (b"\xff\xfe\xfa", "but it does not parse"),
        (b"[" * 100_000, "but it does not parse"),
        (b" " * 2**21, "must be at most 1048576 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, data: bytes | None, fault: str) -> None:
    if data is not None:
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ShapesError, match=fault):
        model_config.read_file(tmp_path / "config.json")
