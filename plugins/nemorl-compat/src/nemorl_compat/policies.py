"""Policies, engines and environments that a program drives by hand, as the API page composes them.

    policy = HuggingFacePolicy(model_name=…)        generations = policy.generate(batch)
    environment = MathEnvironment()                 rewards = environment.step(generations)
    dataloader = BatchedDataLoader(dataset)         policy.train(generations, rewards)

Over nemorl's real parts: a batch is a list of rows, generations are ``nemorl.types.Samples``, and ``train`` is one
optimizer step. What a run adds (validation, checkpoints, resume, metrics) is absent, so this is for experiments.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import nemorl
from nemorl.config import ClusterConfig, GenerationConfig, PolicyConfig, RunConfig
from nemorl.config.load import validate
from nemorl.contracts import DataSource
from nemorl.errors import DataError, UsageError
from nemorl.metrics import Metrics, values
from nemorl.resources.policies import TrainingPolicy
from nemorl.run import TrainResult
from nemorl.trainer import BaseTrainer
from nemorl.types import Row, Samples
from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.data.rows import RowDataModule, rows_of
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool, Unscored
from nemorl_rl.environments.sources import as_environment
from nemorl_rl.placement.engines import GenerationFactory, RolloutResources, standalone_generation
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan
from nemorl_rl.rollouts.prompts import to_prompts
from nemorl_rl.rollouts.seeding import derive_seed
from nemorl_rl.serving.generation_policy import GenerationPolicy

if TYPE_CHECKING:
    from nemorl.resources.ray_cluster import RayVirtualCluster
    from nemorl_tensors import TokenBatch
    from torch import Tensor

UPDATES = 1_000_000
"""Length of a learning-rate decay where nobody knows how often ``train`` will be called."""


class PolicyInterface(ABC):
    """Something that generates and learns."""

    @abstractmethod
    def generate(self, batch: Sequence[Row]) -> Any:
        """One response to each row."""

    @abstractmethod
    def train(self, batch: Any, loss_fn: Any) -> Any:
        """One optimizer step."""


class _Speaker:
    """Rows to responses over one generation policy; each call draws from seeds of its own."""

    def __init__(self, policy: GenerationPolicy, model: PolicyConfig, generation: GenerationConfig) -> None:
        self.tokenizer, limit = Tokenizer.of(model), model.max_sequence_tokens
        self._pool = EnvironmentPool(Unscored())
        self._engine = RolloutEngine(policy, self._pool, self.tokenizer, max_sequence_tokens=limit)
        sampling = generation.sampling(routes="routes" in model.backend.asks_of_sampler)
        self._plan = RolloutPlan(1, sampling)
        self._calls = 0

    def __call__(self, batch: Sequence[Row]) -> Samples:
        self._calls += 1
        return self._engine.collect(to_prompts(batch, self.tokenizer), self._plan, seed=derive_seed(0, self._calls))


class HuggingFacePolicy(PolicyInterface):
    """A model that generates and learns in this process. It is loaded when it is first used; ``close`` releases it."""

    backend: ClassVar[str] = "dtensor"

    def __init__(self, model_name: str, *, generation: Mapping[str, Any] | None = None, **policy: Any) -> None:
        """
        Args:
            model_name: Hugging Face name or local folder.
            generation: Fields of ``nemorl.GenerationConfig``.
            **policy: Fields of ``nemorl.PolicyConfig``.
        """
        settings = {"model_name": model_name, "backend": self.backend, **policy}
        self.config = validate(
            RolloutRunConfig,
            {"policy": settings, "generation": dict(generation or {}), "cluster": {"launcher": "local"}},
            source=type(self).__name__,
        )
        self._stack = ExitStack()
        self._version = 0

    def generate(self, batch: Sequence[Row]) -> Samples:
        """One response to each row, from the current weights."""
        return self._speak(batch)

    def train(self, batch: Any, loss_fn: Any) -> dict[str, float]:
        """One optimizer step; the next ``generate`` uses the new weights.

        Args:
            batch: Generations, or a ``TokenBatch``.
            loss_fn: The reward of each generation: a step of REINFORCE, with the mean reward as the baseline. Or a
                loss of a ``TokenBatch`` (``nemorl.contracts.Loss``).

        Returns:
            ``loss``, ``grad_norm``, ``lr``, and ``reward`` where there are any.
        """
        _, training, generation = self._parts
        if callable(loss_fn):
            metrics = values(training.train_step(batch, loss_fn))
        else:
            rewards = [float(reward) for reward in loss_fn]
            metrics = values(training.train_step(self._to_batch(batch, rewards), ReinforceLoss()))
            metrics["reward"] = sum(rewards) / len(rewards)
        self._version += 1
        generation.update_weights(self._parts[0].weight_handle(self._version))
        return metrics

    def get_logprobs(self, batch: TokenBatch) -> Tensor:
        """[N] float32 nats of each token."""
        return self._parts[1].get_logprobs(batch)

    def save_pretrained(self, path: Path | str) -> None:
        """Write a Hugging Face model folder."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self._parts[1].save_pretrained(Path(path))

    def close(self) -> None:
        self._stack.close()

    @cached_property
    def _parts(self) -> tuple[RolloutResources, TrainingPolicy, GenerationPolicy]:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="nemorl-policy-"))
        resources = RolloutResources(self.config, Path(folder))
        self._stack.callback(resources.close)
        return resources, resources.training_policy(UPDATES), resources.generation_policy()

    @cached_property
    def _speak(self) -> _Speaker:
        policy = self.config.policy
        return _Speaker(self._parts[2], policy, self.config.generation)

    def _to_batch(self, samples: Any, rewards: Sequence[float]) -> TokenBatch:
        from nemorl_tensors import TokenBatch

        if not isinstance(samples, Samples) or len(samples) != len(rewards):
            raise UsageError(
                f"train was given {len(rewards)} reward(s) for a {type(samples).__name__} of {len(samples)}",
                fix="pass what generate() returned, and one reward for each",
            )
        mean = sum(rewards) / len(rewards)
        advantages = [reward - mean for reward in rewards]
        return TokenBatch.from_samples(samples, advantages, temperature=self.config.generation.temperature)


