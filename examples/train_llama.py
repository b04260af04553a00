"""Trains a small Llama on packed texts made up on the spot, with each attention.

    python examples/train_llama.py --hidden 1024 --layers 8 --heads 16 --kv-heads 8 --tokens 8192 --steps 20

Each text counts up modulo a number of its own, so that there is something to learn. Texts of different lengths lie one
behind the other in a row without padding; their positions begin anew, and no text sees another. autoattn gets them as
packed sequences, SDPA gets a mask of all pairs, and FlexAttention a table of blocks; it takes part on a GPU, without
which it has no gradients. Prints the loss and tokens a second of each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autoattn.integrations import huggingface

VOCABULARY = 128
ATTENTIONS = ("sdpa", "flex_attention", "autoattn")
UNTIMED = 2  # steps in which kernels are compiled
NO_LABEL = -100  # what Transformers leaves out of the loss


def rows(tokens: int, longest: int, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """Rows [1, tokens] of packed texts; the first token of each text is no label."""
    random = torch.Generator().manual_seed(0)
    while True:
        texts, positions, filled = [], [], 0
        while filled < tokens:
            length = min(int(torch.randint(longest // 4, longest + 1, (), generator=random)), tokens - filled)
            first, step = torch.randint(1, VOCABULARY, (2,), generator=random).tolist()
            texts.append((first + step * torch.arange(length)) % VOCABULARY)
            positions.append(torch.arange(length))
            filled += length
        ids, places = torch.cat(texts)[None].to(device), torch.cat(positions)[None].to(device)
        yield {"input_ids": ids, "position_ids": places, "labels": ids.masked_fill(places == 0, NO_LABEL)}


def build(given: argparse.Namespace, device: str) -> Any:
    """A Llama in training; the same weights each time."""
    config = LlamaConfig(
        hidden_size=given.hidden, intermediate_size=4 * given.hidden, num_hidden_layers=given.layers,
        num_attention_heads=given.heads, num_key_value_heads=given.kv_heads, vocab_size=VOCABULARY,
        max_position_embeddings=given.longest, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).train()


def train(model: Any, given: argparse.Namespace, device: str) -> tuple[list[float], float]:
    """Losses of the steps, and tokens a second of the median one of those that are timed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses, seconds = [], []
    for _, row in zip(range(given.steps), rows(given.tokens, given.longest, device), strict=False):
        begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(**row, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return losses, given.tokens / statistics.median(seconds[UNTIMED:])


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Prints a line for each attention.

    Returns:
        Tokens a second of each.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("hidden", 256), ("layers", 4), ("heads", 8), ("kv-heads", 4), ("tokens", 2048), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest text")
    usual_ones = ATTENTIONS if device == "cuda" else ("sdpa", "autoattn")
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=usual_ones)
    given = parser.parse_args(words)
    if given.steps <= UNTIMED:
        parser.error(f"--steps must be at least {UNTIMED + 1}, {UNTIMED} of which are not timed, got {given.steps}")
    huggingface.register()
    speeds = {}
    for attention in given.attentions:
        model = build(given, device)
        model.set_attn_implementation(attention)
        losses, speeds[attention] = train(model, given, device)
        print(f"{attention:14} loss {losses[0]:.3f} to {losses[-1]:.3f}, {speeds[attention]:10.1f} tokens a second")
    return speeds


if __name__ == "__main__":
    main()
