"""Hugging Face models of random weights at the layer shapes of known ones, and what programs do with them.

A task is prepared for the attention that a model has at that moment: a prompt, new tokens behind it, a training step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
import transformers
from torch import Tensor

NEW_TOKENS = 16  # of a sample of decoding
NO_LABEL = -100  # what Transformers leaves out of the loss
VOCABULARY = 32_000  # the tasks time layers, of which there are few, and not the matrix behind the last one
SHARPNESS = 1.5  # of queries and keys, so that few keys count and a wrong mask shows
SINK = 6.0  # a score that counts beside those of many keys


class Task(Enum):
    """What is timed."""

    PREFILL = "prefill"
    FORWARD = "forward pass"
    DYNAMIC = "decode, dynamic cache"
    STATIC = "decode, static cache"
    COMPILED = "decode, static cache, compiled"
    TRAINING = "training step"


DECODING = (Task.DYNAMIC, Task.STATIC, Task.COMPILED)
DECODER = (Task.PREFILL, *DECODING, Task.TRAINING)
ENCODER = (Task.FORWARD, Task.TRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One kind of model, at its real layer shapes with few layers.

    Attributes:
        config, auto: names of Transformers' classes.
        facts: what the config says.
        tiny: what it says in place of that where a CPU runs it.
        batch, tokens: of the prompt, or of what an encoder reads; a picture has none.
        trained: tokens of a training step.
        flex: tasks in which FlexAttention takes part, which compiles for seconds in each.
    """

    name: str
    config: str
    auto: str = "AutoModelForCausalLM"
    facts: Mapping[str, Any]
    tiny: Mapping[str, Any]
    batch: int = 1
    tokens: int = 8192
    trained: int = 4096
    tasks: tuple[Task, ...] = DECODER
    flex: tuple[Task, ...] = (Task.PREFILL,)

    def size(self, task: Task) -> str:
        """What a call of a task reads, in words."""
        if "image_size" in self.facts:
            return f"{self.batch} pictures"
        if task in DECODING:
            return f"{self.batch} behind {self.tokens:,} tokens"
        return f"{self.batch} of {self.trained if task is Task.TRAINING else self.tokens:,} tokens"

    def shrunk(self) -> Model:
        """The same model for a CPU."""
        return replace(self, facts={**self.facts, **self.tiny}, batch=2, tokens=24, trained=20)


DECODER_FACTS = {
    "num_hidden_layers": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 16384, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 97,
}  # fmt: skip
TINY_DECODER = {**TINY, "num_key_value_heads": 2, "max_position_embeddings": 64}
EIGHT_B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
ENCODER_FACTS = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 16,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
MODELS = (
    Model(
        name="Llama 3 8B", config="LlamaConfig", facts={**DECODER_FACTS, **EIGHT_B}, tiny=TINY_DECODER,
        flex=(Task.PREFILL, Task.TRAINING),
    ),
    Model(
        name="Mistral 7B, window 4096", config="MistralConfig",
        facts={**DECODER_FACTS, **EIGHT_B, "sliding_window": 4096}, tiny={**TINY_DECODER, "sliding_window": 7},
    ),
    Model(
        name="Gemma 2 9B, softcap, window 4096", config="Gemma2Config",
        facts={
            **DECODER_FACTS, "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "attn_logit_softcapping": 5.0,  # its own 50 would not show in scores of random weights
        },
        tiny={**TINY_DECODER, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7},
        tasks=(Task.PREFILL, Task.DYNAMIC, Task.TRAINING), flex=(Task.PREFILL, Task.TRAINING),
    ),
    Model(
        name="GPT-OSS 20B, sinks, window 128, 4 experts", config="GptOssConfig",
        facts={
            **DECODER_FACTS, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
            "rope_parameters": {"rope_type": "default"}, "num_local_experts": 4,
            "num_experts_per_tok": 4,  # all, or rounding would choose other ones
            "experts_implementation": "eager",
        },
        tiny={**TINY_DECODER, "head_dim": 16, "sliding_window": 7}, tokens=4096, trained=2048,
        tasks=(Task.PREFILL, Task.DYNAMIC, Task.TRAINING),
    ),
    Model(
        name="BERT large, padded", config="BertConfig", auto="AutoModelForMaskedLM",
        facts={**ENCODER_FACTS, "vocab_size": 30522}, tiny=TINY, batch=16, tokens=512, trained=512,
        tasks=ENCODER, flex=(Task.FORWARD,),
    ),
    Model(
        name="ViT large, 384 pixels", config="ViTConfig", auto="AutoModelForImageClassification",
        facts={**ENCODER_FACTS, "image_size": 384, "patch_size": 16}, tiny={**TINY, "image_size": 32, "patch_size": 8},
        batch=16, tasks=ENCODER, flex=(),
    ),
)  # fmt: skip


