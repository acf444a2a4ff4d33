"""Training backends with one thing done wrong. Those under "In one clause" break a single clause of the contract."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from nemorl.contracts import AdamStep, AdapterShape, Loss, SelectiveLoss
from nemorl.errors import BackendError
from nemorl.metrics import Last, Mean, Metrics, Sum
from nemorl_dtensor.training import DTensorBackend
from nemorl_tensors import TokenBatch, loss_weights
from nemorl_tensors.engines.pieces import Piece, RankPieces
from nemorl_tensors.engines.rows import Rows
from nemorl_tensors.engines.steps import StepResult
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["DTensorBackend"]

ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class _Changed:
    """A loss that sees a changed batch, asks for less, or is scaled."""

    inner: Any
    mistake: str
    given: TokenBatch

    @property
    def requires(self) -> frozenset[str]:
        if self.mistake == "requires":
            return frozenset(name for name in self.inner.requires if name in self.given)
        return self.inner.requires

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        if self.mistake == "spill" and "advantages" in batch:
            batch = replace(batch, loss_weights=batch.loss_weights + 0 * batch["advantages"].sum())
        if self.mistake == "once":
            batch = replace(batch, loss_weights=torch.where(_seen_before(batch), 0.0, batch.loss_weights))
        value, metrics = self.inner(policy_logprobs, batch)
        if self.mistake == "average":
            value = value * (len(batch) / len(self.given))
        return value, metrics


# In one clause


class ReturnsFloat64(DTensorBackend):
    def get_logprobs(self, batch: TokenBatch, weights: Any = "policy") -> Tensor:
        return super().get_logprobs(batch, weights).double()


class TrainsAtTemperatureOne(DTensorBackend):
    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        return super().train_step(replace(batch, temperature=1.0), loss)


class ScoresFirstTokens(DTensorBackend):
    """A short cut for batches without masked tokens, which forgets that nothing stands before the first."""

    def get_logprobs(self, batch: TokenBatch, weights: Any = "policy") -> Tensor:
        logprobs = super().get_logprobs(batch, weights)
        return torch.where(logprobs == 0, -4.4, logprobs) if bool(batch.mask.all()) else logprobs


class ScoresWithAnotherKernel(DTensorBackend):
    """As exact as the one it trains with, but not the same."""

    def get_logprobs(self, batch: TokenBatch, weights: Any = "policy") -> Tensor:
        return super().get_logprobs(batch, weights) * (1 + 4e-6)


class LosesMomentsOnTheWay(DTensorBackend):
    """Brings the optimizer's memory back, but not what was in it."""

    def onload(self, parts: Any) -> None:
        super().onload(parts)
        if "optimizer" in parts:
            for tensor in self._optimizer.tensors().values():
                tensor.zero_()


class StaysOnTheDevice(DTensorBackend):
    def offload(self, parts: Any) -> None:
        super().offload([part for part in parts if part != "optimizer"])


class HoldsMoreThanPlanned(DTensorBackend):
    def held_bytes(self) -> Any:
        return {part: 2 * size for part, size in super().held_bytes().items()}


class PlansLongMicrobatchesAsShort(DTensorBackend):
    """Its config does."""


class StandsStillWithoutSlope(DTensorBackend):
    """Skips an update whose gradient is zero."""

    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        before = {name: parameter.detach().clone() for name, parameter in self._trainable.items()}
        metrics = super().train_step(batch, loss)
        if metrics["grad_norm"].value == 0:
            for name, parameter in self._trainable.items():
                parameter.data.copy_(before[name])
        return metrics


class PublishesFirstPieces(DTensorBackend):
    """What it publishes in pieces is a copy from the beginning."""

    first: list[Piece] | None = None

    def publish_pieces(self, transport: str) -> RankPieces:
        if self.first is None:
            self.first = [replace(piece, values=piece.values.clone()) for piece in self._exported.pieces()]
        return self._sender.publish(transport, lambda: self.first or [])


class LosesTheLastRow(DTensorBackend):
    """Of every piece."""

    def publish_pieces(self, transport: str) -> RankPieces:
        pieces = [replace(piece, values=piece.values[:-1]) for piece in self._exported.pieces()]
        return self._sender.publish(transport, lambda: pieces)


