"""The Tinker server's models on real engines: what is trained is what is sampled, saved and brought back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.contracts import AdamStep
from nemorl.errors import UsageError
from nemorl_agents.tinker.losses import loss_named
from nemorl_agents.tinker.models import Datum, ModelSettings, NewModel, SampleRequest
from nemorl_agents.tinker.trained import TrainedModels, trained_models
from nemorl_dtensor.model import load_model
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors.engines.model_folder import save_tokenizer
from recorded_messages import Raises
from torch import Tensor

pytestmark = pytest.mark.slow

CROSS_ENTROPY = loss_named("cross_entropy")
ADAM = AdamStep(lr=1e-2)
FIRST, SECOND = NewModel("base", rank=4, seed=1), NewModel("base", rank=2, seed=2, train_mlp=False, train_unembed=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedModels]:
    """A model with a head of its own, whose log-probs are far from uniform."""
    shape, folder = tmp_path_factory.mktemp("shape"), tmp_path_factory.mktemp("base")
    write_tiny_model(shape, hidden_size=32, intermediate_size=64, tie_word_embeddings=False)
    model = load_model(PolicyConfig(model_name=str(shape), init="random"), seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    save_tokenizer(folder, str(shape))
    settings = ModelSettings(str(folder), "base", 64, 4, "float32", {"backend": {"name": "hf", "snapshots": 2}})
    with trained_models(settings) as found:
        yield found


def datum(*ids: int, weight: float = 1.0) -> Datum:
    targets = torch.tensor(ids[1:])
    return Datum(ids[:-1], {"target_tokens": targets, "weights": torch.full(targets.shape, weight)})


DATA = [datum(5, 6, 7, 8, 9), datum(9, 8, 7, weight=-0.5), datum(3, 3, 4, 11, 12, 13)]


def learn(models: TrainedModels, name: str, steps: int = 3) -> list[Tensor]:
    """Log-probs of the first datum before each update, whose gradient is of two calls."""
    found = []
    for _ in range(steps):
        found.append(models.forward_backward(name, DATA[:2], CROSS_ENTROPY).logprobs[0])
        models.forward_backward(name, DATA[2:], CROSS_ENTROPY)
        models.step(name, ADAM)
    return found


def said(models: TrainedModels, name: str) -> list[Tensor]:
    return list(models.forward(name, DATA, CROSS_ENTROPY).logprobs)


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_two_models_learn_what_each_learns_alone(models: TrainedModels) -> None:
    alone = {}
    for name, new in (("a:1", FIRST), ("a:2", SECOND)):
        models.create(name, new)
        alone[name] = learn(models, name)
        models.free(name)
    for name, new in (("b:1", FIRST), ("b:2", SECOND)):
        models.create(name, new)
    together: dict[str, list[Tensor]] = {"b:1": [], "b:2": []}
    for _ in range(3):
        for name, heard in together.items():
            heard.append(models.forward_backward(name, DATA[:2], CROSS_ENTROPY).logprobs[0])
        models.sample("base", None, [SampleRequest((5, 6), max_tokens=3, seed=1)])
        for name in together:
            models.forward_backward(name, DATA[2:], CROSS_ENTROPY)
            models.step(name, ADAM)
    assert_equal(together["b:1"], alone["a:1"])
    assert_equal(together["b:2"], alone["a:2"])
    assert not torch.equal(alone["a:1"][2], alone["a:2"][2])
    for name in together:
        models.free(name)


def test_a_model_comes_back_as_it_was(models: TrainedModels, tmp_path: Path) -> None:
    models.create("c:1", FIRST)
    learn(models, "c:1", 2)
    models.save("c:1", tmp_path / "saved", optimizer=True)
    expected = learn(models, "c:1", 2)
    models.create("c:2", FIRST)
    models.load("c:2", tmp_path / "saved", optimizer=True)
    assert_equal(learn(models, "c:2", 2), expected)
    # Without the optimizer's state the weights are the same, and the second step is another one.
    models.create("c:3", FIRST)
    models.load("c:3", tmp_path / "saved", optimizer=False)
    anew = learn(models, "c:3", 2)
    assert torch.equal(anew[0], expected[0])
    assert not torch.equal(anew[1], expected[1])
    models.create("c:4", SECOND)
    with pytest.raises(UsageError):
        models.load("c:4", tmp_path / "saved", optimizer=True)
    for name in ("c:1", "c:2", "c:3", "c:4"):
        models.free(name)


def test_a_pass_that_is_refused_changes_nothing(models: TrainedModels, raises: Raises) -> None:
    for name in ("d:1", "d:2"):
        models.create(name, FIRST)
        models.forward_backward(name, DATA[:2], CROSS_ENTROPY)
    with raises(UsageError, "data[0]", 64):
        models.forward_backward("d:1", [datum(*[5] * 66)], CROSS_ENTROPY)
    with raises(UsageError, "eps"):
        models.step("d:1", AdamStep(lr=1e-2, eps=0.0))
    for name in ("d:1", "d:2"):
        models.step(name, ADAM)
    assert_equal(said(models, "d:1"), said(models, "d:2"))
    for name in ("d:1", "d:2"):
        models.free(name)


def test_snapshots_are_sampled_as_they_were_trained(models: TrainedModels, tmp_path: Path) -> None:
    """Of more snapshots than the engine holds, each while its model has gone on."""
    models.create("e:1", FIRST)
    trained, folders = [], [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        models.snapshot("e:1", folder)
        trained.append(said(models, "e:1")[0])
        learn(models, "e:1", 1)
    request = SampleRequest((5, 6, 7, 8, 9), max_tokens=4, seed=3, prompt_logprobs=True, topk_prompt_logprobs=3)
    for number in (2, 0, 1, 2, 0):
        (found,) = models.sample("base", folders[number], [request])
        assert found.prompt_logprobs is not None
        assert math.isnan(found.prompt_logprobs[0])
        torch.testing.assert_close(torch.tensor(found.prompt_logprobs[1:]), trained[number], atol=1e-5, rtol=0)
        assert found.topk_prompt is not None
        assert found.topk_prompt[0] is None
        for place, (top, logprob) in enumerate(zip(found.topk_prompt[1:], trained[number].tolist(), strict=True)):
            assert top is not None
            assert [each for _, each in top] == sorted((each for _, each in top), reverse=True)
            named = dict(top).get(request.token_ids[place + 1], -math.inf)
            assert named == pytest.approx(logprob, abs=1e-5) or logprob < top[-1][1]
    models.free("e:1")


def test_stops_seeds_and_the_likeliest_tokens_of_samples(models: TrainedModels) -> None:
    def sampled(**fields: object) -> list[tuple[int, ...]]:
        request = SampleRequest((5, 6), **{"max_tokens": 8, "seed": 1, "stop": (), **fields})  # type: ignore[arg-type]
        (found,) = models.sample("base", None, [request])
        return [tuple(sequence.token_ids) for sequence in found.sequences]

    twice = sampled(num_samples=2)
    assert [len(ids) for ids in twice] == [8, 8]  # [] ends nothing, not even the model's own end
    assert twice[0] != twice[1]
    assert sampled(num_samples=2) == twice
    assert sampled() == twice[:1]
    stop = twice[0][2]
    (ended,) = sampled(stop=(stop,))
    assert ended == twice[0][: twice[0].index(stop) + 1]
    request = SampleRequest((5, 6), max_tokens=4, seed=1, stop=(), temperature=0.7, topk_sample_logprobs=2)
    (found,) = models.sample("base", None, [request])
    (sequence,) = found.sequences
    assert sequence.topk is not None
    for token, logprob, top in zip(sequence.token_ids, sequence.logprobs, sequence.topk, strict=True):
        assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
    greedy = SampleRequest((5, 6), max_tokens=4, seed=1, stop=(), temperature=0.0, topk_sample_logprobs=1)
    (sequence,) = models.sample("base", None, [greedy])[0].sequences
    assert [top[0][0] for top in sequence.topk or []] == list(sequence.token_ids)
