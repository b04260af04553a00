"""The attention of a Hugging Face model, read from its config: heads, head dims, masks, softcap, sinks.

`read` takes the mapping of a config.json and gives facts; `document` makes a shapes document of them: the value of a
YAML file (docs/shapes.md). Keys are those of transformers' configuration classes. What no problem can say is an error
or a note, never left out in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoattn.core.problem import MAX_SIZE, DType
from autoattn.errors import ShapesError

LENGTHS = (1024, 4096, 16384)  # tokens; a model that reaches less far ends with its longest
MAX_CONFIG_BYTES = 1024 * 1024
BY_HAND = "write its problems in a shapes file, which autoattn init begins"

# Names that configuration classes give one fact.
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HEADS_KV = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
_HEAD_DIM = ("head_dim", "kv_channels")
_LENGTH = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
_DTYPE = ("dtype", "torch_dtype")
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")  # the language model of a multimodal one
_ENCODER = re.compile(r"bert|electra|ernie|^(esm|vit|deit|beit|dinov2|clip.*|siglip.*)$")

_SEES_ALL = ("full_attention", "attention", "global")
_HAS_WINDOW = ("sliding_attention", "local")
_LEFT_OUT = {
    "linear_attention": "have no softmax",
    "chunked_attention": "see chunks of keys, which no mask says",
    "mamba": "have no attention",
    "conv": "have no attention",
}
_UNSUPPORTED = {  # a key that is there and not false -> what it means
    "relative_attention_num_buckets": "adds a learned bias for each pair of tokens to the scores",
    "relative_attention": "adds scores of relative positions",
    "attention_window": "mixes windows with tokens that see everything",
    "is_encoder_decoder": "is an encoder and a decoder with attention between them",
}
_BOTH = ("gemma2", "gemma3", "cohere2")  # layers with and without the window take turns, whatever the file says


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the attention of a model computes."""

    name: str  # as the user gave it
    model_type: str  # transformers' word for the architecture; "" where the config has none
    dtype: DType | None  # None where the config has none
    heads: int
    heads_kv: int
    head_dim: int  # elements of a query and of a key
    head_dim_v: int
    causal: bool
    masks: tuple[str, ...]  # one for each kind of layers, as in a shapes file
    modifiers: tuple[str, ...]  # of softcap, alibi and sinks
    max_length: int | None  # tokens of the longest sequence; None where the config has none
    notes: tuple[str, ...]  # what somebody should know, a sentence each


def read_file(path: Path) -> object:
    """The value of a config.json, or of the one in a folder.

    Raises:
        ShapesError: there is no such file, it is no JSON, or larger than 1 MiB.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with open(file, "rb") as opened:
            data = opened.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise ShapesError(f"{file} must be a model's config.json, but there is none; correct the path") from None
    except OSError as error:
        raise ShapesError(f"{file} must be a readable config.json, but {error.strerror}; correct that") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ShapesError(f"{file} must be at most {MAX_CONFIG_BYTES} bytes, but is larger; name a model's config.json")
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        raise ShapesError(f"{file} must be a model's config as JSON, but it does not parse; correct the file") from None
    return value


def read(config: object, name: str) -> ModelConfig:
    """The attention of a config; `name` stands in messages.

    Raises:
        ShapesError: a fact is missing or impossible, or problems cannot say the attention.
    """
    if not isinstance(config, dict):
        raise ShapesError(f"{name} must be a model's config, a mapping of names to values; name another file")
    inner = next((config[key] for key in _NESTED if isinstance(config.get(key), dict)), None)
    if inner is None:
        return _Reader(config, name).read()
    language = read({**{key: config[key] for key in _DTYPE if key in config}, **inner}, name)
    note = "these are the problems of the language model; vision and audio parts are left out"
    return replace(language, notes=(*language.notes, note))


def document(
    config: ModelConfig, *, dtype: str | None = None, batch: int = 1, lengths: Sequence[int] | None = None,
    ranks: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A shapes document of a model: prefill, training and decode, or inference and training of an encoder.

    Args:
        dtype: as in a shapes file; the config's when None, and bfloat16 where it has none.
        batch: sequences of each problem.
        lengths: tokens; LENGTHS, up to the model's longest, when None.
        ranks: of a group that share each sequence, whose calls are a group of problems too.
    """
    seq = list(lengths) if lengths is not None else _lengths(config)
    heads_kv = {"heads_kv": config.heads_kv} if config.heads_kv != config.heads else {}
    head_dim_v = {"head_dim_v": config.head_dim_v} if config.head_dim_v != config.head_dim else {}
    defaults = {
        "dtype": dtype or (config.dtype or DType.BFLOAT16).value,
        "batch": batch,
        "heads": config.heads,
        **heads_kv,
        "head_dim": config.head_dim,
        **head_dim_v,
        "mask": list(config.masks) if len(config.masks) > 1 else config.masks[0],
        **dict.fromkeys(config.modifiers, True),
    }
    first = "prefill" if config.causal else "inference"
    groups: dict[str, Any] = {
        first: {"description": "the output for a whole sequence", "problems": [{"seq": seq}]},
        "training": {
            "description": "output and gradients of a whole sequence",
            "problems": [{"seq": seq, "operation": ["forward", "backward"]}],
        },
    }
    if config.causal:
        cached = [f"1x{length}" for length in seq]
        groups["decode"] = {"description": "one new token on cached keys", "problems": [{"seq": cached}]}
    if ranks is not None:
        groups["context-parallel"] = {
            "description": f"what each of {ranks} ranks computes of a whole sequence",
            "problems": [{"seq": seq, "operation": ["forward", "backward"], "ranks": ranks}],
        }
    return {"version": 1, "defaults": defaults, "groups": groups}


