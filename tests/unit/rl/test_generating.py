"""Text in, text out: how long sequences a standalone engine is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.types import Completion, GenerationRequest
from nemorl_rl.evaluation import generating
from nemorl_rl.models.tiny import write_tiny_model


class Silent:
    """An engine that says nothing."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        return [[Completion((), (), "length")] for _ in requests]

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize(("context", "limit"), [(8192, 5000 + 16), (5010, 5010)])
def test_sequences_are_as_long_as_the_prompts_need(
    context: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def engine(_generation: GenerationConfig, policy: PolicyConfig) -> Silent:
        asked.append(policy.max_sequence_tokens)
        return Silent()

    monkeypatch.setattr(generating, "standalone_generation", engine)
    model = write_tiny_model(tmp_path, max_position_embeddings=context)
    prompts = ["1+1=", "7" * 5000]  # a token for each character
    generating.respond(str(model), prompts, generation=GenerationConfig(max_new_tokens=16), chat=False)
    assert asked == [limit]
