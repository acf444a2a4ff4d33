"""The audit of ``nemorl doctor``: whether trainer and sampler agree about the same tokens.

Gradients assume that what was sampled came from the policy that is trained. A sampler in another precision, with older
weights or a stale copy of some tensor answers fluently all the same; only its log-probs tell. The distances are defined
in :mod:`nemorl_tensors.mismatch`, what an algorithm does about them in the algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError, boundary
from nemorl.metrics import Metrics, values
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest
from nemorl.weights import WeightHandle, transport

from nemorl_rl.alerts.rollout_rules import MISMATCH
from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.models.hub_models import require_models
from nemorl_rl.placement.place import choose_transport
from nemorl_rl.rollouts.seeding import derive_seed

if TYPE_CHECKING:
    from nemorl.contracts import GenerationBackend, TrainingBackend
    from nemorl_tensors import TokenBatch
    from torch import Tensor

    from nemorl_rl.audit.divergence import LayerComparison, Parting
    from nemorl_rl.audit.float32_reference import Float32Reference

PROMPTS = ("The capital of France is", "1, 2, 3, 4,", "Once upon a time there was", "def add(a, b):")
"""Texts that an audit lets the model continue. Any text will do: only the log-probs of what follows are compared."""

AUDIT_LR = 1e-3
"""Learning rate of the audit's one update: AdamW moves each weight by about this, far more than rounding does."""

MAX_GROWTH = 10.0
"""How many times larger an update may make the mean error: other weights round a little differently. A stale output
head, which stays below most thresholds, showed as a factor of 10,000 in float32; in bfloat16 rounding can hide it."""
ERROR_FLOOR = 1e-4
"""Nats. A mean error below this counts as this when growth is judged: float32 engines agree to about 1e-6."""


@dataclass(frozen=True)
class Measurement:
    """One comparison of sampler and trainer under the same weights."""

    tokens: int
    """Response tokens compared."""
    mean_error: float
    """Mean |old - generation log-prob|, in nats."""
    max_error: float
    """The largest, in nats."""
    token_mult_prob_error: float
    gen_kl_error: float
    rounding: float | None = None
    """Mean |log-prob - the same in float32| of the engine that is closer to it, in nats. Measured where the engines
    disagree in a lower precision."""

    @property
    def is_rounding(self) -> bool:
        """Whether they are no farther apart than two engines can be that are as far from float32 as the closer one."""
        return self.rounding is not None and self.mean_error <= 2 * self.rounding


@dataclass(frozen=True)
class MismatchReport:
    """The result of an audit."""

    before: Measurement
    """With the weights that both engines started from."""
    after: Measurement
    """After an update of the trainer and a weight sync, on new responses."""
    shift: float
    """Mean |change| of the trainer's log-probs through the update, in nats: the error of a sampler that missed it."""
    threshold: float
    """``token_mult_prob_error`` above this is a failure."""
    layers: tuple[LayerComparison, ...] = ()
    """The engines' results within the model, before and after the update; empty where that was not compared."""
    layers_skipped: str | None = None
    """Why it was not."""

    @property
    def parting(self) -> Parting | None:
        """The first layer and token at which the engines part."""
        return next((found.parting for found in self.layers if found.parting is not None), None)

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def findings(self) -> list[str]:
        """Faults, for people; empty when the engines agree."""
        found = [
            f"the engines disagree {when}: token_mult_prob_error is {part.token_mult_prob_error:.4g}, "
            f"{self.threshold:g} is allowed"
            for when, part in self._past_threshold.items()
            if not part.is_rounding
        ]
        growth = self.after.mean_error / max(self.before.mean_error, ERROR_FLOOR)
        if growth > MAX_GROWTH:
            found.append(
                f"the weight update made the mean error {growth:,.0f} times "
                "larger: some or all of the new weights did not reach the sampler"
            )
        when = ("", "after the update, ")
        found += [f"{when[place]}{part.parting}" for place, part in enumerate(self.layers) if part.parting][:1]
        return found

    @property
    def notes(self) -> list[str]:
        """Remarks that are no fault of an engine, for people."""
        return [
            f"token_mult_prob_error is {part.token_mult_prob_error:.4g} {when}, above {self.threshold:g}, and that is "
            f"rounding: each engine is {part.rounding:.2g} nats or more from float32. For less of it, policy.precision "
            "float32; importance_correction weighs it in algorithms that have it"
            for when, part in self._past_threshold.items()
            if part.is_rounding
        ]

    @property
    def _past_threshold(self) -> dict[str, Measurement]:
        """By when they were made, for people."""
        parts = {"from the start": self.before, "after the update": self.after}
        return {when: part for when, part in parts.items() if not part.token_mult_prob_error <= self.threshold}

    def as_dict(self) -> dict[str, Any]:
        numbers = {name: asdict(part) for name, part in (("before", self.before), ("after", self.after))}
        return {
            "ok": self.ok,
            "findings": self.findings,
            "notes": self.notes,
            **numbers,
            "shift": self.shift,
            "threshold": self.threshold,
            "layers": [found.as_dict() for found in self.layers],
            "layers_skipped": self.layers_skipped,
        }