def notes(config: ModelConfig, *, dtype: str | None = None, lengths: Sequence[int] | None = None) -> tuple[str, ...]:
    """What somebody should know of such a document, a sentence each."""
    more = []
    if config.dtype is None and dtype is None:
        more.append("the config names no dtype, so bfloat16 is taken; --dtype names another")
    if config.max_length is None and lengths is None:
        more.append("the config names no longest sequence; --lengths names the lengths")
    return (*config.notes, *more)


def _lengths(config: ModelConfig) -> list[int]:
    longest = config.max_length
    if longest is None or longest >= LENGTHS[-1]:
        return list(LENGTHS)
    return [*(length for length in LENGTHS if length < longest), longest]


class _Reader:
    """One walk over a config; notes are kept on the way."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        nested = config.get("attn_config")  # MPT and DBRX keep some facts there
        self.config = {**(nested if isinstance(nested, dict) else {}), **config}
        self.name = name
        self.model_type = str(config.get("model_type") or "")
        self.notes: list[str] = []

    def read(self) -> ModelConfig:
        for key, meaning in _UNSUPPORTED.items():
            if self.config.get(key):
                raise ShapesError(f"{self.name} {meaning} ({key}), which --model does not read; {BY_HAND}")
        heads = self._needed(_HEADS)
        head_dim, head_dim_v = self._head_dims(heads)
        causal = self._is_causal()
        return ModelConfig(
            name=self.name,
            model_type=self.model_type,
            dtype=self._dtype(),
            heads=heads,
            heads_kv=self._heads_kv(heads),
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            causal=causal,
            masks=self._masks(causal),
            modifiers=self._modifiers(),
            max_length=self._max_length(),
            notes=tuple(self.notes),
        )

    def _size(self, names: Sequence[str]) -> int | None:
        """The first of the names that has a value; null is none."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
                raise ShapesError(
                    f"{self.name}: {name} must be a whole number from 1 to {MAX_SIZE}, got {value!r:.40}; {BY_HAND}"
                )
            return value
        return None

    def _needed(self, names: Sequence[str]) -> int:
        value = self._size(names)
        if value is None:
            raise ShapesError(
                f"{self.name} must say {names[0]}, but does not, as files that leave out their class's defaults; add it"
            )
        return value

    def _head_dims(self, heads: int) -> tuple[int, int]:
        """Of query and key, and of value; those of multi-head latent attention as each head computes them."""
        nope, rope = self._size(("qk_nope_head_dim",)), self._size(("qk_rope_head_dim",))
        if nope is not None and rope is not None:
            self.notes.append(
                "latent attention is taken with keys for each head; the absorbed form, in which all heads share the "
                "latent keys, has head dims above what kernels take"
            )
            return nope + rope, self._needed(("v_head_dim",))
        head_dim = self._size(_HEAD_DIM)
        if head_dim is None:
            hidden = self._needed(_HIDDEN)
            if hidden % heads:
                raise ShapesError(
                    f"{self.name}: the hidden size must be a multiple of the heads where there is no head_dim, got "
                    f"{hidden} and {heads}; add head_dim"
                )
            head_dim = hidden // heads
        return head_dim, head_dim

    def _heads_kv(self, heads: int) -> int:
        if self._size(("qk_rope_head_dim",)) is not None:
            return heads
        if self.config.get("multi_query") and not self.config.get("new_decoder_architecture"):  # Falcon, StarCoder
            return 1
        return self._size(_HEADS_KV) or heads

    def _is_causal(self) -> bool:
        if self.config.get("use_bidirectional_attention") or self.config.get("is_causal") is False:
            return False
        return bool(self.config.get("is_decoder")) or not _ENCODER.search(self.model_type)

    def _dtype(self) -> DType | None:
        value = next((self.config[key] for key in _DTYPE if self.config.get(key) is not None), None)
        text = str(value).removeprefix("torch.")
        if value is None or text == "auto":
            return None
        if text not in ("float16", "bfloat16", "float32"):
            raise ShapesError(f"{self.name}: dtype must be float16, bfloat16 or float32, got {text!r:.40}; correct it")
        return DType(text)

    def _modifiers(self) -> tuple[str, ...]:
        there = {
            "softcap": bool(self.config.get("attn_logit_softcapping")),
            "alibi": bool(self.config.get("alibi")) or self.model_type == "bloom",
            "sinks": self.model_type == "gpt_oss",
        }
        return tuple(name for name, is_there in there.items() if is_there)

    def _max_length(self) -> int | None:
        length = self._size(_LENGTH)
        # RoBERTa's positions begin behind the padding's.
        return length - 2 if length is not None and "roberta" in self.model_type and length > 2 else length

    def _masks(self, causal: bool) -> tuple[str, ...]:
        """The mask of each kind of layers."""
        whole = "causal" if causal else "full"
        kinds = self._kinds()
        masks = [whole] if False in kinds else []
        if True in kinds:
            masks.append(self._window(causal))
        return tuple(masks)

    def _window(self, causal: bool) -> str:
        """The mask of layers with a window, which counts the query's own key."""
        window = self._needed(("sliding_window", "local_attention", "window_size"))
        if causal:
            return f"window:{window - 1},0"
        self.notes.append(f"a window of {window} keys is taken as {window // 2} on each side")
        return f"window:{window // 2},{window // 2}"

    def _kinds(self) -> set[bool]:
        """Whether layers have the window: both where some do and others do not."""
        listed = self.config.get("layer_types") or _flat(self.config.get("attention_types"))
        if listed:
            return self._listed_kinds(listed)
        if self._size(("local_attention",)) is not None:  # ModernBERT
            return {False, True}
        if self._size(("sliding_window",)) is None or self.config.get("use_sliding_window") is False:
            return {False}
        if self.model_type.startswith(_BOTH) or (self._size(("sliding_window_pattern",)) or 1) > 1:
            return {False, True}
        first = self.config.get("max_window_layers") if self.config.get("use_sliding_window") else 0  # Qwen 2
        layers = self._size(("num_hidden_layers",))
        if isinstance(first, int) and layers is not None:
            return {number >= first for number in (0, layers - 1)}
        return {True}

    def _listed_kinds(self, listed: object) -> set[bool]:
        if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
            raise ShapesError(f"{self.name}: layer_types must be a list of words, got {listed!r:.40}; {BY_HAND}")
        kinds: set[bool] = set()
        for kind in dict.fromkeys(listed):
            if kind in _LEFT_OUT:
                self.notes.append(f"layers of {kind} {_LEFT_OUT[kind]}, and are left out")
            elif kind in _SEES_ALL or kind in _HAS_WINDOW:
                kinds.add(kind in _HAS_WINDOW)
            else:
                known = ", ".join((*_SEES_ALL, *_HAS_WINDOW, *_LEFT_OUT))
                raise ShapesError(f"{self.name}: layer_types must be of {known}, got {kind!r:.40}; {BY_HAND}")
        if not kinds:
            raise ShapesError(f"{self.name} has no layers of attention that problems can say; {BY_HAND}")
        return kinds


def _flat(types: object) -> list[str] | None:
    """GPT-Neo's [[["global", "local"], 12]] -> [global, local]."""
    if not isinstance(types, list):
        return None
    return [kind for pair in types if isinstance(pair, list) and pair for kind in pair[0]]
