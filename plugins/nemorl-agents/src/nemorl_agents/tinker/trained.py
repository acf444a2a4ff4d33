"""Models of a Tinker server on nemorl's engines: adapters on one base, and samples from snapshots of them.

A training backend holds the base once, and the adapter of one model at a time in place (``SharedBase`` in
``nemorl.contracts``). A generator holds the versions of the weights that it was given last. One of whole weights is
given a snapshot by the trainer, which puts it in place and hands its weights over; one of adapters reads the
snapshot's files, so that it samples while the trainer trains.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from nemorl.base.files.atomic import replace_text
from nemorl.config.cluster import ClusterConfig
from nemorl.config.load import validate
from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.contracts import AdamStep, AdaptedModules, AdapterBackend, AdapterShape, Loss, SharedBase, TrainingBackend
from nemorl.contracts.workers import ReferringGroup, WorkerGroup
from nemorl.errors import UsageError
from nemorl.metrics import values
from nemorl.resources.manager import LocalLauncher
from nemorl.resources.worker import TrainingFactory, WorkerContext
from nemorl.weights import IN_PROCESS, WeightHandle
from nemorl_rl.data.tokenizer import Tokenizer, context_tokens
from nemorl_rl.models.hub_models import require_model
from nemorl_rl.placement.halved_policy import HalvedPolicy
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_trust.site_check import require_engine

from nemorl_agents.tinker.adapter_files import AdapterFiles, adapted_modules
from nemorl_agents.tinker.batches import ClientBatch, client_batch
from nemorl_agents.tinker.flight.recorder import FlightRecorder
from nemorl_agents.tinker.losses import ClientLoss
from nemorl_agents.tinker.models import (
    STATE,
    Base,
    Datum,
    ModelSettings,
    NewModel,
    Passed,
    Sampled,
    SampleRequest,
)
from nemorl_agents.tinker.snapshots import SnapshotSampler, snapshot_form

POLICY = "policy"
"""The adapter that the backend begins with. It is never trained: in place, it leaves the base as it is."""
SAMPLED = "sampled"
"""The adapter that snapshots are put into. Ids of models have a colon."""
ALPHA = 32.0
SHAPE = "shape.json"
ADAPTER = "adapter"
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def trained_models(settings: ModelSettings) -> Iterator[TrainedModels]:
    """The base loaded, for training and sampling, in this process.

    Raises:
        ConfigError: There is no such model, or it cannot be trained or sampled from so.
        UsageError: The site does not admit it, or the engine holds one version of the weights.
    """
    generation = validate(GenerationConfig, dict(settings.generation), source="serve")
    require_engine(settings.model, generation.backend)
    form = snapshot_form(generation)
    require_model(settings.model)
    limit = min(settings.max_sequence_tokens, context_tokens(settings.model) or settings.max_sequence_tokens)
    text = read_model_config(PolicyConfig(model_name=settings.model)).get_text_config()
    fields = {
        "model_name": settings.model,
        "precision": settings.precision,
        "max_sequence_tokens": limit,
        # Engines that apply adapters do so to linear layers of the body alone.
        "lora": {
            "rank": settings.largest_rank,
            "alpha": ALPHA,
            "head": not text.tie_word_embeddings and form == "model",
        },
    }
    policy = validate(PolicyConfig, fields, source="serve")
    context = WorkerContext(device=ClusterConfig().device)
    launcher = LocalLauncher(context)
    group = launcher.training_group(TrainingFactory(policy), "the Tinker server's trainer")
    try:
        with snapshot_sampler(generation, policy, group) as sampler:
            yield TrainedModels(settings.name, policy, group, sampler)
    finally:
        group.shutdown()


def recorded(models: TrainedModels) -> FlightRecorder:
    """What keeps the loops of these models."""
    return FlightRecorder(models.config, models.generation, Tokenizer.of(models.config).decode)


def snapshot_sampler(generation: GenerationConfig, policy: PolicyConfig, group: WorkerGroup) -> SnapshotSampler:
    """What samples from snapshots: an engine that holds whole models, or one over the base that holds adapters.

    Args:
        generation: The engine.
        policy: Of the base; its adapter is the largest that can be made.
        group: The training backend's workers.
    """
    files = _adapter_files(group, policy) if snapshot_form(generation) == "adapters" else None
    return SnapshotSampler(generation, policy, files)


def _adapter_files(group: WorkerGroup, policy: PolicyConfig) -> AdapterFiles:
    assert policy.lora is not None, "the policy has adapters"
    factors = {name: factor for part in group.call(AdapterBackend.export_adapters)[0] for name, factor in part.items()}
    base = {name: torch.zeros_like(factor, device="cpu") for name, factor in factors.items()}
    lora = policy.lora.model_copy(update={"target_modules": adapted_modules(base)})
    return AdapterFiles(lora, base)


def _one_at_a_time(
    verb: Callable[Concatenate[TrainedModels, P], T],
) -> Callable[Concatenate[TrainedModels, P], T]:
    """A verb of the trainer: another thread that samples may need it too."""

    @wraps(verb)
    def alone(self: TrainedModels, /, *args: P.args, **named: P.kwargs) -> T:
        with self._trainer:
            return verb(self, *args, **named)

    return alone


class TrainedModels:
    """``Models`` over a worker group of one training backend."""

    def __init__(
        self,
        name: str,
        policy: PolicyConfig,
        group: ReferringGroup,
        sampler: SnapshotSampler,
    ) -> None:
        """
        Args:
            name: Of the base, as clients ask for it.
            policy: Of the base; its adapter is the largest that can be made.
            group: The training backend's workers.
            sampler: What samples from snapshots.
        """
        self._group, self._policy, self._sampler = group, HalvedPolicy(group), sampler
        self._trainer = threading.RLock()
        self.samples_apart = sampler.files is not None
        text = read_model_config(policy).get_text_config()
        self.ties_head: bool = text.tie_word_embeddings
        self._base = Base(name, policy.max_sequence_tokens, tokenizer=str(policy.model_name))
        self._vocabulary: int = text.vocab_size
        self.config, self.generation = policy, sampler.config
        lora = policy.lora
        assert lora is not None, "the policy has adapters"
        self.adapts_head = lora.head
        """Where the head is the embedding it stays as it is, whatever ``train_unembed`` says."""
        factors = (tensor for part in group.call(AdapterBackend.export_adapters)[0] for tensor in part.values())
        self.adapter_bytes = 4 * sum(factor.nbytes for factor in factors)
        """Of one in use, of the largest rank: weights, gradients and two moments, in float32."""
        self._in_place = POLICY
        self._shapes: dict[str, AdapterShape] = {}
        self._passes: dict[str, list[tuple[TokenBatch, Loss]]] = defaultdict(list)
        """Of each model since its last update, to be made again should one fail midway."""

    @property
    def bases(self) -> Sequence[Base]:
        return [self._base]

    @_one_at_a_time
    def create(self, model_id: str, new: NewModel) -> None:
        if new.train_unembed and not self.adapts_head and not self.ties_head:
            raise UsageError(
                "train_unembed: the engine that samples applies no adapters to output heads",
                fix="pass train_unembed=False to create_lora_training_client, or serve with --backend hf",
            )
        asked: dict[AdaptedModules, bool] = {
            "attention": new.train_attn,
            "mlp": new.train_mlp,
            "head": new.train_unembed and self.adapts_head,
        }
        modules = frozenset(name for name, is_asked in asked.items() if is_asked)
        if not modules:
            raise UsageError("an adapter that adapts nothing cannot learn", fix="set train_attn or train_mlp")
        self._add(model_id, AdapterShape(new.rank, ALPHA, new.seed, modules))

    @_one_at_a_time
    def forward(self, model_id: str, data: Sequence[Datum], loss: Loss) -> Passed:
        made = self._batch(data, loss)
        self._use(model_id)
        metrics, outputs = self._policy.forward(made.batch, made.loss)
        return Passed(made.logprobs(outputs), _of_client(values(metrics)))

    @_one_at_a_time
    def forward_backward(self, model_id: str, data: Sequence[Datum], loss: Loss) -> Passed:
        made = self._batch(data, loss)
        self._use(model_id)
        try:
            metrics, outputs = self._policy.forward_backward(made.batch, made.loss)
        except Exception:
            self._policy.clear_gradients()
            for batch, earlier in self._passes[model_id]:
                self._policy.forward_backward(batch, earlier)
            raise
        self._passes[model_id].append((made.batch, made.loss))
        return Passed(made.logprobs(outputs), _of_client(values(metrics)))

    @_one_at_a_time
    def use(self, model_id: str) -> None:
        """Put an adapter in place."""
        self._use(model_id)

    @_one_at_a_time
    def step(self, model_id: str, adam: AdamStep) -> dict[str, float]:
        if adam.eps <= 0:
            raise UsageError(f"eps is {adam.eps}: weights without a gradient would be divided by 0", fix="send 1e-12")
        self._use(model_id)
        made = self._policy.optimizer_step(adam)
        self._passes.pop(model_id, None)
        return values(made)

    @_one_at_a_time
    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        self._use(model_id)
        self.snapshot(model_id, folder / ADAPTER)
        if optimizer:
            (folder / STATE).mkdir(parents=True)
            self._group.call(TrainingBackend.save_checkpoint, folder / STATE)

    @_one_at_a_time
    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        saved = _shape_of(folder / ADAPTER)
        own = self._shapes[model_id]
        if (saved.rank, saved.modules) != (own.rank, own.modules):
            raise UsageError(f"{folder} has an adapter of rank {saved.rank}, and {model_id} is of rank {own.rank}")
        self._use(model_id)
        self._group.call(SharedBase.load_adapter, folder / ADAPTER)
        if optimizer:
            self._group.call(TrainingBackend.load_checkpoint, folder / STATE)
        self._passes.pop(model_id, None)

    @_one_at_a_time
    def snapshot(self, model_id: str, folder: Path) -> None:
        self._use(model_id)
        folder.mkdir(parents=True, exist_ok=True)
        self._group.call(AdapterBackend.save_adapters, folder)
        shape = self._shapes[model_id]
        facts = {"rank": shape.rank, "alpha": shape.alpha, "seed": shape.seed, "modules": sorted(shape.modules)}
        replace_text(folder / SHAPE, json.dumps(facts) + "\n")

    def sample(self, base: str, snapshot: Path | None, requests: Sequence[SampleRequest]) -> list[Sampled]:
        def weights(version: int) -> WeightHandle:
            if self._sampler.files is None:
                self._put_in_place(snapshot)
                return self._group.publish(IN_PROCESS, version)
            if snapshot is None:
                return self._sampler.files.base_handle(version)
            return self._sampler.files.handle(snapshot, _shape_of(snapshot), version)

        found = self._sampler.sample(None if snapshot is None else str(snapshot), requests, weights)
        if any(request.topk_prompt_logprobs or request.topk_sample_logprobs for request in requests):
            with self._trainer:
                self._put_in_place(snapshot)
                return [self._sampler.with_likeliest(self._policy, *pair) for pair in zip(requests, found, strict=True)]
        return found

    @_one_at_a_time
    def free(self, model_id: str) -> None:
        if self._shapes.pop(model_id, None) is not None:
            self._remove(model_id)
        self._passes.pop(model_id, None)

    def _batch(self, data: Sequence[Datum], loss: Loss) -> ClientBatch:
        assert isinstance(loss, ClientLoss), "losses are found by their names"
        limit = self._base.max_context_tokens
        for number, datum in enumerate(data):
            if len(datum.token_ids) >= limit:
                raise UsageError(
                    f"data[{number}] has {len(datum.token_ids)} tokens, and {self._base.name} is served with {limit}",
                    fix="send shorter ones, or serve it with a larger --max-sequence-tokens",
                )
        return client_batch(data, loss, vocabulary=self._vocabulary)

    def _put_in_place(self, snapshot: Path | None) -> None:
        if snapshot is None:
            self._use(POLICY)
            return
        if SAMPLED in self._shapes:
            self._remove(SAMPLED)
        self._add(SAMPLED, _shape_of(snapshot))
        self._use(SAMPLED)
        self._group.call(SharedBase.load_adapter, snapshot)

    def _add(self, name: str, shape: AdapterShape) -> None:
        self._group.call(SharedBase.add_adapter, name, shape)
        self._shapes[name] = shape

    def _use(self, name: str) -> None:
        if name != self._in_place:
            self._group.call(SharedBase.use_adapter, name)
            self._in_place = name

    def _remove(self, name: str) -> None:
        self._group.call(SharedBase.remove_adapter, name)
        if name == self._in_place:
            self._in_place = POLICY


def _shape_of(folder: Path) -> AdapterShape:
    facts = json.loads((folder / SHAPE).read_text())
    return AdapterShape(facts["rank"], facts["alpha"], facts["seed"], frozenset(facts["modules"]))


def _of_client(metrics: dict[str, float]) -> dict[str, float]:
    """Those of the loss: clients merge metrics by the reduction that their names end with."""
    return {name: number for name, number in metrics.items() if ":" in name}