def measure_mismatch(
    config: RolloutRunConfig,
    *,
    samples_per_prompt: int = 4,
    phase: Callable[[str], None] = lambda _: None,
) -> MismatchReport:
    """Build both engines of a config in this process and compare their log-probs, before and after a weight update.

    Engines that can record what they compute are also compared layer by layer (``divergence``).

    Args:
        config: Model, policy and generation; of the rest, only device, seed and threshold are used.
        samples_per_prompt: Responses to each of ``PROMPTS``.
        phase: Told what is being done.

    Raises:
        NemorlError: an engine cannot be built; says which.
    """
    from nemorl_rl.audit.float32_reference import Float32Reference
    from nemorl_rl.audit.layer_audit import LayerAudit

    require_models(config)
    threshold = config.rollouts.mismatch_warning
    tokenizer = Tokenizer.of(config.policy)
    prompt_ids = [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]
    with ExitStack() as stack:
        phase("building the engines")
        engines = _Engines(config, stack)
        layers = LayerAudit.of(config, engines.trainer, engines.sampler, prompt_ids)
        phase("comparing log-probs")
        first = engines.sample(prompt_ids, samples_per_prompt, "before")
        old_logprobs = engines.trainer.get_logprobs(first)
        with Float32Reference(config, engines.trainer) as exact:
            before = _measurement(first, old_logprobs, threshold, exact)
            phase("comparing layers")
            layers.compare(exact)

        phase("updating the weights")
        engines.update(first)
        moved = engines.trainer.get_logprobs(first)
        shift = float((moved - old_logprobs)[first.mask].abs().mean())
        phase("comparing again")
        second = engines.sample(prompt_ids, samples_per_prompt, "after")
        with Float32Reference(config, engines.trainer) as exact:
            after = _measurement(second, engines.trainer.get_logprobs(second), threshold, exact)
            layers.compare(exact)
    return MismatchReport(before, after, shift, threshold, tuple(layers.found), layers.skipped)


