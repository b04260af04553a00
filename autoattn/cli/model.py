"""`--model`: a Hugging Face config as a shapes document, from a file or from what transformers has on this machine."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from autoattn.cli import options
from autoattn.errors import ShapesError
from autoattn.shapes import model_config, shapes_file
from autoattn.shapes.shapes_file import NamedProblem

WAY_OUT = "name a config.json, or a folder that holds one"


def document(
    model: str, *, dtype: str | None, batch: int | None, lengths: str | None, ranks: int | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The shapes document of a model, and what somebody should know of it, a sentence each.

    Args:
        model: the path of a config.json or of its folder, or a name that transformers or huggingface_hub has at hand.
        dtype, batch: in place of the config's, and of 1.
        lengths: tokens, between commas.
        ranks: of a group that share each sequence.

    Raises:
        ShapesError: there is no such config, or problems cannot say its attention.
        UsageError: the lengths are no whole numbers.
    """
    wanted = options.lengths("--lengths", lengths) if lengths is not None else None
    config = model_config.read(_config(model), model)
    batch = batch if batch is not None else 1
    shapes = model_config.document(config, dtype=dtype, batch=batch, lengths=wanted, ranks=ranks)
    shapes_file.parse(shapes, f"--model {model}")  # what no kernel takes is refused before anything is written or tuned
    return shapes, model_config.notes(config, dtype=dtype, lengths=wanted)


def problems(document: dict[str, Any], model: str) -> list[NamedProblem]:
    """The problems of such a document."""
    return shapes_file.parse(document, f"--model {model}")


def _config(model: str) -> object:
    path = Path(model).expanduser()
    if path.exists() or path.suffix == ".json" or model.startswith((".", "/", "~")):
        return model_config.read_file(path)
    return _named(model)


def _named(name: str) -> object:
    """The config of a name, from the cache of transformers or of huggingface_hub; nothing is downloaded."""
    try:
        transformers = import_module("transformers")
    except ImportError:
        return _of_hub(name)
    try:
        loaded: object = transformers.AutoConfig.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        ).to_dict()
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ShapesError(
            f"--model must be a path, or a name that transformers has on this machine, got {name!r:.80} "
            f"({reason:.120}); {WAY_OUT}"
        ) from None
    return loaded


def _of_hub(name: str) -> object:
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        raise ShapesError(
            f"--model must be a path where neither transformers nor huggingface_hub is installed, got {name!r:.80}; "
            f"{WAY_OUT}"
        ) from None
    try:
        file = hub.try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name that the hub could have
        file = None
    if not isinstance(file, str):
        raise ShapesError(
            f"--model must be a path, or a name whose config huggingface_hub has on this machine, got {name!r:.80}; "
            f"{WAY_OUT}"
        )
    return model_config.read_file(Path(file))
