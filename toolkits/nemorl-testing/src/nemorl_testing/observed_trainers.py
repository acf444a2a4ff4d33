"""Checks of training backends that tell what their model computes (capability ``activations``), or are told a part of
it (capability ``routes``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from nemorl_tensors import TokenBatch
from torch import Tensor

from nemorl_testing.activations import ACTIVATIONS, expect_those_of_transformers
from nemorl_testing.backends import build_trainer, difference, weights_of
from nemorl_testing.batches import WeightedNLL
from nemorl_testing.kit import NotApplicable, Subject, expect
from nemorl_testing.models import chosen_experts, load_reference, plain_logprobs, tiny_mixture

TOKENS = (9, 18, 10, 11, 12, 13, 40, 61)


def check_recorded_activations_are_those_of_transformers(subject: Subject) -> None:
    """What is recorded of a sequence is what transformers computes for all its tokens but the last. (DESIGN 5)"""
    if ACTIVATIONS not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'activations'}")
    trainer: Any = build_trainer(subject)
    expect_those_of_transformers(subject, trainer.observe(TOKENS), TOKENS[:-1])


def check_recorded_routes_are_taken_and_routers_learn(subject: Subject) -> None:
    """With router.replay, tokens go to the recorded experts, weighed by routers, which learn. (DESIGN 5)"""
    if "routes" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'routes'}")
    mixture, settings = str(tiny_mixture()), subject.config
    backend = settings.model_copy(update={"router": settings.router.model_copy(update={"replay": True})})
    expect("routes" in backend.asks_of_sampler, "router.replay asks nothing of the sampler")
    trainer = build_trainer(subject, model_name=mixture, backend=backend)
    batch = TokenBatch.from_sequences([TOKENS, TOKENS[3:]], [[False, *[True] * (n - 1)] for n in (8, 5)])
    model = load_reference(mixture)
    own = [chosen_experts(model, ids) for ids in (TOKENS, TOKENS[3:])]
    other = (torch.cat(own) + 1) % 8
    batch = batch.with_tokens(routes=other.to(torch.int16), **dict.fromkeys(("advantages",), torch.ones(13)))
    with torch.no_grad(), _sent(model, torch.split(other, [8, 5])):
        wanted = plain_logprobs(model, batch)
    gap = float((trainer.get_logprobs(batch) - wanted).abs().max())
    expect(gap <= subject.settings.tolerance, f"log-probs are {gap:.3g} from those of the recorded experts")
    if subject.settings.policy.get("lora"):
        return  # adapters learn, and the routers below them rest
    before = weights_of(trainer)
    trainer.train_step(batch, WeightedNLL())
    moved = difference(weights_of(trainer), before)
    still = [name for name in moved if name.endswith("gate.weight") and not moved[name].any()]
    expect(not still, f"{', '.join(still)} have no gradient")


@contextmanager
def _sent(model: Any, routes: Sequence[Tensor]) -> Iterator[None]:
    """Within it, a Qwen3 mixture sends the tokens of its passes, in turn, to these experts [T, L, K]."""
    calls = [0] * len(model.model.layers)

    def send(layer: int, _module: Any, _inputs: Any, output: Any) -> Any:
        logits, choice = output[0], routes[calls[layer]][:, layer]
        calls[layer] += 1
        scores = torch.softmax(logits.float(), -1).gather(1, choice)
        return logits, scores / scores.sum(-1, keepdim=True), choice

    layers = enumerate(model.model.layers)
    hooks = [layer.mlp.gate.register_forward_hook(partial(send, number)) for number, layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