class MegatronPolicy(HuggingFacePolicy):
    """The same on the training backend ``megatron``, of ``nemorl-megatron``."""

    backend = "megatron"


@dataclass(frozen=True)
class ReinforceLoss:
    """loss = -sum(loss_weights * advantages * policy_logprobs)                    REINFORCE (Williams, 1992)"""

    requires: ClassVar[frozenset[str]] = frozenset({"advantages"})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        credited = (policy_logprobs * batch["advantages"]).where(batch.mask, 0.0)
        return -(credited * batch.loss_weights).sum(), {}


class VllmGeneration:
    """An engine that only generates, from the weights on disk or those of ``update_weights``."""

    def __init__(self, cluster: RayVirtualCluster | None, config: Mapping[str, Any]) -> None:
        """
        Args:
            cluster: Places for engines, one on each. ``None``: one engine in this process.
            config: ``model_name``, fields of ``nemorl.GenerationConfig`` and, under ``policy``, of ``PolicyConfig``.
                The backend is ``vllm`` unless it names another.
        """
        given = dict(config)
        model = {"model_name": given.pop("model_name", ""), **given.pop("policy", {})}
        policy = validate(PolicyConfig, model, source="VllmGeneration")
        generation = validate(GenerationConfig, {"backend": "vllm", **given}, source="VllmGeneration")
        start = standalone_generation if cluster is None else partial(_on_cluster, cluster)
        self._policy = start(generation, policy)
        self._speak = _Speaker(self._policy, policy, generation)

    def generate(self, batch: Sequence[Row]) -> Samples:
        """One response to each row."""
        return self._speak(batch)

    def close(self) -> None:
        self._policy.shutdown()