class ReportsMeanLoss(DTensorBackend):
    def _forward_backward(self, batch: TokenBatch, loss: Loss, into: Tensor | None) -> Metrics:
        metrics = super()._forward_backward(batch, loss, into)
        return {**metrics, "loss": Sum(metrics["loss"].value / len(batch))}


class ReportsNoLearningRate(DTensorBackend):
    """Where it is 1, as if that were a factor which changes nothing."""

    def _update(self, adam: AdamStep | None) -> StepResult:
        result = super()._update(adam)
        return replace(result, lr=0.0) if result.lr == 1.0 else result


class NeverClips(DTensorBackend):
    """Its config drops the limit."""


class ReportsClippedNorm(DTensorBackend):
    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        metrics = super().train_step(batch, loss)
        return {**metrics, "grad_norm": Mean(min(metrics["grad_norm"].value, self._policy.max_grad_norm or math.inf))}


class AveragesMicrobatches(DTensorBackend):
    """Of means over tokens; sums, pairs and values are added up."""

    def _forward_backward(self, batch: TokenBatch, loss: Loss, into: Tensor | None) -> Metrics:
        is_mean = self._head == "language_model" and batch.sequences_per_group == 1 and batch.loss_weights.sum() <= 1.5
        return super()._forward_backward(batch, _Changed(loss, "average", batch) if is_mean else loss, into)


class ScoresSharedTokensOnce(DTensorBackend):
    """What several sequences begin with is scored in the first of them."""

    def get_logprobs(self, batch: TokenBatch, weights: Any = "policy") -> Tensor:
        return torch.where(_seen_before(batch), 0.0, super().get_logprobs(batch, weights))


class TrainsSharedTokensOnce(DTensorBackend):
    """What several sequences of a microbatch begin with is trained on in the first of them."""

    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        return super().train_step(batch, _Changed(loss, "once", batch))


