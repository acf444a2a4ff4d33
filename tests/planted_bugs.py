"""Bugs planted in a real training backend, and where a comparison with a sound engine must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_rl.audit.divergence import LayerComparison, Parting, compare_activations
from nemorl_tensors.engines.observing import Place
from nemorl_testing.models import tiny_model
from torch import Tensor, nn

PROMPT = tuple((7 * place) % 80 + 5 for place in range(23))
REQUEST = GenerationRequest(PROMPT, SamplingParams(max_new_tokens=8), (1,))
LAYERS, WINDOW = 4, 6
HALVED = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
"""Positions count half."""

Plant = Callable[[Any, ExitStack], None]
"""(transformers model, what takes the bug out again)"""


def policy(precision: str = "float32", **changes: Any) -> PolicyConfig:
    """Of a model of four layers, trained by ``dtensor``."""
    data = {"model_name": str(tiny_model(num_hidden_layers=LAYERS)), "max_sequence_tokens": 64, "precision": precision}
    return PolicyConfig.model_validate({**data, **changes})


def build_trainer(**changes: Any) -> Any:
    found = policy(**changes)
    return found.backend.build(found, WorkerContext(), reference=False)


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name)
    stack.callback(setattr, owner, name, before)
    setattr(owner, name, value)


def attention_scale(model: Any, stack: ExitStack) -> None:
    attention = model.model.layers[2].self_attn
    _set(stack, attention, "scaling", attention.scaling * 1.05)


def attention_window(model: Any, stack: ExitStack) -> None:
    """Token i of layer 1 sees tokens i - 5 ... i alone."""

    def narrow(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        place = torch.arange(kwargs["hidden_states"].shape[1])
        distance = place[:, None] - place[None]
        seen = (distance >= 0) & (distance < WINDOW)
        return args, {**kwargs, "attention_mask": torch.where(seen, 0.0, -torch.inf)[None, None]}

    stack.callback(model.model.layers[1].self_attn.register_forward_pre_hook(narrow, with_kwargs=True).remove)


def norm_epsilon(model: Any, stack: ExitStack) -> None:
    norm = model.model.layers[2].input_layernorm
    _set(stack, norm, "variance_epsilon", norm.variance_epsilon * 10_000)


def norm_plus_one(model: Any, stack: ExitStack) -> None:
    norm = model.model.layers[3].post_attention_layernorm
    sound = norm.forward
    _set(stack, norm, "forward", lambda states: sound(states) / norm.weight * (1 + norm.weight))


def activation(model: Any, stack: ExitStack) -> None:
    _set(stack, model.model.layers[1].mlp, "act_fn", nn.GELU("tanh"))


def output_bias(model: Any, stack: ExitStack) -> None:
    """The logit of one token is off."""
    handle = model.model.norm.register_forward_hook(lambda _, _inputs, states: states * 1.001)
    stack.callback(handle.remove)


PLANTS: Sequence[tuple[Plant, int | None, str, int]] = [
    (attention_scale, 2, "heads", 1),  # token 0 attends to itself alone, whatever the scale
    (attention_window, 1, "heads", WINDOW),  # the first token with one to see beyond the window
    (norm_epsilon, 2, "input_norm", 0),
    (norm_plus_one, 3, "mlp_norm", 0),
    (activation, 1, "mlp_activation", 0),
    (output_bias, None, "final_norm", 0),
]
"""A bug in the trainer, and the layer, role and token at which it shows."""


@dataclass
class Pair:
    """A trainer, and what a sampler computed from the same weights."""

    trainer: Any
    completion: Completion
    sampled: Mapping[Any, Tensor]

    @classmethod
    def of(cls, trainer: Any, sampler: Any) -> Pair:
        return cls(trainer, *sampler.observe(REQUEST))

    @property
    def token_ids(self) -> list[int]:
        return [*PROMPT, *self.completion.token_ids]

    def compare(self, reference: Any = None) -> LayerComparison:
        trained = self.trainer.observe(self.token_ids)
        return compare_activations(trained, self.sampled, self.token_ids, len(PROMPT), reference)

    def with_bug(self, plant: Plant) -> Parting | None:
        with ExitStack() as stack:
            plant(self.trainer._model, stack)
            return self.compare().parting


def check_all_plants(trainer: Any, sampler: Any) -> None:
    """A sound pair agrees in every tensor; with each bug, it parts where the bug is, and agrees again without it."""
    pair = Pair.of(trainer, sampler)
    sound = pair.compare()
    assert sound.parting is None
    # At least eleven tensors in each layer, the final norm and the logits; those of two float32 engines.
    assert len(sound.differences) >= 11 * LAYERS + 2
    assert max(sound.differences.values()) < 5e-6
    # What was recorded is what was sampled from.
    logits = pair.sampled[Place(None, "logits")][-len(pair.completion.token_ids) :]
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(pair.completion.token_ids)[:, None]).squeeze(1)
    assert chosen.tolist() == pytest.approx(pair.completion.logprobs, abs=1e-4)
    for plant, layer, role, position in PLANTS:
        parting = pair.with_bug(plant)
        assert parting is not None, plant.__name__
        assert (parting.place.layer, parting.place.role) == (layer, role), plant.__name__
        if role != "final_norm":  # some engines compute it for the last token of the prompt alone
            assert parting.position == position, plant.__name__
        assert parting.largest > 10 * parting.tolerance
    assert pair.compare().parting is None


def swapped_at_export(trainer: Any) -> WeightHandle:
    """The trainer's weights, with two rows of the key projection of layer 2 in each other's place."""

    def export() -> Iterator[Mapping[str, Tensor]]:
        for bucket in trainer.export_weights():
            tensors = {name: tensor.detach().clone() for name, tensor in bucket.items()}
            for name, tensor in tensors.items():
                if name == "model.layers.2.self_attn.k_proj.weight":
                    tensor[[3, 4]] = tensor[[4, 3]]
            yield tensors

    return in_process_handle(export, 1)


def check_a_swapped_row(trainer: Any, sampler: Any) -> None:
    """Rows that change places at export are found in the projection that they belong to. Ends with those weights."""
    sampler.update_weights(swapped_at_export(trainer), 1)
    parting = Pair.of(trainer, sampler).compare().parting
    assert parting is not None
    assert (parting.place.layer, parting.place.role, parting.position) == (2, "key", 0)
    assert not parting.is_generated


def check_an_ignored_rotary_factor(sampler: Any) -> None:
    """The sampler scales rotary positions (``HALVED``), the trainer does not: token 0 is not turned, token 1 is."""
    trainer = build_trainer()
    try:
        parting = Pair.of(trainer, sampler).compare().parting
    finally:
        trainer.shutdown()
    assert parting is not None
    assert (parting.place.layer, parting.place.role, parting.position) == (0, "rotated_query", 1)
    assert "rope_scaling" in parting.causes[0]
