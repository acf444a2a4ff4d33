"""Before anything loads: can the run's directory be written, is there such a model, does the reward work on a row?

Each check takes at most seconds. What is found is reported together, as mistakes in a config are.
"""

from __future__ import annotations

import inspect
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemorl.config.run import RunConfig
from nemorl.data import to_prompt
from nemorl.environments import Environment, RewardFunction
from nemorl.environments.base import as_score
from nemorl.errors import ConfigError, NemorlError, Problem, boundary
from nemorl.plugins import registry
from nemorl.plugins.policy import normalize
from nemorl.reading import expanded, shown
from nemorl.sources import as_environment
from nemorl.suggest import did_you_mean
from nemorl.tokenizer import Tokenizer
from nemorl.types import Prompt, Row

HUB_TIMEOUT_S = 5.0
"""Of the one question to the hub about a model that is not in the cache."""
REHEARSAL_TIMEOUT_S = 10.0
"""A reward that takes longer is left to the run, which has its own limit."""
TRIAL_RESPONSE = "a response"
"""Where the row has no answer to try."""
SURE_MISTAKES = (TypeError, NameError, AttributeError, KeyError, ImportError)
"""Errors that the text of the response rarely causes. Others may be its fault, and become a warning."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def preflight(
    config: RunConfig, run_dir: Path, environment: Environment | None, row: Row | None, warn: Callable[[str], None]
) -> None:
    """Check what can be checked without loading anything.

    Args:
        config: Of the run.
        run_dir: Where it will write; need not exist yet.
        environment: What scores responses, if anything does.
        row: The first row of the data; ``None`` where that is not known.
        warn: Told what may go wrong.

    Raises:
        ConfigError: every finding that would end the run.
    """
    for name in sorted(unused_names(config)):
        warn(f"warning: plugins.allow or block names {shown(name)}, which is not installed here")
    problems = [*directory_problems(run_dir), *model_problems(config)]
    parts = list(environment.rehearsals()) if isinstance(environment, Environment) and row is not None else []
    for part in parts:
        problems += _column_problems(part, row or {})
    if problems:
        raise ConfigError(problems, source="before loading anything")
    for part in parts:
        _rehearse(part, row or {}, warn)


def preflight_config(config: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> None:
    """:func:`preflight` of a run that is described by its config alone, for ``--dry-run``."""
    environment = as_environment(config.environment) if config.needs_generation else None
    try:
        with boundary(f"dataset {type(config.data).__name__}"):
            row = config.data.first_row() if config.data is not None and config.needs_generation else None
        preflight(config, run_dir, environment, row, warn)
    finally:
        if environment is not None:
            environment.close()


def unused_names(config: RunConfig) -> set[str]:
    """Distributions that ``plugins.allow`` and ``block`` name and that are not installed. A list may serve several
    machines, so this is no mistake."""
    installed = {normalize(entry.distribution) for entry in registry().index.entries}
    return {name for name in (*(config.plugins.allow or ()), *config.plugins.block) if normalize(name) not in installed}


def directory_problems(run_dir: Path) -> Iterator[Problem]:
    """Whether files can be made where the run will keep its own."""
    fix = "choose another run_dir (--run-dir), or make this one writable"
    try:
        place = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    except OSError as error:  # such as a name that is too long
        yield Problem("run_dir", f"{shown(str(run_dir))} cannot be a folder: {error.strerror}", fix)
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".nemorl-", dir=place):
            pass  # the only way to know: permissions, quotas and read-only file systems all show here
    except NotADirectoryError:
        yield Problem("run_dir", f"{place} is a file: {run_dir} cannot be in it", fix)
    except OSError as error:
        yield Problem("run_dir", f"{run_dir} cannot be written: {place}: {error.strerror}", fix)


def require_models(config: RunConfig) -> None:
    """Refuse models that are nowhere, before a download of them is tried for a minute and more."""
    if problems := list(model_problems(config)):
        raise ConfigError(problems, source="before loading anything")


def require_model(name: str) -> None:
    """:func:`require_models` where one model is all there is."""
    if not expanded(name).is_dir() and (problems := list(_absent("model", name))):
        raise ConfigError(problems, source="before loading anything")


def model_problems(config: RunConfig) -> Iterator[Problem]:
    """Models that are neither a folder nor in the hub's cache nor on the hub."""
    models = {"model": config.policy.model_name}
    models |= {f"{role}.model_name": companion.policy.model_name for role, companion in config.companions.items()}
    for path, name in models.items():
        if name and not expanded(name).is_dir() and (path == "model" or name != models["model"]):
            yield from _absent(path, name)


