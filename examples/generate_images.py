"""Denoises images by a diffusion transformer of random weights; prints steps a second with SDPA and with autoattn.

    python examples/generate_images.py --heads 24 --layers 4 --pixels 1024 --text 512 --steps 8

The transformer is that of Flux: blocks in which image and text have weights of their own, and twice as many in which
they share them. The weights are random, so that the image is noise; the time is that of a trained model of these sizes,
without its text encoder and its decoder of latents. No mask hides anything, so FlexAttention has nothing to gain here.
Both runs must give the same latents but for rounding, or the script ends with an error.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from autoattn.integrations import diffusers as integration

ATTENTIONS = ("sdpa", "autoattn")
HEAD_DIM, CHANNELS, EMBEDDING, POOLED = 128, 64, 4096, 768  # of Flux: CHANNELS of a token, EMBEDDING of a text's
SHARPNESS = 4.0  # of scores, in standard deviations, so that a query attends to few tokens, as in a trained model
TOKEN = 16  # pixels along the side of a token
ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # difference of the latents, as a part of their norm


def build(given: argparse.Namespace, device: str) -> Any:
    """A transformer in evaluation."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = FluxTransformer2DModel(
            num_layers=given.layers, num_single_layers=2 * given.layers, num_attention_heads=given.heads,
            attention_head_dim=HEAD_DIM, in_channels=CHANNELS, joint_attention_dim=EMBEDDING,
            pooled_projection_dim=POOLED,
        )  # fmt: skip
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        elif "norm_q" in name or "norm_added_q" in name:
            torch.nn.init.constant_(weight, SHARPNESS)
    return model.to(dtype).eval()


def draw_inputs(given: argparse.Namespace, model: Any) -> dict[str, torch.Tensor]:
    """Latents of noise [batch, tokens, channels], embeddings of a text, and the positions of both."""
    side = given.pixels // TOKEN
    generator = torch.Generator(model.device).manual_seed(1)
    shapes = {
        "hidden_states": (given.batch, side * side, CHANNELS),
        "encoder_hidden_states": (given.batch, given.text, EMBEDDING),
        "pooled_projections": (given.batch, POOLED),
    }
    drawn = {
        name: torch.randn(shape, generator=generator, device=model.device, dtype=model.dtype)
        for name, shape in shapes.items()
    }
    places = torch.arange(side, device=model.device)
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    image = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1)
    return {**drawn, "img_ids": image, "txt_ids": torch.zeros(given.text, 3, device=model.device)}


@contextmanager
def attention_of(name: str) -> Iterator[None]:
    """SDPA is diffusers' own choice; autoattn takes its place in the block."""
    registration = integration.register() if name == "autoattn" else None
    try:
        yield
    finally:
        if registration is not None:
            registration.remove()


@torch.no_grad()
def denoise(model: Any, inputs: dict[str, torch.Tensor], steps: int) -> tuple[torch.Tensor, float]:
    """Latents after the last step [batch, tokens, channels] on the CPU, and seconds."""
    begin = time.perf_counter()
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps, device=model.device)
    latents = inputs["hidden_states"]
    for moment in scheduler.timesteps:
        given = {**inputs, "hidden_states": latents, "timestep": moment.expand(len(latents)).to(latents.dtype) / 1000}
        velocity = model(**given, return_dict=False)[0]
        latents = scheduler.step(velocity, moment, latents, return_dict=False)[0]
    return latents.float().cpu(), time.perf_counter() - begin  # the copy waits for the device


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Prints a line for each attention.

    Returns:
        Steps a second of each.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("heads", 4), ("layers", 2), ("pixels", 256), ("text", 64), ("batch", 1), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--rounds", type=int, default=3, help="images of each attention, in turn; the median counts")
    given = parser.parse_args(words)
    if given.pixels % TOKEN:
        parser.error(f"--pixels must be a multiple of {TOKEN}, the side of a token, got {given.pixels}")
    model = build(given, "cuda" if torch.cuda.is_available() else "cpu")
    inputs = draw_inputs(given, model)
    latents: dict[str, torch.Tensor] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
    for number in range(-1, given.rounds):
        for attention in ATTENTIONS:
            with attention_of(attention):
                latents[attention], spent = denoise(model, inputs, given.steps)
            if number >= 0:  # kernels are compiled in the round before
                seconds[attention].append(spent)
    speeds = {name: given.steps / statistics.median(spent) for name, spent in seconds.items()}
    for attention, speed in speeds.items():
        images = given.batch * speed / given.steps
        print(f"{attention:10} {speed:10.2f} steps a second, {images:.3f} images a second of {given.steps} steps")
    expected = latents["sdpa"]
    difference = float((latents["autoattn"] - expected).norm() / expected.norm())
    print(f"the latents differ by {difference:.1e} of their norm")
    if not difference <= ALLOWED[model.dtype]:
        raise SystemExit(f"latents must agree up to {ALLOWED[model.dtype]:g} of their norm, got {difference:.1e}")
    return speeds


if __name__ == "__main__":
    main()
