"""A tiny model that sees, as the trainer has it: what vLLM samples is compared with its scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from nemorl.config import PolicyConfig
from nemorl.config.models import LoraConfig
from nemorl.media import Media, is_media
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_dtensor.model import load_model, sight_of
from nemorl_dtensor.model_head import Scorer
from nemorl_dtensor.model_lora import Adapters
from nemorl_dtensor.published_names import PublishedNames
from nemorl_media.expansion import expanded_prompt
from nemorl_media.sight import Sight
from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.engines.rows import to_rows
from nemorl_testing.seeing import drawing, tiny_sight
from transformers import AutoTokenizer

SAMPLED = SamplingParams(max_new_tokens=10, prompt_logprobs=True, ignore_eos=True)


class Trainer:
    """The model in ``nemorl_dtensor``."""

    def __init__(self, kind: str, lora: LoraConfig | None = None) -> None:
        """
        Args:
            kind: Of ``tiny_sight``.
            lora: Train adapters, which are drawn at random.
        """
        self.kind = kind
        self.folder: Path = tiny_sight(kind)
        policy = PolicyConfig(model_name=str(self.folder))
        self.model = load_model(policy)
        found = sight_of(self.model, policy)
        assert found is not None
        self.sight: Sight = found
        self._adapters = None if lora is None else Adapters(self.model, lora, seed=0)
        self.change("lora_", seed=0, by=0.05)
        self.scorer = Scorer.find(self.model, sight=found)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def drawings(self) -> list[Media]:
        """Three, of which the first and the last have one size."""
        sizes = ((1, 90, 60), (2, 40, 100), (3, 90, 60))
        return [self.sight.family.named(drawing(*size)) for size in sizes]

    @property
    def placeholder(self) -> int:
        return self.sight.family.placeholders["image"]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def request(
        self, items: Sequence[Media], text: str, sampling: SamplingParams = SAMPLED, seeds: tuple[int, ...] = (1, 2)
    ) -> GenerationRequest:
        """A user's message of items and a text."""
        parts = [*({"type": "image"} for _ in items), {"type": "text", "text": text}]
        said = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        family, decode = self.sight.family, self._tokenizer.convert_ids_to_tokens
        ids = expanded_prompt(said, items, family, self.encode, decode)
        return GenerationRequest(tuple(ids), sampling, seeds, media=tuple(items))

    def logprobs(self, request: GenerationRequest, response: Sequence[int]) -> torch.Tensor:
        """Of every token of prompt and response; 0 for the first, and where an item stands."""
        ids = [*request.token_ids, *response]
        batch = TokenBatch.from_sequences([ids], [[not is_media(token) for token in ids]], media=request.media)
        rows = to_rows(batch, packed=False)
        found = torch.zeros(len(ids))
        with torch.no_grad():
            found[rows.targets] = self.scorer.score(rows, 1.0)
        return found

    def gaps(self, requests: Sequence[GenerationRequest], groups: Sequence[Sequence[Completion]]) -> list[float]:
        """The largest difference in nats of each completion's log-probs, those of its prompt included if they are
        there."""
        worst = []
        for request, group in zip(requests, groups, strict=True):
            for completion in group:
                wanted, prompt = self.logprobs(request, completion.token_ids), len(request.token_ids)
                found = torch.tensor([*completion.prompt_logprobs, *completion.logprobs])
                worst.append(float((found - wanted[-len(found) :]).abs().max()))
                assert len(found) in (len(wanted), len(wanted) - prompt)
        return worst

    def change(self, part: str, seed: int, by: float | None = None) -> None:
        """Move the weights whose names have this part, by half their deviation unless it is said."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if part in name:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(noise * (0.5 * parameter.std() if by is None else by))

    def export(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """The weights under the names that generators know, in two buckets."""
        names = PublishedNames(self.model)
        found = dict(names.published((name, p.detach()) for name, p in self.model.state_dict().items()))
        half = len(found) // 2
        yield dict([*found.items()][:half])
        yield dict([*found.items()][half:])

    def handle(self, version: int) -> WeightHandle:
        if self._adapters is None:
            return in_process_handle(self.export, version)
        return WeightHandle(in_process_handle(None, 0).transport, version, self._adapters.published, "adapters")
