"""The backend ``hf`` between the turns of a conversation: it computes what is new, and says what it would anyhow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl.weights import in_process_handle
from nemorl_dtensor import HFGenerationConfig
from nemorl_dtensor.decode_llama import LlamaDecoder
from nemorl_dtensor.generation import HFGeneration
from nemorl_dtensor.model import load_model
from nemorl_rl.models.tiny import write_tiny_model
from torch import Tensor

SAMPLED = SamplingParams(max_new_tokens=8)
PROMPTS = [(9, 10, 11, 12), (9, 10, 11, 12, 13, 14), (20,)]
ANSWERS = [(30, 31), (32,), (33, 34, 35, 36, 37)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, intermediate_size=64)


@pytest.fixture
def model(tiny: Path) -> Any:
    loaded = load_model(PolicyConfig(model_name=str(tiny), init="random"), seed=7)
    with torch.no_grad():
        for parameter in loaded.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return loaded


def engine(tiny: Path, model: Any, **options: Any) -> HFGeneration:
    policy = PolicyConfig(model_name=str(tiny), init="random", max_sequence_tokens=128)
    weights = in_process_handle(lambda: iter([dict(model.named_parameters())]), 1)
    return HFGeneration(GenerationConfig(), policy, WorkerContext(), weights, HFGenerationConfig(**options))


class Computed:
    """Tokens of each pass over prompts, whole ones and new parts of them, padding included."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole: list[int] = []
        self.new: list[int] = []
        prefill, go_on = LlamaDecoder._prefill, LlamaDecoder._go_on

        def counting_prefill(decoder: LlamaDecoder, prompts: list[tuple[int, ...]]) -> Any:
            self.whole.append(len(prompts) * max(map(len, prompts)))
            return prefill(decoder, prompts)

        def counting_go_on(decoder: LlamaDecoder, ids: Tensor, recent: Any) -> Tensor:
            self.new.append(ids.numel())
            return go_on(decoder, ids, recent)

        monkeypatch.setattr(LlamaDecoder, "_prefill", counting_prefill)
        monkeypatch.setattr(LlamaDecoder, "_go_on", counting_go_on)


def converse(generator: HFGeneration, turns: int, *, keeps: bool) -> list[list[Completion]]:
    """Each prompt twice, every conversation with the same observation after a turn."""
    states = [(prompt, answer, 2 * index) for index, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True))]
    states = [(prompt, answer, seed + which) for prompt, answer, seed in states for which in (0, 1)]
    said: list[list[Completion]] = [[] for _ in states]
    for turn in range(turns):
        goes_on = keeps and turn < turns - 1
        requests = [GenerationRequest(prompt, SAMPLED, (100 * turn + seed,), goes_on) for prompt, _, seed in states]
        found = [completions[0] for completions in generator.generate(requests)]
        for completions, completion in zip(said, found, strict=True):
            completions.append(completion)
        states = [
            ((*prompt, *completion.token_ids, *answer), answer, seed)
            for (prompt, answer, seed), completion in zip(states, found, strict=True)
        ]
    return said


@pytest.mark.parametrize("options", [{}, {"max_batch_rows": 2}], ids=["one batch", "two rows at once"])
def test_three_turns_are_those_of_an_engine_that_keeps_nothing(options: Any, tiny: Path, model: Any) -> None:
    kept = converse(engine(tiny, model, **options), 3, keeps=True)
    anew = converse(engine(tiny, model, **options), 3, keeps=False)
    for one, other in zip(kept, anew, strict=True):
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
        for a, b in zip(one, other, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_of_the_second_turn_only_what_is_new_is_computed(
    tiny: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, generator = Computed(monkeypatch), engine(tiny, model)
    converse(generator, 1, keeps=False)
    assert computed.whole == [3 * 6]  # three prompts of up to 6 tokens, once each though asked twice
    converse(generator, 2, keeps=True)
    assert computed.whole == [3 * 6] * 2
    # The last token of a response has not been computed, and up to 5 follow it: 6 rows of 1 + 5.
    assert computed.new == [6 * 6]


def test_after_the_last_turn_and_after_new_weights_nothing_is_kept(tiny: Path, model: Any) -> None:
    generator = engine(tiny, model)
    converse(generator, 2, keeps=True)
    decoder: Any = generator._versions.newest.batch._decoder
    assert decoder._turns._turns == {}
    assert generator.held_bytes()["cache"] == 0
    [[said]] = generator.generate([GenerationRequest(PROMPTS[0], SAMPLED, (1,), goes_on=True)])
    (kept,) = decoder._turns._turns
    assert kept == (*PROMPTS[0], *said.token_ids[:-1])
    config = model.config  # keys and values of each layer, float32
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * decoder._head_size
    assert generator.held_bytes()["cache"] == per_token * len(kept)
    generator.update_weights(in_process_handle(lambda: iter([dict(model.named_parameters())]), 2), 2)
    assert generator._versions.newest.batch._decoder is None


def test_what_is_kept_is_bounded(tiny: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 40 tokens: of six conversations of 12 and more only the last two can be kept."""
    computed, generator = Computed(monkeypatch), engine(tiny, model, kv_cache_tokens=40)
    kept = converse(generator, 2, keeps=True)
    decoder: Any = generator._versions.newest.batch._decoder
    assert sum(computed.new) < 6 * 6
    assert decoder._turns._size <= 40
    anew = converse(engine(tiny, model, kv_cache_tokens=40), 2, keeps=False)
    assert [[c.token_ids for c in one] for one in kept] == [[c.token_ids for c in other] for other in anew]
