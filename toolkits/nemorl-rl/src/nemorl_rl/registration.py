"""Decorators that add parts to the running process: ``@register_environment("shouting")``.

For notebooks, scripts and tests; a package declares entry points instead (docs/plugins.md), with the same result: the
name works in configs, on the command line of that process and in ``nemorl.get_training_backend``. A config class is
registered as it is; a function or another class gets one (:mod:`nemorl_rl.environments.wrapped`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nemorl.plugins.kinds import GenerationBackendConfig, TrainingBackendConfig
from nemorl.plugins.registry import config_bases, registry

from nemorl_rl.environments.wrapped import wrap

Target = TypeVar("Target")


def register_algorithm(name: str) -> Callable[[Target], Target]:
    """Add an algorithm: a ``RunConfig`` subclass, or a ``BaseTrainer`` subclass with its ``config_class``.

    Example:
        >>> @register_algorithm("imitate_best")  # doctest: +SKIP
        ... class ImitateBest(RolloutTrainer):
        ...     config_class = ImitateBestConfig
    """
    return _registering("algorithms", name)


def register_training_backend(name: str) -> Callable[[Target], Target]:
    """Add a training backend: a config class, or a class with the verbs of ``nemorl.contracts.TrainingBackend``.

    Its constructor may take ``policy`` (also as ``config``), ``worker`` (also as ``cluster``: this rank's place in it)
    and ``reference``; so may a ``setup`` method, which is called right after.

    Example:
        >>> @register_training_backend("mine")
        ... class Mine:
        ...     def __init__(self, policy, worker):
        ...         self.model = policy.model_name
    """
    return _registering("training_backends", name)


def register_generation_backend(name: str) -> Callable[[Target], Target]:
    """Add a generation backend: a config class, or a class with the verbs of ``nemorl.contracts.GenerationBackend``.

    Its constructor may take ``generation`` (also as ``config``), ``policy``, ``worker`` (also as ``cluster``) and
    ``weights``; so may a ``setup`` method, which is called right after.

    Example:
        >>> @register_generation_backend("parrot")
        ... class Parrot:
        ...     def generate(self, requests):
        ...         return [[Completion(r.token_ids, (0.0,) * len(r.token_ids), "length")] for r in requests]
    """
    return _registering("generation_backends", name)


def register_environment(name: str) -> Callable[[Target], Target]:
    """Add an environment: a config class, an ``Environment`` subclass or a reward function.

    Example:
        >>> @register_environment("shouting")
        ... def shouting(prompt, response):
        ...     return float(response.isupper())
    """
    return _registering("environments", name)


def register_dataset(name: str) -> Callable[[Target], Target]:
    """Add a dataset: a config class, or a function that returns rows.

    The function may take ``split`` (``"train"`` or ``"validation"``; it returns ``None`` where there is no such
    split). One that does not is asked for ``train`` only.

    Example:
        >>> @register_dataset("squares")
        ... def squares(count: int = 10):
        ...     return [{"prompt": f"{n}*{n}=", "answer": str(n * n)} for n in range(count)]
    """
    return _registering("datasets", name)


def register_logger(name: str) -> Callable[[Target], Target]:
    """Add a logger: a config class, a class with ``log(metrics, step)`` and ``close()``, or ``f(metrics, step)``.

    The constructor of a class may take ``run_dir``.

    Example:
        >>> @register_logger("printed")
        ... def printed(metrics, step):
        ...     print(step, dict(metrics))
    """
    return _registering("loggers", name)


def get_training_backend(name: str) -> type[TrainingBackendConfig]:
    """The config class of an installed or registered training backend, e.g. ``dtensor``.

    A run builds the backend itself from a config: ``PolicyConfig(backend=get_training_backend("dtensor")())``.

    Raises:
        PluginNotFoundError: nothing has the name; says what is installed and what to install.

    Example:
        >>> get_training_backend("dtensor").__name__
        'DTensorConfig'
    """
    found: type[TrainingBackendConfig] = registry().load("training_backends", name)
    return found


def get_generation_backend(name: str) -> type[GenerationBackendConfig]:
    """The config class of an installed or registered generation backend, e.g. ``vllm``.

    Raises:
        PluginNotFoundError: nothing has the name; says what is installed and what to install.

    Example:
        >>> get_generation_backend("hf").__name__
        'HFGenerationConfig'
    """
    found: type[GenerationBackendConfig] = registry().load("generation_backends", name)
    return found


def _registering(kind: str, name: str) -> Callable[[Target], Target]:
    def add(target: Target) -> Target:
        is_config = isinstance(target, type) and issubclass(target, config_bases()[kind])
        registry().register(kind, name, target if is_config else wrap(kind, name, target))
        return target

    return add
