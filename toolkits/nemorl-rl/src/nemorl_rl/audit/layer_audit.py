"""Comparing two live engines layer by layer: which tokens, which capability, and what rounding is (``divergence``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from nemorl.contracts import GenerationBackend, ObservableSampler, ObservableTrainer, TrainingBackend
from nemorl.errors import BackendError
from nemorl.plugins import registry
from nemorl.types import GenerationRequest

from nemorl_rl.audit.divergence import LayerComparison, compare_activations
from nemorl_rl.audit.float32_reference import Float32Reference
from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.rollouts.seeding import derive_seed

CAPABILITY = "activations"
"""The capability of backends that can be observed."""
PROBE_TOKENS = 23
"""Of the prompt. A prime, so that no other axis of a tensor is likely to be as long."""
PROBES = 3
"""Prompts on all of which engines of a lower precision must part. Rounding that a model amplifies (a token whose
activations are far larger than others') looked like a fault on one prompt of ten with a sound SmolLM2-135M in
bfloat16; a fault of the code does on each."""
NEW_TOKENS = 8
"""Generated one by one after it: what the sampler reads from its cache differs from what it computes at once."""


@dataclass
class LayerAudit:
    """Compares a trainer and a sampler as often as asked."""

    config: RolloutRunConfig
    trainer: TrainingBackend
    sampler: GenerationBackend
    prompts: Sequence[tuple[int, ...]]
    """Token ids. The first is asked about; the others, too, where what differs may be rounding"""
    skipped: str | None
    """Why nothing is compared."""
    found: list[LayerComparison] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        config: RolloutRunConfig,
        trainer: TrainingBackend,
        sampler: GenerationBackend,
        prompts: Sequence[tuple[int, ...]],
    ) -> LayerAudit:
        """An audit on ``PROBES`` runs of ``PROBE_TOKENS`` tokens, from these prompts one after the other."""
        tokens = [token for prompt in prompts for token in prompt]
        length = min(PROBE_TOKENS, config.policy.max_sequence_tokens - NEW_TOKENS)
        repeated = tokens * (2 + length // len(tokens))
        starts = [len(tokens) * place // PROBES for place in range(PROBES)]
        declared: Mapping[str, Any] = {
            "training_backends": config.policy.backend,
            "generation_backends": config.generation.backend,
        }
        lacking = [
            f"{kind.replace('_', ' ')[:-1]} {registry().name_of(kind, type(backend))}"
            for kind, backend in declared.items()
            if CAPABILITY not in backend.supports
        ]
        skipped = f"{' and '.join(lacking)} cannot record what is computed in each layer" if lacking else None
        return cls(config, trainer, sampler, [tuple(repeated[start : start + length]) for start in starts], skipped)

    def compare(self, exact: Float32Reference) -> None:
        """Add a comparison to ``found``, or say in ``skipped`` why there is none.

        Args:
            exact: Of the trainer.
        """
        if self.skipped is not None:
            return
        try:
            self.found.append(self._confirmed(exact))
        except BackendError as error:
            self.skipped = str(error)

    def _confirmed(self, exact: Float32Reference) -> LayerComparison:
        """One in which the engines agree; if they part on all prompts, the one whose place is the median."""
        found: list[LayerComparison] = []
        partings: list[tuple[int, int, int]] = []
        for prompt in self.prompts if exact.is_needed else self.prompts[:1]:
            found.append(self._compared(prompt, exact))
            parting = found[-1].parting
            if parting is None:
                return found[-1]
            partings.append(parting.place.order)
        return found[partings.index(sorted(partings)[len(partings) // 2])]

    def _compared(self, prompt: tuple[int, ...], exact: Float32Reference) -> LayerComparison:
        sampling = replace(self.config.generation.sampling(), max_new_tokens=NEW_TOKENS, stop_strings=())
        request = GenerationRequest(prompt, sampling, (derive_seed(self.config.seed, "layers"),))
        completion, sampled = cast(ObservableSampler, self.sampler).observe(request)
        token_ids = [*prompt, *completion.token_ids]
        trained = cast(ObservableTrainer, self.trainer).observe(token_ids)
        reference = cast(ObservableTrainer, exact.trainer).observe(token_ids) if exact.is_needed else None
        return compare_activations(trained, sampled, token_ids, len(prompt), reference)
