"""The short ways: one call from a model and data to a trained model, and the trainer of any algorithm by name.

Everything here is sugar for ``SomeConfig(...).build().fit(...)``. What may be given as data and as reward is described
in ``environments.sources``; the loop itself is in ``nemorl.trainer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemorl.config.load import validate
from nemorl.config.run import RunConfig
from nemorl.contracts import DataSource
from nemorl.errors import UsageError
from nemorl.plugins import registry
from nemorl.run import TrainResult
from nemorl.trainer import BaseTrainer

from nemorl_rl.environments.sources import RewardSource
from nemorl_rl.models.model_objects import model_folder
from nemorl_rl.trainer import RolloutTrainer


class Trainer:
    """The trainer of any algorithm, by name. ``nemorl.GRPOTrainer`` and its like are the classes themselves.

    Example:
        >>> trainer = nemorl.Trainer.from_pretrained("org/model", algorithm="sft", max_steps=10)
        >>> trainer.config.max_steps
        10
    """

    @staticmethod
    def from_pretrained(
        model: Any, *, algorithm: str = "grpo", tokenizer: Any = None, **knobs: Any
    ) -> BaseTrainer[Any]:
        """A trainer, ready to ``fit``.

        Args:
            model: Hugging Face name, local folder, such as the ``model`` folder of an earlier run, or a
                ``transformers.PreTrainedModel``, which is saved to a temporary folder (:func:`model_folder`).
            algorithm: Name of an installed or registered algorithm.
            tokenizer: Of a model that is an object. Unset: that of its ``name_or_path``.
            **knobs: Fields of the algorithm's config, e.g. ``max_steps=100`` or ``policy={"precision": "bfloat16"}``.

        Raises:
            PluginNotFoundError: the algorithm is not installed; says what to install.
            ConfigError: every knob that is wrong.
        """
        config_class: type[RunConfig] = registry().load("algorithms", algorithm)
        settings = {"model": model_folder(model, tokenizer), **knobs}
        config = validate(config_class, settings, source=config_class.__name__)
        trainer: BaseTrainer[Any] = config.build()
        return trainer


def train(
    model: Any,
    dataset: DataSource | None = None,
    reward_fn: RewardSource | None = None,
    *,
    algorithm: str = "grpo",
    val_dataset: DataSource | None = None,
    callbacks: Sequence[object] = (),
    resume: bool = False,
    accept_changed_data: bool = False,
    **knobs: Any,
) -> TrainResult:
    """Post-train ``model`` on ``dataset``.

    Args:
        model: Hugging Face name, local folder, or a ``transformers.PreTrainedModel``.
        dataset: A dataset's name or path, rows, a ``datasets.Dataset`` or a ``DataModule``. Unset:
            the ``data`` knob.
        reward_fn: ``f(prompt, response) -> float``, TRL's ``f(completions, **columns) -> list[float]``, an environment,
            or several in a list or dict; required where the algorithm samples, unless the ``environment`` knob is set.
        algorithm: Name of an installed or registered algorithm.
        val_dataset: Held-out rows. Unset: the validation split of the dataset, if it has one.
        callbacks: Objects with ``on_*`` methods.
        resume: Continue an interrupted run of the same config.
        accept_changed_data: Continue it with other rows than it has had so far.
        **knobs: Fields of the algorithm's config, e.g. ``max_steps=100`` or ``policy={"precision": "bfloat16"}``;
            ``tokenizer`` of a model that is an object.

    Example:
        >>> right = lambda prompt, response: float("42" in response)
        >>> nemorl.train("Qwen/Qwen2.5-1.5B", rows, right, max_steps=20)  # doctest: +SKIP
    """
    trainer = Trainer.from_pretrained(model, algorithm=algorithm, **knobs)
    given: dict[str, Any] = {"val_dataset": val_dataset, "callbacks": callbacks}
    given |= {"resume": resume, "accept_changed_data": accept_changed_data}
    if isinstance(trainer, RolloutTrainer):
        return trainer.fit(dataset, reward_fn, **given)
    if reward_fn is not None:
        raise UsageError(f"{algorithm} samples no responses, so there is nothing to reward", fix="drop reward_fn")
    return trainer.fit(dataset, **given)


def train_grpo(model: Any, dataset: DataSource, reward_fn: RewardSource | None = None, **knobs: Any) -> TrainResult:
    """:func:`train` with ``algorithm="grpo"``: learn from rewards, relative to the other responses to a prompt.

    Example:
        >>> nemorl.train_grpo("org/model", rows, lambda prompt, response: -len(response))  # doctest: +SKIP
    """
    return train(model, dataset, reward_fn, algorithm="grpo", **knobs)


def train_sft(model: Any, dataset: DataSource, **knobs: Any) -> TrainResult:
    """:func:`train` with ``algorithm="sft"``: imitate rows with ``messages``, or ``prompt`` and ``response``.

    Example:
        >>> nemorl.train_sft("org/model", [{"prompt": "1+1=", "response": "2"}])  # doctest: +SKIP
    """
    return train(model, dataset, algorithm="sft", **knobs)


def train_dpo(model: Any, dataset: DataSource, **knobs: Any) -> TrainResult:
    """:func:`train` with ``algorithm="dpo"``: learn from rows with ``prompt``, ``chosen`` and ``rejected``.

    Example:
        >>> nemorl.train_dpo("org/model", [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])  # doctest: +SKIP
    """
    return train(model, dataset, algorithm="dpo", **knobs)
