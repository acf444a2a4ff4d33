"""The model that a generator runs: with weights of its own, or with those of a trainer in this process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from nemorl.media import Media, is_media
from nemorl_tensors import TokenBatch
from nemorl_tensors.devices import empty_cache
from nemorl_tensors.engines.decoding import Decoder
from nemorl_tensors.engines.observing import Recorder
from nemorl_tensors.engines.parking import Parking, held_alone
from nemorl_tensors.engines.rows import default_microbatch_tokens, plan_microbatches, to_rows
from nemorl_tensors.engines.steps import PLACE, with_places
from torch import Tensor

from nemorl_dtensor.decode import build_decoder
from nemorl_dtensor.decode_hf import cache_name
from nemorl_dtensor.generation_weights import bind_weights, empty_model, held_digests
from nemorl_dtensor.model import load_model, sight_of
from nemorl_dtensor.model_head import Scorer
from nemorl_dtensor.observing import observed_decoding
from nemorl_dtensor.published_names import PublishedNames
from nemorl_dtensor.routing import Routers, obstacle
from nemorl_dtensor.verification import verify

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import Digest, WeightHandle


class LiveModel:
    """A model and one version of its weights."""

    def __init__(
        self, policy: PolicyConfig, worker: WorkerContext, turn_tokens: int, *, is_empty: bool, copies: bool
    ) -> None:
        """
        Args:
            policy: The model.
            worker: Device and seed.
            turn_tokens: Tokens of conversations that a decoder may keep.
            is_empty: Without weights until ``bind``; else with those of the policy's files.
            copies: Weights are copied even where the memory that they come in could be shared.
        """
        self.device = torch.device(worker.device)
        self._max_tokens, self._turn_tokens, self._copies = policy.max_sequence_tokens, turn_tokens, copies
        self._parking = Parking()
        self._own: list[Tensor] = []
        """Parameters whose memory no trainer shares."""
        self._observed: Decoder | None = None
        self._model: Any
        """``None`` once shut down."""
        if is_empty:
            self._model = empty_model(policy, worker.device)
        else:
            self._model = load_model(policy, worker.device, worker.seed)
            self._own = [*self._model.parameters()]
        self.sight = sight_of(self._model, policy)
        """Where the model sees or hears."""
        tells = bool(cache_name(self._model)) and not obstacle(self._model)
        self.routers = Routers.of(self._model) if tells else None
        """Of a mixture, where its experts can be told."""
        self.vocabulary: int = self._model.get_input_embeddings().num_embeddings
        self.declared_ends = (
            self._model.generation_config.eos_token_id,
            getattr(self._model.config, "eos_token_id", None),
        )

    @property
    def placeholders(self) -> frozenset[int]:
        """Tokens that stand for images and sounds; empty where the model reads text alone."""
        return frozenset() if self.sight is None else frozenset(self.sight.family.stand_ins.values())

    def bind(self, handle: WeightHandle) -> int:
        """Take these weights; bytes that were read."""
        read = bind_weights(self._model, self._names, handle, self.device, copies=self._copies)
        parameters = [*self._model.parameters()]
        # A trainer in this process lends what it has in the right form, and hands over what it made for the purpose.
        self._own = held_alone(parameters) if handle.is_in_process else parameters
        self._parking.renewed("weights")
        return read

    def held_digests(self, names: Collection[str]) -> dict[str, Digest]:
        """Digests of its weights."""
        self._parking.require_content("weights")
        return held_digests(self._model, self._names, names)

    @contextmanager
    def observed(self, recorder: Recorder) -> Iterator[None]:
        """Within it, what the next decoder computes is recorded."""
        try:
            with observed_decoding(self._model, self._max_tokens, recorder) as self._observed:
                yield
        finally:
            self._observed = None

    def decoder(self) -> Decoder:
        """One without rows."""
        self._parking.require_content("weights")
        if self._observed is not None:
            return self._observed
        return build_decoder(self._model, self._max_tokens, self._turn_tokens, self.sight, self.routers)

    def prompt_logprobs(
        self, prompts: Sequence[tuple[int, ...]], media: Mapping[int, Media]
    ) -> list[tuple[float, ...]]:
        """Of each token of prompts."""
        return prompt_logprobs(self._scorer, prompts, media)

    def leave(self, *, forget: bool) -> None:
        """Weights of its own give their device memory back."""
        self._parking.leave("weights", self.own_tensors(), forget=forget)
        empty_cache()

    def come_back(self) -> None:
        self._parking.come_back("weights")

    def own_tensors(self) -> Iterator[Tensor]:
        """Those that no trainer shares."""
        yield from (parameter.detach() for parameter in self._own)

    def forget(self) -> None:
        """Let go of the weights."""
        self._model, self._own, self.sight, self.routers = None, [], None, None
        vars(self).pop("_scorer", None)
        vars(self).pop("_names", None)

    @cached_property
    def _scorer(self) -> Scorer:
        scorer = Scorer.find(self._model, sight=self.sight)
        verify(self._model, scorer, scorer.score)
        return scorer

    @cached_property
    def _names(self) -> PublishedNames:
        return PublishedNames(self._model)


@torch.inference_mode()
def prompt_logprobs(
    scorer: Scorer, prompts: Sequence[tuple[int, ...]], media: Mapping[int, Media]
) -> list[tuple[float, ...]]:
    """float32 nats of ``softmax(logits)`` for every token of each prompt, 0.0 for its first, and for images and sounds.

    Args:
        scorer: The model.
        prompts: Token ids, not empty.
        media: Images and sounds in them, by name.
    """
    device = scorer.weight.device
    masks = [[False, *(not is_media(token) for token in prompt[1:])] for prompt in prompts]
    batch = with_places(TokenBatch.from_sequences(prompts, masks, media=media.values()))
    found = torch.zeros(batch.num_tokens)
    for members in plan_microbatches(batch, default_microbatch_tokens(device.type)):
        part = batch.select(members)
        rows = to_rows(part, packed=False)
        if rows.targets.numel():
            found[part[PLACE][rows.targets]] = scorer.score(rows.to(device), 1.0).cpu()
    return [tuple(piece.tolist()) for piece in torch.split(found, batch.lengths.tolist())]
