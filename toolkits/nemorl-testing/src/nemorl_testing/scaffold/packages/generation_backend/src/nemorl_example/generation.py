"""The backend: ``nemorl.contracts.GenerationBackend`` is the specification, ``nemorl_testing`` its tests.

All responses to a prompt grow side by side from one cache; as they begin with the same tokens, nothing is padded. How
tokens are drawn and when a response ends is the same in every backend: ``nemorl_tensors``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import BackendError
from nemorl.types import Completion, GenerationRequest
from nemorl.weights import WeightHandle
from nemorl_rl.data.tokenizer import Tokenizer, end_token_ids
from nemorl_tensors.engines.model_config import name_or_path, read_model_config
from nemorl_tensors.engines.responses import Response, ResponseLimits
from nemorl_tensors.engines.sampling import RowSampler

if TYPE_CHECKING:
    from nemorl.config import PolicyConfig
    from nemorl.resources.worker import WorkerContext


class ExampleGeneration:
    """One process, prompt by prompt."""

    def __init__(
        self, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None, max_rows: int
    ) -> None:
        self._max_rows, self._device = max_rows, worker.device
        self._version = 0
        self._model = load_model(policy, worker, with_weights=weights is None)
        if weights is not None:
            self.update_weights(weights, weights.version)
        tokenizer = Tokenizer.of(policy)
        self._limits = ResponseLimits(
            self._model.get_input_embeddings().num_embeddings,
            policy.max_sequence_tokens,
            end_token_ids(policy.model_name, tokenizer, self._model.generation_config.eos_token_id),
            tokenizer.decode,
        )

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        groups = self._limits.begin_all(requests)
        for group in groups:
            for start in range(0, len(group), self._max_rows):
                self._grow(group[start : start + self._max_rows])
        return [[response.completion() for response in group] for group in groups]

    def update_weights(self, handle: WeightHandle, version: int) -> None:
        names = {name for name, _ in self._model.named_parameters()}
        for bucket in handle.buckets():
            # assign: the tensors are used where they are. In process they are the trainer's own, and nothing is copied.
            tensors = {name: tensor.detach().to(self._device) for name, tensor in bucket.items()}
            unknown = self._model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
            if unknown:
                raise BackendError(f"the model has no {unknown[0]!r}", fix="train and generate with the same model")
            names -= tensors.keys()
        if names:
            raise BackendError(f"no weights were sent for {sorted(names)[0]!r}", fix="export every parameter")
        self._model.tie_weights()
        self._version = version

    def shutdown(self) -> None:
        self._model = None

    def _grow(self, rows: Sequence[Response]) -> None:
        """Let responses to one prompt grow until all have ended."""
        sampler = RowSampler(torch.device(self._device))
        sampler.add([row.sampling for row in rows], [row.seed for row in rows], [0] * len(rows))
        for row in rows:
            row.use(self._version)
        fed = torch.tensor([row.prompt for row in rows], device=self._device)
        cache: Any = None
        while not all(row.is_over for row in rows):
            output = self._model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            tokens, logprobs = sampler.sample(output.logits[:, -1])
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
                if not row.is_over:  # one that has ended draws on, and nobody reads it
                    row.push(token, logprob)
            fed = tokens[:, None]


def load_model(policy: PolicyConfig, worker: WorkerContext, *, with_weights: bool) -> Any:
    """The policy's model; without weights, or with ``init: random``, its parameters are random."""
    from transformers import AutoModelForCausalLM

    config = read_model_config(policy)
    dtype = getattr(torch, policy.precision)
    model: Any
    if with_weights and policy.init == "pretrained":
        model = AutoModelForCausalLM.from_pretrained(name_or_path(policy), config=config, dtype=dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(worker.seed)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(worker.device).eval().requires_grad_(False)