class _Engines:
    """A training and a generation backend of one config, in this process."""

    def __init__(self, config: RolloutRunConfig, stack: ExitStack) -> None:
        self._generation, self._sampling, self._seed = config.generation, config.sampling(), config.seed
        optimizer = config.policy.optimizer.model_copy(update={"lr": AUDIT_LR})
        schedule = type(config.policy.schedule)(decay_steps=1)  # constant, without warm-up
        policy = config.policy.model_copy(update={"optimizer": optimizer, "schedule": schedule})
        context = WorkerContext(device=config.cluster.device, seed=config.seed)
        backends = policy.backend.weight_transports, config.generation.backend.weight_transports
        name = choose_transport(*backends, plugins=config.registry, device=context.device, colocated=True)
        assert name is not None, "the config checks that the backends share a transport"
        self._transport, self._carrier = name, transport(name)
        stack.callback(self._carrier.close)

        with boundary(f"training backend {type(policy.backend).__name__}"):
            self.trainer: TrainingBackend = policy.backend.build(policy, context, reference=False)
        stack.callback(self.trainer.shutdown)
        with boundary(f"generation backend {type(config.generation.backend).__name__}"):
            self.sampler: GenerationBackend = config.generation.backend.build(
                config.generation, policy, context, self._weights(version=0)
            )
        stack.callback(self.sampler.shutdown)

    def sample(self, prompts: Sequence[tuple[int, ...]], samples: int, label: str) -> TokenBatch:
        """Responses with the sampler's log-probs as ``generation_logprobs``."""
        import numpy
        import torch
        from nemorl_tensors import TokenBatch

        sampling = self._sampling
        requests = [
            GenerationRequest(ids, sampling, tuple(derive_seed(self._seed, label, row, n) for n in range(samples)))
            for row, ids in enumerate(prompts)
        ]
        completions = self.sampler.generate(requests)
        rows = [(ids, done) for ids, group in zip(prompts, completions, strict=True) for done in group]
        batch = TokenBatch.from_sequences(
            [[*ids, *done.token_ids] for ids, done in rows],
            [[False] * len(ids) + [True] * len(done.token_ids) for ids, done in rows],
            temperature=self._generation.temperature or 1.0,  # greedy log-probs are those of temperature 1
        )
        sampled = [logprob for ids, done in rows for logprob in ([0.0] * len(ids) + list(done.logprobs))]
        batch = batch.with_tokens(generation_logprobs=torch.tensor(sampled, dtype=torch.float32))
        routes = [done.routes for _, done in rows if done.routes is not None]
        return batch.with_tokens(routes=torch.from_numpy(numpy.concatenate(routes))) if sampling.routes else batch

    def update(self, batch: TokenBatch) -> None:
        """Move the trainer's weights, and hand them over."""
        from nemorl_tensors.mismatch import PolicyGradient

        # Every other response becomes likelier, the rest less so. Pushed in one direction alone, log-probs would run to
        # zero, where all engines agree.
        advantages = 1.0 - 2.0 * (batch.sequence_ids % 2)
        self.trainer.train_step(batch.with_tokens(advantages=advantages), PolicyGradient())
        self.sampler.update_weights(self._weights(version=1), 1)

    def _weights(self, version: int) -> WeightHandle:
        return WeightHandle(self._transport, version, self._carrier.publish(self.trainer.export_weights))


def _measurement(batch: TokenBatch, old_logprobs: Tensor, threshold: float, exact: Float32Reference) -> Measurement:
    from nemorl_tensors.mismatch import mismatch_metrics

    metrics: Metrics = mismatch_metrics(old_logprobs, batch["generation_logprobs"], batch.mask)
    found = values(metrics)
    return Measurement(
        tokens=int(batch.mask.sum()),
        mean_error=found["logprob_error/mean"],
        max_error=found.get("logprob_error/max", math.nan),
        token_mult_prob_error=found[MISMATCH],
        gen_kl_error=found["gen_kl_error"],
        rounding=_rounding(batch, old_logprobs, exact) if not found[MISMATCH] <= threshold else None,
    )


def _rounding(batch: TokenBatch, old_logprobs: Tensor, exact: Float32Reference) -> float | None:
    """As ``Measurement.rounding``; ``None``, too, where float32 cannot be asked."""
    if not exact.is_needed:
        return None
    try:
        wanted = exact.trainer.get_logprobs(batch)
    except BackendError:
        return None
    sides = old_logprobs, batch["generation_logprobs"]
    return min(float((side - wanted)[batch.mask].abs().mean()) for side in sides)
