"""The method that was measured to be the fastest for a call (`autoattn tune --ranks`)."""

from __future__ import annotations

from functools import lru_cache

import torch

from autoattn.cache import rank_choices
from autoattn.codegen import resources
from autoattn.core.rank_choice import Method, RankCall
from autoattn.hardware import nvidia


@lru_cache(maxsize=1024)
def find(call: RankCall, ranks: int, device: torch.device) -> Method | None:
    """The fastest method of the most similar call that was measured on as many cards like this one; None without one.

    A process reads the user's cache once for each call.

    Raises:
        CacheError: the file is damaged or newer.
    """
    card = nvidia.present(device.index) if device.type == "cuda" else None
    if card is None:
        return None
    measured = rank_choices.read(rank_choices.path_of(resources.user_cache(), card, ranks))
    if measured is None or measured.fingerprint != card.fingerprint:
        return None
    choice = measured.nearest(call)
    return None if choice is None else choice.method