def _absent(path: str, name: str) -> Iterator[Problem]:
    folder = expanded(name)
    beside = [str(folder.parent / other.name) for other in folder.parent.iterdir()] if folder.parent.is_dir() else []
    guess = did_you_mean(name, beside) or "give a folder with config.json, or a hub name that is cached or reachable"
    if not _HUB_NAME.fullmatch(name):
        yield Problem(path, f"there is no folder {shown(name)}, and it is no name of the Hugging Face hub", guess)
        return
    if find_spec("huggingface_hub") is None:
        return  # another way of loading models, which nemorl does not know
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    here = f"there is no folder {shown(name)}, it is not in the cache of the Hugging Face hub"
    if constants.HF_HUB_OFFLINE:
        yield Problem(path, f"{here}, and HF_HUB_OFFLINE is set", guess)
        return
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        yield Problem(path, f"{shown(name)} on the hub asks for permission", "accept its terms there, and set HF_TOKEN")
    except RepositoryNotFoundError:
        yield Problem(path, f"{here}, and the hub knows no such model", guess)
    except HfHubHTTPError:
        return  # the hub answers, with an error of its own: the download retries
    except Exception as error:  # whatever the HTTP library of the day raises without a connection
        reason = type(error).__name__
        yield Problem(path, f"{here}, and {constants.ENDPOINT} cannot be reached ({reason})", guess)


# The reward


class _NoTokens(Tokenizer):
    """Stands in before the model's tokenizer is loaded: a reward function sees text."""

    def __init__(self) -> None:
        super().__init__(None)

    def encode(self, text: str) -> list[int]:
        return []

    def encode_prompt(self, messages: Any) -> list[int]:
        return []


def _column_problems(environment: Environment, row: Row) -> Iterator[Problem]:
    """Parameters of a reward function that no column fills."""
    if not isinstance(environment, RewardFunction):
        return
    columns = [str(name) for name in row]
    for name in sorted(environment.required_columns() - {"answer", *columns}):
        fix = did_you_mean(name, columns) or "map a column to it in `data:`, or give the parameter a default"
        owner = f"reward function {environment.name!r}"
        yield Problem("reward_fn", f"{owner} asks for {name}; the rows have {', '.join(columns)}", fix)


def _rehearse(environment: Environment, row: Row, warn: Callable[[str], None]) -> None:
    """Call the reward once, as the run will, on the first row.

    Raises:
        ForeignError: it made a mistake that is not the response's.
        UsageError: it returned no number.
    """
    prompt = to_prompt(row, 0, _NoTokens())
    response = prompt.answer or TRIAL_RESPONSE
    raised = _in_time(lambda: _score(environment, prompt, response))
    if raised is None:
        return
    if isinstance(raised, (NemorlError, *SURE_MISTAKES)):
        with boundary(f"reward function {environment.name!r}, tried on the first row,"):
            raise raised
    what = f"{type(raised).__name__}: {raised} for the first row and the response {shown(response)}"
    warn(f"warning: reward function {environment.name!r} raised {what}")


def _score(environment: Environment, prompt: Prompt, response: str) -> None:
    function = environment if isinstance(environment, RewardFunction) else None
    result = environment.score(prompt, response) if function is None else function.tried(prompt, response)
    if inspect.iscoroutine(result):
        result.close()  # it would run on another loop than the run's, and may call a service
    elif inspect.isawaitable(result):
        pass
    elif function is not None:
        function.checked(result)
    else:
        as_score(result, owner=f"environment {environment.name!r}")


def _in_time(call: Callable[[], None]) -> Exception | None:
    """What the call raised; ``None`` where it returned, or is still at work after the time that it has."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="reward-rehearsal", daemon=True)
    thread.start()
    thread.join(REHEARSAL_TIMEOUT_S)
    return raised[0] if raised else None
