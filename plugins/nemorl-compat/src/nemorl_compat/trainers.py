"""Trainers in the style of the architecture guide: ``_train_step(batch)``, ``_compute_loss(batch, outputs)``.

The guide hands a trainer a dict of settings and leaves open what a batch is and where the model lives. Here:

- ``batch`` in ``_train_step`` is the step's rows, a list of mappings as they come from the dataset;
- ``self.encode(batch)`` makes tokens of them, ``self.update(tokens)`` is one optimizer step of the policy on
  ``_compute_loss``, ``self.policy`` is the policy itself (``nemorl.resources.policies.TrainingPolicy``);
- ``_compute_loss(batch, outputs)`` is given those tokens (a ``TokenBatch``) and ``outputs`` [N], the policy's log-prob
  of each token with gradient. It runs where the model is, perhaps in another process.

New algorithms are better written as a ``nemorl.BaseTrainer`` with a config class of their own; those that sample
responses need that (docs/migration.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar, Self

from nemorl import trainer as kernel
from nemorl.base.text.suggest import did_you_mean
from nemorl.config import RunConfig
from nemorl.config.load import validate
from nemorl.errors import ConfigError, ConfigIssue, UsageError
from nemorl.metrics import Mean, Metrics, values
from nemorl.plugins import registry
from nemorl.types import Row
from nemorl_rl.data.encoding import encode_row
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.registration import register_algorithm
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.resources.policies import TrainingPolicy
    from nemorl_tensors import TokenBatch
    from torch import Tensor


class GuideConfig(RunConfig):
    """The settings of a trainer in the guide's style: those of every run, and the trainer's own under ``custom``."""

    batch_size: int = Field(32, ge=1)
    """Rows per step."""
    custom: dict[str, Any] = Field(default_factory=dict)
    """The additions of ``_build_config_from_pretrained``, section by section. nemorl does not check it."""

    def get(self, name: str, default: Any = None) -> Any:
        """A section of ``custom`` or a field, as ``get`` of the guide's dict."""
        if name in type(self).model_fields:
            return getattr(self, name)
        return self.custom.get(name, default)


