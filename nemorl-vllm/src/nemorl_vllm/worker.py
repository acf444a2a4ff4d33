"""Additions to vLLM's workers, the processes that hold the model: one per device, with one device this process.

vLLM mixes :class:`WorkerExtension` into its worker class; ``collective_rpc`` calls its methods by name.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch

from nemorl_vllm.environment import enable_amx

enable_amx()  # a worker of a multi-device engine is a fresh process: this module is the first of ours that it imports

from nemorl.errors import DeadlineError, WeightsLostError  # noqa: E402
from nemorl.weights import WeightHandle  # noqa: E402
from nemorl_tensors.engines.buckets import CountedBuckets  # noqa: E402
from nemorl_tensors.engines.digests import PartDigest  # noqa: E402
from nemorl_tensors.engines.drafted import parts_of  # noqa: E402
from nemorl_tensors.engines.observing import Activations, Recorder  # noqa: E402
from nemorl_tensors.engines.parking import Parking, bytes_held  # noqa: E402
from nemorl_tensors.engines.pieces import watched_copies  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.lora.layers import BaseLayerWithLoRA  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

import nemorl_vllm.transfer  # noqa: E402, F401  registers how weights get into the model
from nemorl_vllm.mtp_tensors import MtpTensors  # noqa: E402
from nemorl_vllm.packed import forget_packed, hidden_bytes, packed_tensors  # noqa: E402
from nemorl_vllm.receipts import Receipt, lazily  # noqa: E402

logger = logging.getLogger(__name__)

if current_platform.is_cpu():
    from nemorl_vllm.cpu_mixtures import supply_missing

    supply_missing()


@dataclass(frozen=True)
class NotFetched:
    """An update that changed nothing. A result, because exceptions lose their type on the way out of vLLM."""

    error: WeightsLostError | DeadlineError


class WorkerExtension:
    """Methods of every worker of the engine."""

    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any
    start_weight_update: Callable[[], None]
    start_draft_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    nemorl_parking: Parking | None = None
    """Weights and cache that sleep, on a CPU."""
    nemorl_told_of_mtp = False
    nemorl_receipt: Receipt | None = None
    """Of the last update, if it was asked for."""
    nemorl_recorder: Recorder
    nemorl_observation: ExitStack
    """Removes what records."""

    @property
    def _draft(self) -> torch.nn.Module | None:
        """The model that guesses, if weights do."""
        found: torch.nn.Module | None = self.model_runner.get_draft_model()
        return found

    @property
    def _models(self) -> list[torch.nn.Module]:
        return [model for model in (self.model_runner.model, self._draft) if model is not None]

    def _all_weights(self) -> Iterator[torch.Tensor]:
        return itertools.chain.from_iterable(map(_weights, self._models))

    def nemorl_sleep(self, level: int) -> None:
        """Give back the memory of keys and values, and of the weights: 1 keeps a copy of these, 2 does not.

        At 1, what oneDNN has packed stays where it is (``packed``): a copy would lie in the same memory.
        """
        model, parking = self.model_runner.model, self.nemorl_parking or Parking()
        self.nemorl_parking = parking
        parking.leave("cache", self.model_runner.kv_caches, forget=True)
        parking.leave("weights", self._all_weights(), forget=level == 2)
        if level == 2:
            forget_packed(model)

    def nemorl_wake(self, parts: Sequence[str]) -> None:
        """Take it again."""
        if self.nemorl_parking is not None:
            for part in parts:
                self.nemorl_parking.come_back(part)

    def nemorl_held_bytes(self) -> dict[str, int]:
        """Bytes of weights and of cache on this device."""
        weights = bytes_held(self._all_weights()) + sum(map(hidden_bytes, self._models))
        return {"weights": weights, "cache": bytes_held(self.model_runner.kv_caches)}

    def nemorl_observe(self) -> None:
        """Record what the model computes from here on."""
        from nemorl_vllm.observing import observed

        self.nemorl_recorder, self.nemorl_observation = Recorder(), ExitStack()
        self.nemorl_observation.enter_context(observed(self.model_runner.model, self.nemorl_recorder))

    def nemorl_observed(self) -> Activations:
        """Stop recording: what was computed since ``nemorl_observe``."""
        self.nemorl_observation.close()
        recorder, self.nemorl_recorder = self.nemorl_recorder, Recorder()
        return recorder.activations()

    def nemorl_make_pipeline_buffers(self) -> None:
        """Memory for what comes from the stage before: vLLM makes it as it warms up, which it does not on a CPU."""
        runner, parallel = self.model_runner, self.vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1 and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def nemorl_end_with_parent(self) -> None:
        """End with the process that takes care of this node. vLLM's own worker of several nodes goes on waiting for the
        first one's messages."""
        parent = parent_process()
        if parent is not None:
            threading.Thread(target=_end_after, args=(parent,), daemon=True).start()

    def nemorl_install_sampler(self) -> None:
        """Report log-probs as nemorl defines them."""
        from nemorl_vllm.sampler import TemperatureLogprobSampler

        sampler = self.model_runner.sampler = TemperatureLogprobSampler(self.model_runner.sampler)
        speculative = self.vllm_config.speculative_config
        if speculative is not None:
            from nemorl_vllm.speculation import DraftVerifier, draw_guesses

            self.model_runner.rejection_sampler = DraftVerifier(sampler, speculative, self.model_runner.device)
            if self._draft is not None:
                self.model_runner.drafter._sample_from_logits = draw_guesses

    def nemorl_take_draft_counts(self) -> tuple[int, int, int]:
        """Guesses checked, tokens guessed and tokens accepted since it was last asked."""
        counts: tuple[int, int, int] = self.model_runner.rejection_sampler.take_counts()
        return counts

    def nemorl_load_folder(self, folder: str) -> None:
        """Replace the model's weights by those of a Hugging Face folder. Called over HTTP, of a server that was started
        with this extension (``nemorl-agents``)."""
        parts = sorted(Path(folder).glob("*.safetensors"))
        if not parts:
            raise FileNotFoundError(f"no *.safetensors in {folder}")
        self._replace_weights(map(load_file, parts))

    def nemorl_update_weights(self, handles: Sequence[WeightHandle]) -> NotFetched | int:
        """Replace the model's weights in place, by vLLM's own steps of an update.

        Args:
            handles: The same weights, as the processes of each node of the engine can fetch them.

        Returns:
            Bytes of the tensors that came; or why the weights are as before, if the trainer is gone or does not answer
            in time.

        Raises:
            BackendError: Names or shapes are not those of the model. The weights are then no longer usable.
        """
        handle = handles[self.vllm_config.parallel_config.node_rank]
        policy, draft = parts_of(handle)
        try:
            weights = _fetched(policy)
            guessing = _fetched(draft) if draft is not None else None
        except (WeightsLostError, DeadlineError) as error:
            return NotFetched(error)
        self.nemorl_receipt = None
        if handle.digests is None:
            self._replace_weights(weights)
        else:
            receipt = Receipt()
            with watched_copies(receipt.copied):
                self._replace_weights(lazily(weights))
            self.nemorl_receipt = receipt
        if guessing is None:
            return weights.nbytes
        self._replace(guessing, self.start_draft_weight_update)
        return weights.nbytes + guessing.nbytes

    def nemorl_held_digests(self) -> tuple[list[PartDigest], dict[str, str]]:
        """Digests of what the last update has written into parameters, and why there are none of others."""
        return ([], {}) if self.nemorl_receipt is None else self.nemorl_receipt.answer()

    def _replace_weights(self, buckets: Iterable[Mapping[str, torch.Tensor]]) -> None:
        """Those of the policy, and of the MTP layers that guess for it if they are among them."""
        speculative = self.vllm_config.speculative_config
        if speculative is None or speculative.method != "mtp":
            self._replace(buckets, self.start_weight_update)
            return
        kept = MtpTensors(self.vllm_config.model_config.hf_text_config.num_hidden_layers)
        self._replace(kept.passed_on(buckets), self.start_weight_update)
        if kept.tensors:
            self._replace([kept.tensors], self.start_draft_weight_update)
        elif not self.nemorl_told_of_mtp:
            self.nemorl_told_of_mtp = True
            logger.warning(
                "the trainer sends no MTP layers: those that guess stay as they were stored, and fewer of their "
                "guesses are accepted as the policy moves away (backend megatron trains them: policy.backend.mtp)"
            )

    def _replace(self, buckets: Iterable[Mapping[str, torch.Tensor]], start: Callable[[], None]) -> None:
        """By vLLM's own steps of an update, of the model that ``start`` chooses."""
        start()
        engine = self.weight_transfer_engine
        model, config = engine.model, engine.model_config
        try:
            self.update_weights({"buckets": buckets})
        except Exception:
            # vLLM takes the update for closed; layers that are half way must be finished, or no other can begin.
            engine.set_weight_update_target(model, config)
            with set_current_vllm_config(self.vllm_config):
                engine.finish_weight_update()
            engine.reset_weight_update_target()
            raise
        self.finish_weight_update()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _fetched(handle: WeightHandle) -> CountedBuckets:
    """All of a model's tensors. Of all transports the one within a process alone cannot fail on the way, and may make
    tensors as it goes."""
    return CountedBuckets(handle.buckets() if handle.is_in_process else list(handle.buckets()))


def _weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors the model multiplies with: its parameters, packed copies, and the adapters that stand beside them."""
    yield from model.parameters()
    yield from packed_tensors(model)
    for layer in model.modules():
        if isinstance(layer, BaseLayerWithLoRA):
            yield from itertools.chain(layer.lora_a_stacked, layer.lora_b_stacked)
