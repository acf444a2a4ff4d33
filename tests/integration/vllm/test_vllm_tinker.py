"""The Tinker server's snapshots on vLLM: several adapters on one base, sampled while the trainer has gone on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nemorl.contracts import AdamStep
from nemorl.errors import DataError, UsageError
from nemorl_agents.tinker.losses import loss_named
from nemorl_agents.tinker.models import Datum, ModelSettings, NewModel, Sampled, SampleRequest
from nemorl_agents.tinker.trained import TrainedModels, trained_models
from nemorl_testing.models import tiny_model
from recorded_messages import Raises

pytestmark = [pytest.mark.full, pytest.mark.vllm, pytest.mark.slow]

CROSS_ENTROPY = loss_named("cross_entropy")
TOLERANCE = 1e-3
PROMPT = tuple(range(5, 45))
"""Longer than its log-probs could be if vLLM had room for an adapter at the head."""
REQUEST = SampleRequest(
    PROMPT, max_tokens=4, seed=3, temperature=0.0, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=2
)
RANK = 8


@pytest.fixture(scope="module")
def model() -> Path:
    """An untied Qwen3: vLLM would have room for adapters at its head."""
    return tiny_model(architecture="qwen3", head_dim=32, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def models(model: Path) -> Iterator[TrainedModels]:
    with trained_models(settings(model, "vllm", kv_cache_gib=0.1)) as found:
        yield found


def settings(model: Path, backend: str, **options: float) -> ModelSettings:
    return ModelSettings(
        str(model), "base", 64, RANK, "float32", {"backend": {"name": backend, "snapshots": 2, **options}}
    )


def learn(models: TrainedModels, name: str) -> None:
    targets = torch.tensor(PROMPT[1:])
    models.forward_backward(name, [Datum(PROMPT[:-1], {"target_tokens": targets})], CROSS_ENTROPY)
    models.step(name, AdamStep(lr=1e-2))


def numbers(found: Sampled) -> list[float]:
    """All log-probs of an answer."""
    assert found.prompt_logprobs is not None
    assert found.topk_prompt is not None
    (sequence,) = found.sequences
    assert sequence.topk is not None
    rows = [*found.topk_prompt[1:], *sequence.topk]
    likeliest = [each for row in rows if row is not None for _, each in row]
    return [*found.prompt_logprobs[1:], *sequence.logprobs, *likeliest]


def test_each_snapshot_says_what_transformers_says_of_it(model: Path, models: TrainedModels, tmp_path: Path) -> None:
    """Two ranks, below the engine's and equal to it; three snapshots and the base, of which it holds two at a time."""
    folders: list[Path | None] = [None]
    for rank, steps in ((2, 1), (RANK, 2), (2, 3)):
        name = f"a:{len(folders)}"
        models.create(name, NewModel("base", rank, seed=rank, train_unembed=False))
        for _ in range(steps):
            learn(models, name)
        folders.append(tmp_path / str(len(folders)))
        models.snapshot(name, tmp_path / str(len(folders) - 1))
        learn(models, name)  # it goes on: a snapshot stays what it was
    order = [0, 1, 2, 3, 1, 0, 2]
    found = [models.sample("base", folders[number], [REQUEST])[0] for number in order]
    with trained_models(settings(model, "hf")) as plain:
        wanted = [plain.sample("base", folder, [REQUEST])[0] for folder in folders]
    for number, each in zip(order, found, strict=True):
        assert [s.token_ids for s in each.sequences] == [s.token_ids for s in wanted[number].sequences]
        gap = max(abs(a - b) for a, b in zip(numbers(each), numbers(wanted[number]), strict=True))
        assert gap < TOLERANCE
    apart = [abs(numbers(one)[7] - numbers(other)[7]) for one in wanted for other in wanted if one is not other]
    assert min(apart) > 10 * TOLERANCE  # the right one each


def test_it_samples_while_the_trainer_is_at_work(models: TrainedModels, tmp_path: Path) -> None:
    models.create("b:1", NewModel("base", 4, seed=1, train_unembed=False))
    models.snapshot("b:1", tmp_path / "snapshot")
    request = SampleRequest(PROMPT, max_tokens=4, seed=3)
    answers: list[Sampled] = []
    assert models.samples_apart
    with models._trainer:  # as a pass has it
        thread = threading.Thread(
            target=lambda: answers.extend(models.sample("base", tmp_path / "snapshot", [request]))
        )
        thread.start()
        thread.join(60)
    assert len(answers) == 1


def test_what_the_engine_does_not_apply_is_refused(models: TrainedModels, tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError, "train_unembed"):
        models.create("c:1", NewModel("base", 4, seed=1))
    models.create("c:2", NewModel("base", 4, seed=1, train_unembed=False))
    models.snapshot("c:2", tmp_path / "gone")
    (tmp_path / "gone" / "adapter_model.safetensors").unlink()
    with pytest.raises(DataError):
        models.sample("base", tmp_path / "gone", [REQUEST])


def test_one_snapshot_is_too_few(model: Path, raises: Raises) -> None:
    with (
        raises(UsageError, "snapshots", 2),
        trained_models(ModelSettings(str(model), "base", 64, RANK, "float32", {"backend": {"name": "vllm"}})),
    ):
        pass