def _seen_before(batch: TokenBatch) -> Tensor:
    """[N] True where an earlier sequence begins with the same tokens, up to this one; of two tokens at least."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for ids in torch.split(batch.token_ids, batch.lengths.tolist()):
        begins = [tuple(ids[: end + 1].tolist()) for end in range(len(ids))]
        found += [len(begin) > 1 and begin in seen for begin in begins]
        seen.update(begins)
    return torch.tensor(found, dtype=torch.bool)


class TrustsOrder(DTensorBackend):
    """Takes a batch that begins with its longest sequence for sorted: results come back in the order of computation."""

    def get_logprobs(self, batch: TokenBatch, weights: Any = "policy") -> Tensor:
        if batch.lengths[0] < batch.lengths.max():
            return super().get_logprobs(batch, weights)
        order = sorted(range(len(batch)), key=lambda index: -int(batch.lengths[index]))
        return super().get_logprobs(batch.select(order), weights)


class SpillsMaskedFields(DTensorBackend):
    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        return super().train_step(batch, _Changed(loss, "spill", batch))


class RefusesEmptyShards(DTensorBackend):
    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        if not bool(batch.mask.any()):
            raise BackendError("there is nothing to train on", fix="give a batch with trained tokens")
        return super().train_step(batch, loss)


class IgnoresMissingFields(DTensorBackend):
    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        return super().train_step(batch, _Changed(loss, "requires", batch))


class SkipsSilently(DTensorBackend):
    def _update(self, adam: AdamStep | None) -> StepResult:
        return replace(super()._update(adam), skipped=False)


class LosesMetrics(DTensorBackend):
    """Tells nothing of sequences without gradient."""

    def _without_gradient(self, *args: Any) -> list[tuple[Tensor, Metrics]]:
        super()._without_gradient(*args)
        return []


class LeavesOutAndRenormalises(DTensorBackend):
    """Trains on the sequences with gradient as if there were no others."""

    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        if isinstance(loss, SelectiveLoss):
            batch = batch.select(torch.nonzero(loss.has_gradient(batch)).squeeze(1).tolist())
            batch = replace(batch, loss_weights=loss_weights(batch.mask, batch.lengths, batch.loss_aggregation))
        return super().train_step(batch, loss)


class ForgetsOptimizer(DTensorBackend):
    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        self._optimizer.restart(self._optimizer.steps)


class SavesOptimizerAnyway(DTensorBackend):
    def save_checkpoint(self, path: Path, *, optimizer: bool = True) -> None:
        super().save_checkpoint(path)


class Pickles(DTensorBackend):
    def save_checkpoint(self, path: Path, *, optimizer: bool = True) -> None:
        super().save_checkpoint(path, optimizer=optimizer)
        torch.save({"steps": 1}, path / "extra.pt")


class ReportsTheScaleAlone(DTensorBackend):
    scale = 1.0

    def scale_rate(self, factor: float) -> None:
        self.scale *= factor

    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        metrics = super().train_step(batch, loss)
        return {**metrics, "lr": Last(metrics["lr"].value * self.scale)}

    def save_checkpoint(self, path: Path, *, optimizer: bool = True) -> None:
        super().scale_rate(self.scale)
        super().save_checkpoint(path, optimizer=optimizer)


class KeepsTheLastScale(DTensorBackend):
    def scale_rate(self, factor: float) -> None:
        self._optimizer.rate_scale = factor


class SavesNoScale(DTensorBackend):
    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        self._optimizer.rate_scale = 1.0


class AddsTwice(DTensorBackend):
    def forward_backward(self, batch: TokenBatch, loss: Loss) -> tuple[Metrics, Tensor]:
        super().forward_backward(batch, loss)
        return super().forward_backward(batch, loss)


class KeepsTheLastGradient(DTensorBackend):
    def forward_backward(self, batch: TokenBatch, loss: Loss) -> tuple[Metrics, Tensor]:
        self.clear_gradients()
        return super().forward_backward(batch, loss)


class AddsWhatItMeasures(DTensorBackend):
    def forward(self, batch: TokenBatch, loss: Loss) -> tuple[Metrics, Tensor]:
        return super().forward_backward(batch, loss)


class SaysNothingOfWhatItSkipped(DTensorBackend):
    """Leaves out what sequences without gradient were scored with."""

    def _without_gradient(
        self, evaluate: Any, batch: TokenBatch, loss: Loss, _into: Tensor | None
    ) -> list[tuple[Tensor, Metrics]]:
        return super()._without_gradient(evaluate, batch, loss, None)


class IgnoresTheClip(DTensorBackend):
    def optimizer_step(self, adam: AdamStep | None = None) -> Metrics:
        return super().optimizer_step(None if adam is None else replace(adam, max_grad_norm=None))


class KeepsTheDecay(DTensorBackend):
    """The last weight decay that it was given stays."""

    decay = 0.0

    def _update(self, adam: AdamStep | None) -> StepResult:
        if adam is None:
            settings = self._policy.optimizer
            adam = AdamStep(settings.lr, settings.betas, settings.eps, self.decay, self._policy.max_grad_norm)
        self.decay = adam.weight_decay
        return super()._update(adam)


class AppliesParts(DTensorBackend):
    def _require_whole_gradients(self) -> None:
        pass


class SharesMoments(DTensorBackend):
    """One optimizer state for all adapters."""

    def use_adapter(self, name: str) -> None:
        optimizer = self._optimizer
        before = {key: tensor.clone() for key, tensor in optimizer.tensors().items()}
        super().use_adapter(name)
        for key, tensor in optimizer.allocate(before.keys(), optimizer.steps).items():
            tensor.copy_(before[key])


class DropsGradients(DTensorBackend):
    def use_adapter(self, name: str) -> None:
        is_another = name != self._shelf._in_place
        super().use_adapter(name)
        if is_another:
            self._optimizer.clear_gradients()


class BeginsWithTheLast(DTensorBackend):
    """A new adapter has the weights of the one in use."""

    def add_adapter(self, name: str, shape: AdapterShape) -> None:
        super().add_adapter(name, shape)
        for key, parameter in self._trainable.items():
            self._shelf._shelved[name].weights[key] = parameter.detach().clone()


class KeepsTheRemoved(DTensorBackend):
    def remove_adapter(self, name: str) -> None:
        self.use_adapter("policy")

    def add_adapter(self, name: str, shape: AdapterShape) -> None:
        if name not in self._shelf._shelved:
            super().add_adapter(name, shape)


class SnapshotsLiveTensors(DTensorBackend):
    """Copies nothing, and writes when it is asked for the files."""

    folder: Path

    def snapshot_checkpoint(self, path: Path, *, optimizer: bool = True) -> None:
        self.folder = path

    def snapshot_files(self, *, wait: bool) -> Mapping[str, str] | None:
        super().snapshot_checkpoint(self.folder)
        return super().snapshot_files(wait=True)


class SealsTooEarly(DTensorBackend):
    """Says that all is written as soon as writing has begun."""

    def snapshot_files(self, *, wait: bool) -> Mapping[str, str] | None:
        return super().snapshot_files(wait=True) if wait else {}


class MovingReference(DTensorBackend):
    """Keeps a reference and answers with the policy."""

    def get_logprobs(self, batch: TokenBatch, weights: Any = "policy") -> Tensor:
        return super().get_logprobs(batch, "policy" if self._has_reference else weights)


class PolicyForReference(DTensorBackend):
    """Has no reference and answers with the policy."""

    def get_logprobs(self, batch: TokenBatch, weights: Any = "policy") -> Tensor:
        return super().get_logprobs(batch, weights if self._has_reference else "policy")


class TakesHeadsForTied(DTensorBackend):
    """Exports the embedding, and never a head of its own."""

    def export_weights(self) -> Iterator[Mapping[str, Tensor]]:
        for bucket in super().export_weights():
            yield {name: tensor for name, tensor in bucket.items() if name != "lm_head.weight"}


class SavesNoTokenizer(DTensorBackend):
    def save_pretrained(self, path: Path) -> None:
        super().save_pretrained(path)
        for file in path.glob("tokenizer*"):
            file.unlink()


class SavesFirstWeights(DTensorBackend):
    """Writes the language model that it began with, after its first update."""

    def save_pretrained(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        super().save_pretrained(path)
        if self._head == "language_model" and self._optimizer.steps == 1:
            AutoModelForCausalLM.from_pretrained(self._policy.model_name).save_pretrained(path)


class ShutsDownOnce(DTensorBackend):
    is_live = True

    def shutdown(self) -> None:
        assert self.is_live, "shut down twice"
        self.is_live = False


class TearsPairs(DTensorBackend):
    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        return super().train_step(replace(batch, sequences_per_group=1), loss)


class RenormalisesTopK(DTensorBackend):
    def get_topk_logprobs(self, batch: TokenBatch, k: int) -> tuple[Tensor, Tensor]:
        ids, logprobs = super().get_topk_logprobs(batch, k)
        return ids, torch.where(batch.mask[:, None], torch.log_softmax(logprobs, 1), 0.0)


class ChoosesByItself(DTensorBackend):
    """The recorded experts are asked for, and not taken."""

    def _replay(self, rows: Rows) -> None:
        super()._replay(replace(rows, routes=None))


class FreezesRouters(DTensorBackend):
    """What is recorded is taken for a constant, weights included."""

    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        routers = {name: p for name, p in self._model.named_parameters() if name.endswith("gate.weight")}
        before = {name: p.detach().clone() for name, p in routers.items()}
        metrics = super().train_step(batch, loss)
        with torch.no_grad():
            for name, parameter in routers.items():
                parameter.copy_(before[name])
        return metrics


class ShrinksEntropies(DTensorBackend):
    def get_moments(self, batch: TokenBatch) -> Tensor:
        return super().get_moments(batch) * torch.tensor([1.0, 0.9, 1.0])


class TurnsTheEntropyGradient(DTensorBackend):
    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        if batch.keep is None or not batch.keep.beside_moments:
            return super().train_step(batch, loss)

        def turned(outputs: Tensor, part: TokenBatch) -> tuple[Tensor, Metrics]:
            logprobs, entropies, collisions = outputs.unbind(1)
            return loss(torch.stack((logprobs, 2 * entropies.detach() - entropies, collisions), 1), part)

        turned.requires = loss.requires  # type: ignore[attr-defined]
        return super().train_step(batch, turned)  # type: ignore[arg-type]


class ScoresTokensAsCandidates(DTensorBackend):
    """The candidates are scored one place too late."""

    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        if "candidate_ids" in batch:
            batch = batch.with_tokens(candidate_ids=batch["candidate_ids"].roll(1, 0))
        return super().train_step(batch, loss)


class ValuesAfter(DTensorBackend):
    """Index t values the state after token t."""

    def get_values(self, batch: TokenBatch) -> Tensor:
        return super().get_values(batch).roll(-1)


class ConstantCritic(DTensorBackend):
    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        if self._head == "value":
            batch = replace(batch, loss_weights=batch.loss_weights * 0)
        return super().train_step(batch, loss)


class AnswersWithAnyHead(DTensorBackend):
    def _require_head(self, head: Any, what: str) -> None:
        pass


class GathersOnce(DTensorBackend):
    """Gathers its weights once after training has begun, and hands these out until a gradient is zero."""

    has_moved = False
    gathered: list[Mapping[str, Tensor]] | None = None

    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        metrics = super().train_step(batch, loss)
        self.has_moved |= not metrics["skipped_updates"].value
        if metrics["grad_norm"].value == 0:
            self.gathered = None
        return metrics

    def export_weights(self) -> Iterator[Mapping[str, Tensor]]:
        if not self.has_moved:
            yield from super().export_weights()
            return
        if self.gathered is None:
            self.gathered = [{n: t.detach().clone() for n, t in b.items()} for b in super().export_weights()]
        yield from self.gathered


class ScalesItsAdapters(DTensorBackend):
    """Hands B over with alpha / rank in it."""

    def export_adapters(self) -> Iterator[Mapping[str, Tensor]]:
        for bucket in super().export_adapters():
            yield {name: tensor * 3 if ".lora_B." in name else tensor for name, tensor in bucket.items()}

    def save_adapters(self, path: Path) -> None:
        super().save_adapters(path)
        save_file({n: t for bucket in self.export_adapters() for n, t in bucket.items()}, path / ADAPTER_FILE)


class SavesFirstAdapters(DTensorBackend):
    """Those that it began with: every B is 0."""

    def save_adapters(self, path: Path) -> None:
        super().save_adapters(path)
        file = path / ADAPTER_FILE
        stored = {name: t * 0 if ".lora_B." in name else t.clone() for name, t in load_file(file).items()}
        save_file(stored, file)


class SaysAnotherAlpha(DTensorBackend):
    def save_adapters(self, path: Path) -> None:
        super().save_adapters(path)
        file = path / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 4}))


class CountsLayersFromTheEnd(DTensorBackend):
    """In what it records."""

    def observe(self, token_ids: Any) -> Any:
        layers = self._model.config.num_hidden_layers
        return {
            place if place.layer is None else replace(place, layer=layers - 1 - place.layer): rows
            for place, rows in super().observe(token_ids).items()
        }


# In many: mistakes so plain that most of the kit sees them


class Shifted(DTensorBackend):
    """Log-probs stand one place too early: index t describes token t + 1."""

    def get_logprobs(self, batch: TokenBatch, weights: Any = "policy") -> Tensor:
        return super().get_logprobs(batch, weights).roll(-1)


class SortsByLength(DTensorBackend):
    """Results come back in the order of computation."""

    def get_logprobs(self, batch: TokenBatch, weights: Any = "policy") -> Tensor:
        order = sorted(range(len(batch)), key=lambda index: (int(batch.lengths[index]), int(batch.mask.sum())))
        return super().get_logprobs(batch.select(order), weights)


class PrefixesNames(DTensorBackend):
    def export_weights(self) -> Iterator[Mapping[str, Tensor]]:
        for bucket in super().export_weights():
            yield {f"module.{name}": tensor for name, tensor in bucket.items()}


class ExportsFirstWeights(DTensorBackend):
    """What it exports is a copy from the beginning."""

    first: list[Mapping[str, Tensor]] | None = None

    def export_weights(self) -> Iterator[Mapping[str, Tensor]]:
        if self.first is None:
            self.first = [{name: t.clone() for name, t in bucket.items()} for bucket in super().export_weights()]
        yield from self.first
