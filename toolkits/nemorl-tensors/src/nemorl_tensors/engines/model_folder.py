"""Files of a Hugging Face model folder, written tensor by tensor: weights in parts, their index, the tokenizer.

Not here: the model's config, which whoever knows the model saves beside them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError
from safetensors.torch import save_file
from torch import Tensor

from nemorl_tensors.engines.chat_templates import chat_template_text, with_defaults

if TYPE_CHECKING:
    from nemorl.config.models import TokenizerConfig

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "chat_template*",
)  # fmt: skip
"""Copied rather than loaded and saved again: loading may guess another tokenizer class."""
VIDEO = "video_preprocessor_config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", VIDEO)
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
FILE_BYTES = 4 * 2**30
"""Size of one file of weights, which is in memory until it is written."""


def write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors under their Hugging Face names into an existing folder, as they come: one file or several.

    Args:
        folder: Of the model.
        tensors: All of them; each may be made as it is asked for.
    """
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > FILE_BYTES:
            files.append(_write_part(folder, len(files), pending))
            pending, size = {}, 0
        pending[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    files.append(_write_part(folder, len(files), pending))
    _name_parts(folder, files)


def save_tokenizer(folder: Path, model_name: str, settings: TokenizerConfig | None = None) -> None:
    """Give a model folder the tokenizer of a policy, and what its generation ends with.

    Args:
        folder: Of the model; exists.
        model_name: What the policy was loaded from.
        settings: Of the policy's tokenizer. A chat template is saved with the arguments that it was given, as its
            defaults. Unset: the tokenizer is the model's own.
    """
    generation = _stored_file(model_name, GENERATION)
    if generation is not None:
        shutil.copyfile(generation, folder / GENERATION)
    _copy_tokenizer(folder, (settings.name if settings is not None else None) or model_name)
    if settings is not None and (settings.chat_template is not None or settings.chat_template_kwargs):
        _save_template(folder, settings)


def save_processor(folder: Path, model_name: str, changes: Mapping[str, Any]) -> None:
    """Give a model folder what a model that sees or hears processes images and sounds with.

    Args:
        folder: Of the model; exists.
        model_name: What the policy was loaded from.
        changes: ``policy.media.processor``, which become the folder's own.
    """
    for name in PROCESSOR_FILES:
        found = _stored_file(model_name, name)
        if found is not None:
            settings = json.loads(found.read_text(encoding="utf-8"))
            inner = settings.get("image_processor", settings)
            inner.update({key: value for key, value in changes.items() if name != VIDEO})
            (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _stored_file(model_name: str, name: str) -> Path | None:
    """A file of a model, which is a folder or a name on the Hugging Face Hub; ``None`` where it has none."""
    from transformers.utils.hub import cached_file

    found = cached_file(str(Path(model_name).expanduser()), name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _copy_tokenizer(folder: Path, model_name: str) -> None:
    source = Path(model_name).expanduser()
    if source.is_dir():
        for pattern in TOKENIZER_FILES:
            for file in source.glob(pattern):
                shutil.copyfile(file, folder / file.name)
        return
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(model_name).save_pretrained(folder)
    except (OSError, ValueError) as error:
        raise BackendError(
            f"the weights were written to {folder}, but the tokenizer of {model_name!r} cannot be loaded: {error}",
            fix="copy the tokenizer files into the folder yourself",
        ) from error


def _save_template(folder: Path, settings: TokenizerConfig) -> None:
    """Put a template in place of the one that the tokenizer of ``folder`` brought."""
    file, config_file = folder / TEMPLATE, folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) if config_file.is_file() else {}
    stored = config.pop("chat_template", None)
    if settings.chat_template is not None:
        text = chat_template_text(settings.chat_template)
    elif file.is_file() or isinstance(stored, str):
        text = file.read_text(encoding="utf-8") if file.is_file() else stored
    else:
        return  # there is none that could be given arguments
    file.write_text(with_defaults(text, settings.chat_template_kwargs), encoding="utf-8")
    if stored is not None:
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_part(folder: Path, number: int, tensors: Mapping[str, Tensor]) -> list[str]:
    """The names written. How many files there will be, and so their names, is known at the end."""
    save_file(dict(tensors), folder / _part(number), metadata={"format": "pt"})
    return list(tensors)


def _name_parts(folder: Path, files: list[list[str]]) -> None:
    """Rename the parts as transformers expects them, and say which tensor is in which."""
    if len(files) == 1:
        (folder / _part(0)).rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files):
        final = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / _part(number)).rename(folder / final)
        total += (folder / final).stat().st_size
        places.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _part(number: int) -> str:
    return f"part-{number:05}.safetensors"
