"""The backend: ``nemorl.contracts.TrainingBackend`` is the specification, ``nemorl_testing`` its tests.

# N = tokens of all sequences concatenated

The model stays in evaluation mode: dropout would make the log-probs of two passes differ.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nemorl.contracts import Loss, WeightsName
from nemorl.errors import UsageError
from nemorl.metrics import Metrics
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.model_config import name_or_path, read_model_config
from nemorl_tensors.engines.model_folder import save_tokenizer
from nemorl_tensors.engines.steps import (
    StepResult,
    evaluate_loss,
    pass_metrics,
    require_fields,
    schedule_factor,
    update_metrics,
)
from torch import Tensor

from nemorl_example import checkpoint

if TYPE_CHECKING:
    from nemorl.config import TrainingOptions
    from nemorl.resources.worker import WorkerContext


class ExampleBackend:
    """One process, float32, one sequence per forward pass."""

    def __init__(self, policy: TrainingOptions, worker: WorkerContext, attention: str, *, reference: bool) -> None:
        self._policy, self._device = policy, worker.device
        self._model = load_model(policy, worker, attention)
        self._reference = copy.deepcopy(self._model).requires_grad_(False) if reference else None
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        settings = policy.optimizer
        decayed = [parameter for parameter in self._parameters.values() if parameter.ndim > 1]
        plain = [parameter for parameter in self._parameters.values() if parameter.ndim <= 1]  # biases and norms
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
        )
        self._steps = 0
        """Optimizer steps so far: the position in the schedule."""

    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        require_fields(batch, loss)

        # 1. Gradients add up: a loss is a sum over tokens, whose weights were normalised before.
        self._optimizer.zero_grad()
        parts: list[Metrics] = []
        losses: list[Tensor] = []
        for start in range(0, len(batch), batch.sequences_per_group):  # sequences that a loss compares stay together
            part = batch.select(range(start, start + batch.sequences_per_group)).to(self._device)
            value, metrics = evaluate_loss(loss, self._logprobs(self._model, part), part)
            value.backward()  # type: ignore[no-untyped-call]
            parts.append(metrics)
            losses.append(value.detach().double())

        # 2. One update, unless the gradient is not finite.
        self._steps += 1
        lr = self._policy.optimizer.lr * schedule_factor(self._policy.schedule, self._steps)
        limit = self._policy.max_grad_norm if self._policy.max_grad_norm is not None else math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit))
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        update = StepResult(norm, lr, skipped=not math.isfinite(norm))
        return {**pass_metrics(batch, parts, losses), **update_metrics(update)}

    @torch.no_grad()
    def get_logprobs(self, batch: TokenBatch, weights: WeightsName = "policy") -> Tensor:
        model = self._model if weights == "policy" else self._reference
        if model is None:
            raise UsageError("this policy keeps no reference weights", fix="build it with reference=True")
        return self._logprobs(model, batch.to(self._device)).to(batch.token_ids.device)

    def get_values(self, batch: TokenBatch) -> Tensor:
        raise UsageError("this backend has no value head", fix="use one with the capability value_head, e.g. dtensor")

    def get_topk_logprobs(self, batch: TokenBatch, k: int) -> tuple[Tensor, Tensor]:
        raise UsageError("this backend ranks no tokens", fix="use one with the capability topk_logprobs, e.g. dtensor")

    def export_weights(self) -> Iterator[Mapping[str, Tensor]]:
        yield {name: parameter.detach() for name, parameter in self._parameters.items()}

    def save_checkpoint(self, path: Path, *, optimizer: bool = True) -> None:
        checkpoint.save(path, self._parameters, self._optimizer if optimizer else None, self._steps)

    def load_checkpoint(self, path: Path) -> None:
        self._steps = checkpoint.load(path, self._parameters, self._optimizer)

    def save_pretrained(self, path: Path) -> None:
        self._model.save_pretrained(path)
        save_tokenizer(path, self._policy.model_name, self._policy.tokenizer)

    def shutdown(self) -> None:
        self._model = self._reference = None
        self._parameters = {}

    def _logprobs(self, model: Any, batch: TokenBatch) -> Tensor:
        """[N] float32 nats of each token given those before it, 0.0 where the mask is False."""
        found = []
        for ids in torch.split(batch.token_ids, batch.lengths.tolist()):
            logits_TV = model(input_ids=ids[None]).logits[0, :-1].float() / batch.temperature
            scored_T = torch.log_softmax(logits_TV, -1).gather(1, ids[1:, None]).squeeze(1)
            found.append(torch.cat((scored_T.new_zeros(1), scored_T)))
        return torch.where(batch.mask, torch.cat(found), 0.0)


def load_model(policy: TrainingOptions, worker: WorkerContext, attention: str) -> Any:
    """The policy's model, with the weights on disk or random ones that follow from the seed."""
    from transformers import AutoModelForCausalLM

    config = read_model_config(policy)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention}
    model: Any
    if policy.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(worker.seed)
            model = AutoModelForCausalLM.from_config(config, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(name_or_path(policy), config=config, **options)
    return model.to(worker.device).eval()
