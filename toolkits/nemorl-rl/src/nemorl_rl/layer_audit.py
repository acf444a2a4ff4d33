"""Comparing two live engines layer by layer: which tokens, which capability, and what rounding is (``divergence``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from nemorl.contracts import GenerationBackend, TrainingBackend
from nemorl.errors import BackendError, boundary
from nemorl.plugins import registry
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest
from nemorl_base.left_overs import mark
from nemorl_base.seeding import derive_seed
from nemorl_tensors.engines.observing import Activations, ObservableSampler, ObservableTrainer

from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.divergence import LayerComparison, compare_activations

if TYPE_CHECKING:
    from nemorl.config import PolicyConfig

CAPABILITY = "activations"
"""What backends that can be observed declare."""
PROBE_TOKENS = 23
"""Of the prompt. A prime, so that no other axis of a tensor is likely to be as long."""
NEW_TOKENS = 8
"""Generated one by one after it: what the sampler reads from its cache differs from what it computes at once."""


@dataclass
class LayerAudit:
    """Compares a trainer and a sampler as often as asked."""

    config: RolloutRunConfig
    trainer: TrainingBackend
    sampler: GenerationBackend
    prompt: tuple[int, ...]
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
        """An audit on the tokens of these prompts, one after the other, repeated or cut to ``PROBE_TOKENS``."""
        tokens = [token for prompt in prompts for token in prompt]
        length = min(PROBE_TOKENS, config.policy.max_sequence_tokens - NEW_TOKENS)
        prompt = tuple((tokens * (-(-length // len(tokens))))[:length])
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
        return cls(config, trainer, sampler, prompt, skipped)

    def compare(self) -> None:
        """Add a comparison to ``found``, or say in ``skipped`` why there is none."""
        if self.skipped is not None:
            return
        sampling = replace(self.config.generation.sampling(), max_new_tokens=NEW_TOKENS, stop_strings=())
        request = GenerationRequest(self.prompt, sampling, (derive_seed(self.config.seed, "layers"),))
        try:
            completion, sampled = cast(ObservableSampler, self.sampler).observe(request)
            token_ids = [*self.prompt, *completion.token_ids]
            trained = cast(ObservableTrainer, self.trainer).observe(token_ids)
        except BackendError as error:
            self.skipped = str(error)
            return
        exact = None if self.config.policy.precision == "float32" else self._in_float32(token_ids)
        self.found.append(compare_activations(trained, sampled, token_ids, len(self.prompt), exact))

    def _in_float32(self, token_ids: Sequence[int]) -> Activations:
        """What a second trainer computes with the same weights in float32: the measure of what rounding does."""
        with TemporaryDirectory(prefix="nemorl-doctor-") as folder, boundary("the float32 reference of the trainer"):
            mark(folder)
            self.trainer.save_pretrained(Path(folder))
            changes = {"model_name": folder, "precision": "float32", "init": "pretrained", "lora": None}
            policy: PolicyConfig = self.config.policy.model_copy(update=changes)
            context = WorkerContext(device=self.config.cluster.device, seed=self.config.seed)
            reference = policy.backend.build(policy, context, reference=False)
            try:
                return cast(ObservableTrainer, reference).observe(token_ids)
            finally:
                reference.shutdown()
