"""Generates tokens with a Llama of random weights, and prints tokens a second with each attention.

    python examples/generate.py --hidden 2048 --layers 16 --heads 16 --kv-heads 8 --prompt 2048 --tokens 128

The weights are random, so that the text is noise; the time is that of a trained model of these sizes. All attentions
generate the same tokens if their logits round alike; the script says how many agree with those of the first.
FlexAttention takes part on a GPU, where it is compiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autoattn.integrations import huggingface

VOCABULARY = 32000
ATTENTIONS = ("sdpa", "flex_attention", "autoattn")


def build(given: argparse.Namespace, device: str) -> Any:
    """A Llama in evaluation."""
    config = LlamaConfig(
        hidden_size=given.hidden, intermediate_size=4 * given.hidden, num_hidden_layers=given.layers,
        num_attention_heads=given.heads, num_key_value_heads=given.kv_heads, vocab_size=VOCABULARY,
        max_position_embeddings=given.prompt + given.tokens, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def generate(model: Any, prompt: torch.Tensor, count: int, cache: str) -> tuple[torch.Tensor, float]:
    """New tokens [batch, count], and seconds."""
    begin = time.perf_counter()
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        cache_implementation=cache, disable_compile=prompt.device.type == "cpu",
    )  # fmt: skip
    new = output[:, prompt.shape[1] :].cpu()  # waits for the device
    return new, time.perf_counter() - begin


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Prints a line for each attention.

    Returns:
        Tokens a second of each.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("hidden", 512), ("layers", 4), ("heads", 8), ("kv-heads", 4), ("batch", 1), ("prompt", 512)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each sequence")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic", help="static is compiled on a GPU")
    parser.add_argument("--rounds", type=int, default=3, help="texts of each attention, in turn; the median counts")
    usual_ones = ATTENTIONS if device == "cuda" else ("sdpa", "autoattn")
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=usual_ones)
    given = parser.parse_args(words)
    huggingface.register()
    model = build(given, device)
    prompt = torch.randint(3, VOCABULARY, (given.batch, given.prompt), device=device)
    texts: dict[str, torch.Tensor] = {}
    seconds: dict[str, list[float]] = {name: [] for name in given.attentions}
    for number in range(-1, given.rounds):
        for attention in given.attentions:
            model.set_attn_implementation(attention)
            texts[attention], spent = generate(model, prompt, given.tokens, given.cache)
            if number >= 0:  # kernels are compiled in the round before
                seconds[attention].append(spent)
    speeds = {name: given.batch * given.tokens / statistics.median(spent) for name, spent in seconds.items()}
    first = texts[given.attentions[0]]
    for attention, speed in speeds.items():
        agreement = f"{int((texts[attention] == first).sum())} of {first.numel()} tokens agree"
        print(f"{attention:14} {speed:10.1f} tokens a second, the prompt included; {agreement}")
    return speeds


if __name__ == "__main__":
    main()
