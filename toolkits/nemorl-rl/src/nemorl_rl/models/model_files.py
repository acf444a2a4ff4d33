"""Where the files of a model are on this machine: its folder, or the hub's cache. Asks no network, imports no torch."""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemorl.base.text.reading import expanded, is_folder

from nemorl_rl.data.fingerprints import DIGITS, file_digest

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
"""Suffixes of their files."""
BLOCKS_OF_WEIGHTS = 16
"""Mebibytes read of each: a model of 200 files takes seconds. Training changes nearly all of a model."""


def stored_config(model_name: str) -> dict[str, Any] | None:
    """The ``config.json`` of a model; ``None`` where this machine has none that can be read.

    Args:
        model_name: Local folder, or name on the Hugging Face hub.
    """
    folder = stored_folder(model_name)
    try:
        found = json.loads((folder / "config.json").read_text()) if folder is not None else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def stored_folder(model_name: str) -> Path | None:
    """The folder of a model, which may be in the hub's cache; ``None`` where this machine has none."""
    folder = expanded(model_name)
    return folder if is_folder(folder) else _cached(model_name)


def weights_fingerprint(model_name: str) -> str | None:
    """Short text that differs where the weights of two models do; ``None`` where this machine has none.

    Of each file of weights: its name, its size, and as many of its blocks as take a hundredth of a second, the first
    among them, which names the tensors of a safetensors file. Times and places count for nothing.

    Args:
        model_name: Local folder, or name on the Hugging Face hub.

    Example:
        >>> weights_fingerprint("no/such-model") is None
        True
    """
    folder = stored_folder(model_name)
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS) if folder is not None else []
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} {file_digest(file, BLOCKS_OF_WEIGHTS)}\n".encode())
    return f"{len(files)} file{'s' * (len(files) != 1)}, {digest.hexdigest()[:DIGITS]}"


def _cached(model_name: str) -> Path | None:
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model_name, "config.json")
    except HFValidationError:  # no name that the hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None
