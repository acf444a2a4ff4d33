"""What of the weights that come in process is the engine's own: it leaves when the engine sleeps, the rest stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nemorl.config import GenerationConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_dtensor import HFGenerationConfig
from nemorl_dtensor.generation import HFGeneration
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.parking import held_alone

from .conftest import Build

LORA = {"rank": 4, "target_modules": ["q_proj", "down_proj"]}
REQUESTS = [GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=12, ignore_eos=True), (1, 2))]


def handle(trainer: Any, version: int) -> WeightHandle:
    return in_process_handle(trainer.export_weights, version)


def engine(trainer: Any, pretrained: Path) -> HFGeneration:
    policy = trainer._policy.model_copy(update={"model_name": str(pretrained)})
    return HFGeneration(GenerationConfig(), policy, WorkerContext(), handle(trainer, 1), HFGenerationConfig())


def merged_bytes(trainer: Any) -> int:
    config = trainer._model.config
    heads = config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
    # float32: q_proj [heads, hidden] and down_proj [hidden, feed-forward] of each layer
    return 4 * config.num_hidden_layers * config.hidden_size * (heads + config.intermediate_size)


def test_merged_adapters_are_its_own_and_leave_when_it_sleeps(build: Build, pretrained: Path) -> None:
    trainer = build(lora=LORA)
    generator = engine(trainer, pretrained)
    before = generator.generate(REQUESTS)
    exported = {name: tensor.clone() for bucket in trainer.export_weights() for name, tensor in bucket.items()}
    assert generator.held_bytes()["weights"] == merged_bytes(trainer)
    generator.sleep(1)
    assert generator.held_bytes() == {"weights": 0, "cache": 0}
    again = {name: tensor for bucket in trainer.export_weights() for name, tensor in bucket.items()}
    assert all(torch.equal(exported[name], again[name]) for name in exported), "the trainer's weights stay"
    generator.wake(["weights"])
    assert generator.generate(REQUESTS) == before


def test_new_weights_take_the_place_of_those_that_are_away(
    build: Build, pretrained: Path, batch: TokenBatch, weighted_nll: Any
) -> None:
    trainer = build(lora=LORA)
    generator = engine(trainer, pretrained)
    generator.sleep(1)
    for _ in range(3):
        trainer.train_step(batch, weighted_nll)
    generator.update_weights(handle(trainer, 2), 2)
    generator.wake(["weights"])
    assert generator.held_bytes()["weights"] == merged_bytes(trainer)
    [[found, _]], [[wanted, _]] = generator.generate(REQUESTS), engine(trainer, pretrained).generate(REQUESTS)
    assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)


def test_weights_that_are_trained_as_they_are_sampled_from_stay_the_trainers(build: Build, pretrained: Path) -> None:
    trainer = build()
    generator = engine(trainer, pretrained)
    generator.generate(REQUESTS)
    assert generator.held_bytes()["weights"] == 0
    generator.sleep(1)
    assert len(trainer.get_logprobs(TokenBatch.from_sequences([(9, 18, 10)], [[False, True, True]]))) == 3


def test_memory_is_held_alone_if_no_other_tensor_lies_in_it() -> None:
    made, lent, viewed = (torch.zeros(6) for _ in range(3))
    view = viewed[2:]
    assert [tensor is made for tensor in held_alone([made, lent.detach(), viewed])] == [True]
    halves = [torch.nn.Parameter(half, requires_grad=False) for half in torch.zeros(6).split(3)]
    assert len(held_alone(halves)) == 2, "they hold it together"
    assert held_alone(halves[:1]) == []
    assert view.shape == (4,)