class BaseTrainer(kernel.BaseTrainer[GuideConfig]):
    """Base class of trainers as the architecture guide writes them.

    Example:
        >>> class Imitation(BaseTrainer):
        ...     def _train_step(self, batch):
        ...         return self.update(self.encode(batch))
        ...     def _compute_loss(self, batch, outputs):
        ...         return -(outputs * batch.loss_weights).sum()
    """

    config_class = GuideConfig

    def __init__(self, config: Mapping[str, Any] | GuideConfig) -> None:
        super().__init__(config if isinstance(config, GuideConfig) else _validated(self.config_class, config))

    @classmethod
    def from_pretrained(cls, model: str, **knobs: Any) -> Self:
        """A trainer for a model by name or folder; ``knobs`` are fields of the config, or the trainer's own.

        Raises:
            ConfigError: a knob is wrong, or nothing takes it.
        """
        config = cls._build_config_from_pretrained(model, **knobs)
        own = {key for name in _sections(cls.config_class, config) for key in _keys(config[name])}
        taken = {*cls.config_class.model_fields, *own}
        unknown = [
            ConfigIssue(name, "no such setting", did_you_mean(name, taken) or "see _build_config_from_pretrained")
            for name in knobs
            if name not in taken
        ]
        if unknown:
            raise ConfigError(unknown, source=cls.__name__)
        return cls(config)

    @classmethod
    def _build_config_from_pretrained(cls, model: str, **kwargs: Any) -> dict[str, Any]:
        """The settings as a dict: those of every run. Extend it with a section of your own."""
        fields = cls.config_class.model_fields
        return {"model": model, **{name: value for name, value in kwargs.items() if name in fields}}

    # What an author defines

    def _train_step(self, batch: Sequence[Row]) -> Mapping[str, Any]:
        """One step on these rows; returns metrics, ``loss`` among them. By default: one update on ``_compute_loss``."""
        return self.update(self.encode(batch))

    def _compute_loss(self, batch: TokenBatch, outputs: Tensor) -> Any:
        """A scalar, or a scalar and metrics. Sum ``per_token * batch.loss_weights``, whose weights add up to 1.

        It runs in a trainer made anew from the config wherever the model is, so it may use what ``__init__`` sets and
        nothing of the run.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define _compute_loss(batch, outputs), which update() uses"
        )

    # What an author uses

    @property
    def policy(self) -> TrainingPolicy:
        """The policy that learns: ``get_logprobs(tokens)`` and the like."""
        policy: TrainingPolicy = self.run.policy
        return policy

    def encode(self, rows: Sequence[Row]) -> TokenBatch:
        """Rows with ``messages``, or ``prompt`` and ``response``, as one ragged batch: responses are trained on."""
        from nemorl_tensors import TokenBatch

        limit = self.config.policy.max_sequence_tokens
        encoded = [encode_row(row, self.tokenizer).cut(limit) for row in rows]
        media = [item for row in encoded for item in row.media]
        return TokenBatch.from_sequences([row.ids for row in encoded], [row.mask for row in encoded], media=media)

    def update(self, tokens: TokenBatch) -> dict[str, float]:
        """One optimizer step on ``_compute_loss``; returns ``loss``, ``grad_norm``, ``lr`` and the loss's metrics."""
        with self.run.timer.phase("policy_training"):
            return values(self.run.policy.train_step(tokens, GuideLoss(type(self), self.config)))

    # What the kernel calls

    @property
    def batch_size(self) -> int:
        return self.config.batch_size

    def setup(self) -> None:
        self.tokenizer = Tokenizer.of(self.config.policy)

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        metrics = self._train_step(rows)
        if not isinstance(metrics, Mapping):
            name = f"{type(self).__name__}._train_step"
            raise UsageError(f"{name} returned {metrics!r:.60}, not a dict", fix='return {"loss": …} and other metrics')
        return {name: Mean(float(value)) for name, value in metrics.items()}


@dataclass(frozen=True)
class GuideLoss:
    """A trainer's ``_compute_loss`` as the kernel's loss. It travels as class and config, never with the trainer."""

    requires: ClassVar[frozenset[str]] = frozenset()

    trainer: type[BaseTrainer]
    config: GuideConfig

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        result = self.trainer(self.config)._compute_loss(batch, policy_logprobs)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        return loss, {name: Mean(float(value)) for name, value in metrics.items()}


class AlgorithmRegistry(Mapping[str, type[Any]]):
    """Algorithm name -> trainer class. Assigning registers a trainer, for ``train(algorithm=…)`` and configs."""

    def __setitem__(self, name: str, trainer: type[Any]) -> None:
        register_algorithm(name)(trainer)

    def __getitem__(self, name: str) -> type[Any]:
        if name not in set(self):
            raise KeyError(name)
        config_class = registry().load("algorithms", name)
        loaded: type[Any] = EntryPoint(name, config_class.trainer, "nemorl").load()
        return loaded

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(entry.name for entry in registry().index.of_kind("algorithms")))

    def __len__(self) -> int:
        return len(list(iter(self)))


ALGORITHM_REGISTRY = AlgorithmRegistry()
"""A view of nemorl's registry; it holds nothing itself."""


def _sections(config_class: type[GuideConfig], config: Mapping[str, Any]) -> list[str]:
    return [name for name in config if name not in config_class.model_fields]


def _keys(section: Any) -> list[str]:
    return list(section) if isinstance(section, Mapping) else []


def _validated(config_class: type[GuideConfig], config: Mapping[str, Any]) -> GuideConfig:
    """The guide's dict as a config: unknown keys are sections of the trainer's own."""
    own = {name: config[name] for name in _sections(config_class, config)}
    known = {name: value for name, value in config.items() if name not in own}
    custom = {**(known.pop("custom", None) or {}), **own}
    return validate(config_class, {**known, "custom": custom}, source=config_class.__name__)