def _on_cluster(cluster: RayVirtualCluster, generation: GenerationConfig, policy: PolicyConfig) -> GenerationPolicy:
    from nemorl.resources.ray_ranks import GroupSettings
    from nemorl.resources.ray_workers import RayWorkerGroup

    settings = GroupSettings(name="generation", is_spmd=False)
    return GenerationPolicy(RayWorkerGroup(cluster, GenerationFactory(generation, policy, None), settings=settings))


class MathEnvironment:
    """The installed ``math`` environment, stepped by hand. Rows need an ``answer``."""

    environment: ClassVar[str] = "math"

    def __init__(self, **options: Any) -> None:
        """
        Args:
            **options: Those of the environment (``nemorl plugins show math``).
        """
        found = as_environment({"name": self.environment, **options})
        assert found is not None, "a name always makes an environment"
        self._pool = EnvironmentPool(found)

    def step(self, generations: Samples) -> list[float]:
        """The reward of each generation."""
        episodes = [self._pool.start(sample.prompt) for sample in generations]
        steps = self._pool.step(episodes, [sample.response for sample in generations])
        return [step.score.reward for step in steps]

    def close(self) -> None:
        self._pool.close()


class BatchedDataLoader:
    """One pass over a dataset in shuffled batches of rows; each iteration is the next pass."""

    def __init__(self, dataset: DataSource, batch_size: int = 32, *, seed: int = 0) -> None:
        """
        Args:
            dataset: Whatever ``nemorl.train`` takes but a ``DataModule``.
            batch_size: Rows per batch; what does not fill the last one comes in the next pass.
            seed: Of the order.
        """
        rows = rows_of(dataset, "train")
        if rows is None:
            raise DataError("the dataset has no train split", fix="check its options")
        self._data = RowDataModule(rows, batch_size, seed=seed)

    def __len__(self) -> int:
        return self._data.steps(1)

    def __iter__(self) -> Iterator[list[Row]]:
        for _ in range(len(self)):
            yield self._data.next_batch()


class _Pipeline:
    """Lets a trainer be made of a policy and a cluster; it has ``train(dataset)`` as another name for ``fit``."""

    config_class: ClassVar[type[RunConfig]]
    fit: Callable[..., TrainResult]

    def __init__(self, config: RunConfig | HuggingFacePolicy, cluster: RayVirtualCluster | None = None) -> None:
        """
        Args:
            config: The trainer's config, or a policy whose model and settings to train with.
            cluster: Where to, with a policy. The run reserves these places itself: the cluster gives them back.
        """
        self._cluster = cluster
        if isinstance(config, HuggingFacePolicy):
            given = config.config
            samples = issubclass(self.config_class, RolloutRunConfig)
            engine: Any = {"generation": given.generation} if samples else {}
            places = _places(cluster) if cluster else given.cluster
            config = self.config_class(policy=given.policy, cluster=places, **engine)
        super().__init__(config)  # type: ignore[call-arg]

    def train(self, dataset: DataSource, *args: Any, **options: Any) -> TrainResult:
        """:meth:`nemorl.BaseTrainer.fit`."""
        if self._cluster is not None:
            self._cluster.shutdown()
        return self.fit(dataset, *args, **options)


def _places(cluster: RayVirtualCluster) -> ClusterConfig:
    """The config of a run on as many places as a cluster has."""
    counts = [sum(place.node == node for place in cluster.places) for node in range(cluster.places[-1].node + 1)]
    if len(set(counts)) > 1:
        raise UsageError(f"nodes with {counts} places cannot train together", fix="use as many on each node")
    kind = "gpus_per_node" if cluster.config.uses_gpus else "workers_per_node"
    return cluster.config.model_copy(update={"launcher": "ray", "num_nodes": len(counts), kind: counts[0]})


def __getattr__(name: str) -> Any:
    """``DPOTrainer`` and its like: the installed trainer, which can also be made of a policy and a cluster."""
    trainer = getattr(nemorl, name, None) if name.endswith("Trainer") and name != "BaseTrainer" else None
    if not (isinstance(trainer, type) and issubclass(trainer, BaseTrainer)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(name, (_Pipeline, trainer), {"__module__": __name__, "__doc__": trainer.__doc__})
