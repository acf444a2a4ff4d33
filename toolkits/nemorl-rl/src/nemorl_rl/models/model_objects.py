"""Models and tokenizers that are objects in memory, as folders: every part of a run loads its model by name."""

from __future__ import annotations

import getpass
import hashlib
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemorl.errors import UsageError, boundary

ADAPTER = "lora_"
"""In the names of an adapter's weights."""


def model_folder(model: Any, tokenizer: Any = None) -> str:
    """A folder that holds a transformers model and its tokenizer, written once for the same weights.

    It is in the system's temporary folder and named after what it holds, so that the same model gives the same run, and
    a run can be continued. Keep a copy elsewhere of what is to last: runs export their own models.

    Args:
        model: A ``transformers.PreTrainedModel``, or the name or folder of a model, which is returned as it is.
        tokenizer: A transformers tokenizer. Unset: that of the model's ``name_or_path``.

    Raises:
        UsageError: the model is wrapped by PEFT, quantised or no language model of transformers; or has no tokenizer.

    Example:
        >>> model_folder("Qwen/Qwen2.5-0.5B")
        'Qwen/Qwen2.5-0.5B'
    """
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise UsageError(
                "a tokenizer object was given for a model that is named",
                fix="pass the model as an object too, or save the tokenizer into the model's folder",
            )
        return str(model)
    _refuse_other_models(model)
    place = Path(tempfile.gettempdir()) / f"nemorl-models-{getpass.getuser()}"
    place.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".writing-") as scratch:
        written = Path(scratch) / "model"
        with boundary("saving the model object"):
            model.save_pretrained(written)
            _tokenizer_of(model, tokenizer).save_pretrained(written)
        folder = place / f"{type(model).__name__}-{_digest(written)}"
        if not folder.exists():
            with suppress(OSError):  # another process has written the same meanwhile
                written.rename(folder)
    return str(folder)


def _refuse_other_models(model: Any) -> None:
    transformers = sys.modules.get("transformers")
    weights = dict(model.named_parameters()) if _is_module(model) else {}
    if any(ADAPTER in name for name in weights):
        raise UsageError(
            f"the model ({type(model).__name__}) carries adapters of PEFT",
            fix="merge them first (model.merge_and_unload()), or pass the base model and policy={'lora': {'rank': …}}",
        )
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        wrapper = "a wrapper around a model" if weights else "no model"
        raise UsageError(
            f"a {type(model).__name__} is {wrapper} of transformers",
            fix="pass a transformers.PreTrainedModel itself, a model folder or the name of a model",
        )
    if model.config.to_dict().get("quantization_config"):
        raise UsageError(
            "the model is quantised, and its weights cannot be trained",
            fix="load it without quantization_config, and train adapters on it: policy={'lora': {'rank': …}}",
        )
    if any(weight.is_meta for weight in weights.values()):
        raise UsageError("weights of the model are not loaded (device meta)", fix="load it without device_map")


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _tokenizer_of(model: Any, tokenizer: Any) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if tokenizer is None and not model.name_or_path:
        raise UsageError("the model has no name to find its tokenizer by", fix="pass tokenizer=…")
    if tokenizer is None:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UsageError(
            f"a {type(tokenizer).__name__} is no tokenizer of transformers",
            fix="pass what AutoTokenizer.from_pretrained returns; of a processor, its .tokenizer",
        )
    return tokenizer


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