def build(model: Model, device: torch.device, dtype: torch.dtype) -> Any:
    """The model with the same weights at every call, which are such that attention decides the output."""
    torch.manual_seed(0)
    config = getattr(transformers, model.config)(**model.facts)
    with device:
        net = getattr(transformers, model.auto).from_config(config)
    for name, weight in net.named_parameters():
        if "sinks" in name:
            torch.nn.init.constant_(weight, SINK)
        elif weight.dim() == 2:
            torch.nn.init.normal_(weight, std=SHARPNESS * weight.shape[1] ** -0.5)
    convert(net, dtype)
    return net.eval()


def convert(net: Any, dtype: torch.dtype) -> None:
    """Weights to another dtype; buffers stay, such as the frequencies of rotary positions."""
    for weight in net.parameters():
        weight.data = weight.data.to(dtype)
        weight.grad = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A task of one attention.

    Attributes:
        call: what is timed.
        ready: what comes before each call, outside the clock.
        output: calls once and gives what is compared: logits of all tokens that are no padding, or gradients of the
            first layer's matrices.
        units: tokens of a call in decoding, or 1: times are told for each.
    """

    call: Callable[[], object]
    ready: Callable[[], None]
    output: Callable[[], Tensor]
    units: int = 1


@dataclass(slots=True, kw_only=True)
class Workload:
    """A model with its inputs."""

    model: Model
    net: Any
    inputs: dict[str, Tensor] = field(default_factory=dict)  # of the forward pass
    trained: dict[str, Tensor] = field(default_factory=dict)  # of the training step
    ids: Tensor | None = None  # [batch, tokens + NEW_TOKENS] of a decoder

    @classmethod
    def of(cls, model: Model, net: Any) -> Workload:
        """Random tokens, or pictures; an encoder's rows are padded to the longest."""
        generator = torch.Generator().manual_seed(1)
        device, side = net.device, model.facts.get("image_size")
        if side is not None:
            pixels = torch.rand(model.batch, 3, side, side, generator=generator).to(device, net.dtype)
            classes = torch.zeros(model.batch, dtype=torch.int64, device=device)
            return cls(model=model, net=net, inputs={"pixel_values": pixels},
                       trained={"pixel_values": pixels, "labels": classes})  # fmt: skip
        shape = model.batch, max(model.tokens + NEW_TOKENS, model.trained)
        ids = torch.randint(3, net.config.vocab_size, shape, generator=generator).to(device)
        if model.tasks is ENCODER:
            ids = ids[:, : model.tokens]
            lengths = torch.randint(model.tokens // 4, model.tokens + 1, (model.batch, 1), generator=generator)
            kept = (torch.arange(model.tokens) < lengths).to(device)
            inputs = {"input_ids": ids, "attention_mask": kept.long()}
            return cls(model=model, net=net, inputs=inputs,
                       trained={**inputs, "labels": ids.masked_fill(~kept, NO_LABEL)})  # fmt: skip
        learnt = ids[:, : model.trained]
        return cls(model=model, net=net, inputs={"input_ids": ids[:, : model.tokens]}, ids=ids,
                   trained={"input_ids": learnt, "labels": learnt})  # fmt: skip

    def prepare(self, task: Task) -> Prepared:
        """A task for the attention that the model has now; prefills the cache that is decoded on."""
        if task is Task.TRAINING:
            return Prepared(call=self._step, ready=self._forget_gradients, output=self._gradients)
        if task in DECODING:
            return self._decoding(task)
        last = {} if task is Task.FORWARD else {"logits_to_keep": 1}

        @torch.no_grad()
        def forward() -> object:
            return self.net(**self.inputs, **last).logits

        return Prepared(call=forward, ready=lambda: None, output=self._logits)

    @torch.no_grad()
    def _logits(self) -> Tensor:
        """[tokens that are no padding, vocabulary], or [batch, classes]."""
        logits = self.net(**self.inputs).logits
        kept = self.inputs.get("attention_mask")
        return logits.flatten(0, -2) if kept is None else logits[kept.bool()]

    def _forget_gradients(self) -> None:
        self.net.zero_grad(set_to_none=True)

    def _step(self) -> object:
        extra = {} if self.ids is None else {"use_cache": False}
        loss = self.net.train()(**self.trained, **extra).loss
        loss.backward()
        self.net.eval()
        return loss

    def _gradients(self) -> Tensor:
        """[numbers of the first layer's matrices]: the gradients of all later attention go through them."""
        self._forget_gradients()
        self._step()
        named = self.net.named_parameters()
        gradients = [weight.grad.flatten() for name, weight in named if ".0." in name and weight.dim() == 2]
        self._forget_gradients()
        return torch.cat(gradients)

    @torch.no_grad()
    def _decoding(self, task: Task) -> Prepared:
        ids, prompt, net = self.ids, self.model.tokens, self.net
        assert ids is not None
        if task is Task.DYNAMIC:
            cache = transformers.DynamicCache(config=net.config)
        else:
            cache = transformers.StaticCache(config=net.config, max_cache_len=prompt + NEW_TOKENS)
        known = inspect.signature(net.forward).parameters  # Transformers 5.24 renamed it
        cached = {"cache" if "cache" in known else "past_key_values": cache}
        net(ids[:, :prompt], logits_to_keep=1, **cached)
        state, forward = _cache_state(cache), net
        if task is Task.COMPILED:
            words = {"mode": "reduce-overhead"} if ids.is_cuda else {"backend": "aot_eager"}
            forward = torch.compile(net.forward, fullgraph=True, **words)

        @torch.no_grad()
        def decode() -> Tensor:  # [batch * NEW_TOKENS, vocabulary]
            steps = range(prompt, prompt + NEW_TOKENS)
            logits = [forward(ids[:, at : at + 1], **cached).logits.clone() for at in steps]
            return torch.cat(logits, dim=1).flatten(0, 1)

        def ready() -> None:
            _restore(cache, state, in_place=task is not Task.DYNAMIC)

        return Prepared(call=decode, ready=ready, output=decode, units=NEW_TOKENS)

    @torch.no_grad()
    def _logits_behind_prompt(self) -> Tensor:
        """[batch * NEW_TOKENS, vocabulary], by a forward pass of all tokens without a cache."""
        assert self.ids is not None
        ids = self.ids[:, : self.model.tokens + NEW_TOKENS]
        return self.net(ids, use_cache=False, logits_to_keep=NEW_TOKENS).logits.flatten(0, 1)

    def expected(self, task: Task) -> Tensor:
        """What `Prepared.output` should be, by eager attention and the same weights in float32."""
        with self._in_float32():
            if task in DECODING:
                return self._logits_behind_prompt()
            return self._gradients() if task is Task.TRAINING else self._logits()

    @contextmanager
    def _in_float32(self) -> Iterator[None]:
        dtype, inputs, trained = self.net.dtype, self.inputs, self.trained
        self.net.set_attn_implementation("eager")
        convert(self.net, torch.float32)
        self.inputs, self.trained = (
            {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in given.items()}
            for given in (inputs, trained)
        )
        try:
            yield
        finally:
            convert(self.net, dtype)
            self.inputs, self.trained = inputs, trained


def _cache_state(cache: Any) -> list[dict[str, Any]]:
    """What each layer of a cache holds, copied."""
    return [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(layer).items()}
        for layer in cache.layers
    ]


def _restore(cache: Any, state: list[dict[str, Any]], *, in_place: bool) -> None:
    """Brings a cache back: a static one in place, as graphs hold its addresses; no layer writes into a dynamic one."""
    for layer, values in zip(cache.layers, state, strict=True):
        for name, value in values.items():
            if in_place and isinstance(value, Tensor):
                getattr(layer, name).copy_(value)
            else:
                setattr(layer, name, value)
