"""ToyModels: bigram models with adapters that really learn, for tests of the Tinker server.

Log-probs at a position depend on its token alone: ``log_softmax((table + A @ B)[token])`` with a fixed random table
[V, V], A [V, r] random by the adapter's seed and B [r, V] zero at first.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from nemorl.contracts import AdamStep
from nemorl.errors import UsageError
from nemorl_agents.tinker.models import (
    Base,
    Datum,
    NewModel,
    Passed,
    Sampled,
    SampledSequence,
    SampleRequest,
    StopReason,
    Topk,
)
from torch import Tensor

VOCABULARY = 96
BROKEN = 95
"""A token on which passes fail, as for want of memory"""
EOS = 0
BASE = "toy/bigram"


@dataclass(frozen=True)
class ToyLoss:
    """A loss over the log-probs of one datum; it stands for the losses of the package, which take a batch."""

    name: str
    config: Mapping[str, float | str]

    requires: frozenset[str] = frozenset()

    def __call__(self, logprobs: Tensor, datum: Datum) -> Tensor:
        if self.name == "cross_entropy":
            return -(logprobs * datum.fields.get("weights", torch.ones(()))).sum()
        return -((logprobs - datum.fields["logprobs"]).exp() * datum.fields["advantages"]).sum()


def toy_loss(name: str, config: Mapping[str, float | str]) -> ToyLoss:
    if name not in ("cross_entropy", "importance_sampling"):
        raise UsageError(f"the loss {name} is not served", fix="cross_entropy and importance_sampling are")
    return ToyLoss(name, dict(config))


@dataclass
class Adapter:
    a: Tensor
    b: Tensor
    moments: dict[str, Tensor] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.a, self.b]


class ToyModels:
    """``Models`` of one base."""

    def __init__(
        self, *, slow_s: float = 0.0, dies_before: int = 0, dies_after: int = 0, samples_apart: bool = False
    ) -> None:
        """
        Args:
            slow_s: Each call takes so long.
            dies_before: The process is killed before the call of this number (from 1) does anything.
            dies_after: The process is killed when the call of this number has done its work.
            samples_apart: A second thread may sample.
        """
        self.bases: tuple[Base, ...] = (Base(BASE, 64), Base("toy/frozen", 64, trainable=False))
        self.samples_apart = samples_apart
        self.adapters: dict[str, Adapter] = {}
        self.calls: list[tuple[str, str]] = []
        """(verb, model) in order"""
        self._slow_s, self._dies_before, self._dies_after = slow_s, dies_before, dies_after
        self._table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(7))

    def create(self, model_id: str, new: NewModel) -> None:
        with self._call("create", model_id):
            generator = torch.Generator().manual_seed(new.seed % (1 << 62))
            a = torch.randn(VOCABULARY, new.rank, generator=generator).requires_grad_()
            self.adapters[model_id] = Adapter(a, torch.zeros(new.rank, VOCABULARY).requires_grad_())

    def forward(self, model_id: str, data: Sequence[Datum], loss: ToyLoss) -> Passed:  # type: ignore[override]
        with self._call("forward", model_id), torch.no_grad():
            return self._passed(model_id, data, loss)[0]

    def forward_backward(self, model_id: str, data: Sequence[Datum], loss: ToyLoss) -> Passed:  # type: ignore[override]
        with self._call("forward_backward", model_id):
            if any(token_id == BROKEN for datum in data for token_id in datum.token_ids):
                raise RuntimeError("this token breaks the toy")
            passed, total = self._passed(model_id, data, loss)
            total.backward()
            return passed

    def step(self, model_id: str, adam: AdamStep) -> dict[str, float]:
        with self._call("step", model_id):
            adapter = self.adapters[model_id]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in adapter.parameters]
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
            if adam.max_grad_norm is not None and adam.max_grad_norm < norm:
                gradients = [g * (adam.max_grad_norm / norm) for g in gradients]
            moments = adapter.moments
            count = moments["count"] = moments.get("count", torch.zeros(())) + 1
            for number, (parameter, gradient) in enumerate(zip(adapter.parameters, gradients, strict=True)):
                first = moments.get(f"m{number}", torch.zeros_like(gradient)).lerp(gradient, 1 - adam.betas[0])
                second = moments.get(f"v{number}", torch.zeros_like(gradient)).lerp(gradient**2, 1 - adam.betas[1])
                moments[f"m{number}"], moments[f"v{number}"] = first, second
                m = first / (1 - adam.betas[0] ** float(count))
                v = second / (1 - adam.betas[1] ** float(count))
                with torch.no_grad():
                    parameter.mul_(1 - adam.lr * adam.weight_decay)
                    parameter.sub_(adam.lr * m / (v.sqrt() + adam.eps))
                parameter.grad = None
            return {"grad_norm": norm}

    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        with self._call("save", model_id):
            adapter = self.adapters[model_id]
            folder.mkdir(parents=True)
            weights = {"a": adapter.a.detach(), "b": adapter.b.detach()}
            torch.save({"weights": weights, "moments": adapter.moments if optimizer else {}}, folder / "adapter.pt")

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        with self._call("load", model_id):
            found = torch.load(folder / "adapter.pt")
            weights = {key: value.clone().requires_grad_() for key, value in found["weights"].items()}
            self.adapters[model_id] = Adapter(**weights, moments=dict(found["moments"]) if optimizer else {})

    def snapshot(self, model_id: str, folder: Path) -> None:
        self.save(model_id, folder, optimizer=False)

    def sample(self, base: str, snapshot: Path | None, requests: Sequence[SampleRequest]) -> list[Sampled]:
        with self._call("sample", base):
            table = self._table
            if snapshot is not None:
                weights = torch.load(snapshot / "adapter.pt")["weights"]
                table = table + weights["a"] @ weights["b"]
            return [_sampled(table, request) for request in requests]

    def free(self, model_id: str) -> None:
        self.adapters.pop(model_id, None)

    @contextmanager
    def _call(self, verb: str, model_id: str) -> Iterator[None]:
        self.calls.append((verb, model_id))
        if len(self.calls) == self._dies_before:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._slow_s)
        yield
        if len(self.calls) == self._dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def _passed(self, model_id: str, data: Sequence[Datum], loss: ToyLoss) -> tuple[Passed, Tensor]:
        adapter = self.adapters[model_id]
        logprobs = (self._table + adapter.a @ adapter.b).log_softmax(-1)
        rows: list[Tensor] = []
        total = torch.zeros(())
        for datum in data:
            targets = datum.fields["target_tokens"]
            wide = targets.reshape(len(datum.token_ids), -1)
            row = logprobs[list(datum.token_ids)].gather(1, wide).reshape(targets.shape)
            rows.append(row.detach())
            total = total + loss(row, datum)
        return Passed(rows, {"loss:sum": float(total.detach())}), total


def _sampled(table: Tensor, request: SampleRequest) -> Sampled:
    if max(request.token_ids) >= VOCABULARY:
        raise UsageError(f"token {max(request.token_ids)} is not in the vocabulary")
    sequences = [_sequence(table, request, number) for number in range(request.num_samples)]
    scores = table.log_softmax(-1)
    prompt, topk = None, None
    if request.prompt_logprobs:
        pairs = zip(request.token_ids, request.token_ids[1:], strict=False)
        prompt = [math.nan, *(float(scores[before, after]) for before, after in pairs)]
    if request.topk_prompt_logprobs:
        rows = [_topk(scores[token_id], request.topk_prompt_logprobs) for token_id in request.token_ids[:-1]]
        topk = [None, *rows]
    return Sampled(sequences, prompt, topk)


def _sequence(table: Tensor, request: SampleRequest, number: int) -> SampledSequence:
    generator = torch.Generator().manual_seed((request.seed + number) % (1 << 62))
    ends = {EOS} if request.stop is None else {each for each in request.stop if isinstance(each, int)}
    last, token_ids, logprobs, topk = request.token_ids[-1], [], [], []
    reason: StopReason = "length"
    while len(token_ids) < request.max_tokens:
        greedy = request.temperature == 0
        scores = (table[last] / (1.0 if greedy else request.temperature)).log_softmax(-1)
        last = int(scores.argmax()) if greedy else int(torch.multinomial(scores.exp(), 1, generator=generator))
        token_ids.append(last)
        logprobs.append(float(scores[last]))
        topk.append(_topk(scores, request.topk_sample_logprobs))
        if last in ends:
            reason = "stop"
            break
    return SampledSequence(token_ids, logprobs, reason, topk if request.topk_sample_logprobs else None)


def _topk(scores: Tensor, k: int) -> Topk:
    best = scores.topk(k)
    return [(int(token_id), float(score)) for score, token_id in zip(best.values, best.indices, strict=True)]
