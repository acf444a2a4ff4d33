"""Asks for receipts (``receipts``): when, of whom, and what becomes of weights that are not what was sent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nemorl.errors import WeightsUnprovenError
from nemorl.types import GenerationRequest, SamplingParams

from nemorl_rl.models.model_geometry import without_mtp
from nemorl_rl.serving.receipts import PROBE, Probe, Receipt, Sent, compare

if TYPE_CHECKING:
    from nemorl.resources.policies import TrainingPolicy
    from nemorl.weights import WeightHandle

    from nemorl_rl.config import WeightsConfig
    from nemorl_rl.data.tokenizer import Tokenizer
    from nemorl_rl.serving.generation_policy import GenerationPolicy

PROBE_TEXTS = (
    "The sum of 12 and 30 is 42, and the sum of 7 and 8 is 15.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))",
)
PROBE_TOKENS = 32
"""Of each text."""
KEPT_VERSIONS = 8
"""Whose digests are kept, to know a stale tensor by."""
FLOAT32_TOLERANCE, TOLERANCE = 0.01, 0.25
"""Nats. Between float32 passes 1e-4 is usual; bfloat16, and weights rounded to 8 bits, stay well below the second."""


class WeightReceipts:
    """The receipts of a run, and what they said of each version."""

    def __init__(
        self,
        config: WeightsConfig,
        generation: GenerationPolicy,
        policy: TrainingPolicy,
        tokenizer: Tokenizer,
        *,
        can_answer: bool,
        precision: str,
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            config: What to ask for.
            generation: The engines.
            policy: The trainer, for the log-probs of the probe.
            tokenizer: Of both.
            can_answer: The engine has digests, and weights that it was sent.
            precision: Of the policy, torch's name.
            warn: Tells a person.
        """
        self._config, self._generation, self._policy, self._warn = config, generation, policy, warn
        self._tokenizer = tokenizer
        self._is_off = config.receipts == "off" or (config.receipts != "probe" and not can_answer)
        self._digests = can_answer
        default = FLOAT32_TOLERANCE if precision == "float32" else TOLERANCE
        self._tolerance = config.probe_tolerance or default
        self._before: deque[Sent] = deque(maxlen=KEPT_VERSIONS)
        """The newest first"""
        self._probes_before: Sequence[Probe] = ()
        self._lives: int | None = None
        """Of the engines when they were asked last"""
        self._sync_s = self._receipt_s = 0.0
        self._verdicts: dict[int, bool | None] = {}
        self.newest: Receipt | None = None
        """The last receipt."""

    def update(self, publish: Callable[[bool], WeightHandle]) -> tuple[int | None, Receipt | None]:
        """Give the engines new weights, with a receipt where it is due. Bytes that were read, and the receipt.

        Args:
            publish: The weights, with digests if told so.

        Raises:
            WeightsUnprovenError: The receipt contradicts what was sent, and ``on_unproven`` is ``refuse``.
        """
        is_due, start_s = self._is_due, time.monotonic()
        handle = publish(is_due and self._digests)
        read = self._generation.update_weights(handle)
        took_s, receipt = time.monotonic() - start_s, None
        if is_due:
            digesting_s = (0.0 if handle.digests is None else handle.digests.seconds) + self._generation.answered_s
            took_s -= digesting_s
            began_s = time.monotonic()
            receipt = self._receipt(handle)
            self._receipt_s += digesting_s + time.monotonic() - began_s
            self._verdicts[handle.version] = receipt.is_proven
            self.newest, self._lives = receipt, self._generation.lives
        self._sync_s += took_s
        return read, receipt

    def settle(self, receipt: Receipt) -> None:
        """Refuse or warn of weights that are not what was sent."""
        if receipt.is_proven is not False:
            return
        if self._config.on_unproven == "refuse":
            raise WeightsUnprovenError(
                receipt.complaint(),
                fix="nothing was learnt from them: look for what the engine's log says of the update, try another "
                "cluster.weight_transport, or set weights.on_unproven: warn to go on all the same",
            )
        self._warn(f"{receipt.complaint()}. The run goes on, as weights.on_unproven says")

    def verdict(self, versions: Sequence[int]) -> bool | None:
        """Whether all of these are proven; ``None`` where one had no receipt, or none that says so."""
        found = [self._verdicts.get(version) for version in versions]
        return False if False in found else None if None in found or not found else True

    @property
    def _is_due(self) -> bool:
        if self._is_off:
            return False
        share = self._config.share
        return self._lives != self._generation.lives or share == 1 or self._receipt_s <= share * self._sync_s

    def _receipt(self, handle: WeightHandle) -> Receipt:
        receipt = Receipt(handle.version)
        if handle.digests is not None:
            # MTP layers only guess: engines that do not use them leave them out, and none samples from them.
            sent = Sent(handle.version, {name: handle.digests[name] for name in without_mtp(handle.digests)})
            receipt = compare(sent, self._generation.answers, self._before)
            self._before.appendleft(sent)
        wants = self._config.receipts == "probe" or (self._config.receipts == "auto" and receipt.incomparable)
        return self._with_probe(receipt) if wants else receipt

    def _with_probe(self, receipt: Receipt) -> Receipt:
        probes = self._probed()
        gap = max(probe.gap for probe in probes)
        faults = dict(receipt.faults)
        before = self._probes_before if len(self._probes_before) == len(probes) else [None] * len(probes)
        if any(probe.is_stuck(old) for probe, old in zip(probes, before, strict=True)):
            faults[PROBE] = "stale: the trainer's have changed, the engine's are the same to the last bit"
        elif gap > self._tolerance:
            faults[PROBE] = (
                f"{gap:.3g} nats apart in the mean, more than {self._tolerance:g}: the engine computes with something "
                "else than it was sent (adapters over another base, a tied head of older weights), or is rounded more "
                "than weights.probe_tolerance allows"
            )
        self._probes_before = probes
        return replace(receipt, faults=faults, probe_gap=gap)

    def _probed(self) -> list[Probe]:
        """Log-probs of each replica, and the trainer's, of the same tokens."""
        from nemorl_tensors import TokenBatch

        texts = [tuple(self._tokenizer.encode_observation(text)[:PROBE_TOKENS]) for text in PROBE_TEXTS]
        replicas = self._generation.replicas
        params = SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=True)
        requests = [GenerationRequest(ids, params) for ids in texts for _ in range(replicas)]
        scored = [group[0].prompt_logprobs for group in self._generation.generate(requests)]
        ranks = self._policy.workers.data_parallel_size
        rows = texts * -(-max(ranks, len(texts)) // len(texts))
        masks = [[place > 0 for place in range(len(ids))] for ids in rows]
        logprobs = self._policy.get_logprobs(TokenBatch.from_sequences(rows, masks)).tolist()
        mine = tuple(logprobs[: sum(map(len, texts))])
        return [Probe(mine, tuple(p for group in scored[rank::replicas] for p in group)) for rank in range(replicas)]
