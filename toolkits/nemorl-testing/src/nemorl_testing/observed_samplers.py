"""Checks of generation backends that tell what their model computes (capabilities ``activations`` and ``routes``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from nemorl.errors import BackendError
from nemorl.types import GenerationRequest, SamplingParams

from nemorl_testing.activations import ACTIVATIONS, expect_those_of_transformers
from nemorl_testing.backends import build_generator, reference, shared_generator
from nemorl_testing.kit import NotApplicable, Subject, expect
from nemorl_testing.models import chosen_experts, tiny_mixture

REQUEST = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=6, ignore_eos=True), (3,))


def check_an_observed_response_is_an_ordinary_one(subject: Subject) -> None:
    """The response whose computation is recorded is that of generate, and the next one is not recorded. (DESIGN 5)"""
    engine: Any = _observable(subject)
    [[wanted]] = engine.generate([REQUEST])
    found, first = _observed(engine)
    expect(found.token_ids == wanted.token_ids, f"observed {found.token_ids}, generated {wanted.token_ids}")
    engine.generate([REQUEST])
    again = _observed(engine)[1]
    sizes = [{place: rows.shape for place, rows in one.items()} for one in (first, again)]
    expect(sizes[0] == sizes[1], "a later observation has tensors of other shapes")


def check_recorded_activations_are_those_of_transformers(subject: Subject) -> None:
    """What is recorded of prompt and response is what transformers computes for all but the last token. (DESIGN 5)"""
    completion, found = _observed(_observable(subject))
    expect_those_of_transformers(subject, found, (*REQUEST.token_ids, *completion.token_ids[:-1]))


def check_routes_are_those_of_transformers(subject: Subject) -> None:
    """Where asked for, each token but the last tells the experts that transformers sends it to. (DESIGN 5)"""
    if "routes" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'routes'}")
    mixture = str(tiny_mixture())
    engine, model = build_generator(subject, policy={"model_name": mixture}), reference(mixture)
    asked = replace(REQUEST.sampling, routes=True)
    requests = [replace(REQUEST, sampling=asked, seeds=(3, 4)), replace(REQUEST, token_ids=(5, 6), sampling=asked)]
    *found, [silent] = engine.generate([*requests, REQUEST])
    expect(silent.routes is None, "nobody asked for routes")
    for request, completions in zip(requests, found, strict=True):
        for completion in completions:
            ids, routes = (*request.token_ids, *completion.token_ids), completion.routes
            expect(routes is not None and len(routes) == len(ids), f"{len(ids)} tokens have the routes {routes}")
            assert routes is not None
            given, wanted = torch.from_numpy(routes).long().sort(-1)[0], chosen_experts(model, ids)
            expect(bool((given[-1] == -1).all()), f"the last token, which nobody computed, went to {given[-1]}")
            expect(torch.equal(given[:-1], wanted[:-1]), f"tokens went to {given[:-1]}, expected {wanted[:-1]}")


def _observable(subject: Subject) -> Any:
    if ACTIVATIONS not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'activations'}")
    return shared_generator(subject)


def _observed(engine: Any) -> Any:
    try:
        return engine.observe(REQUEST)
    except BackendError as error:  # it is spread over devices, or compiled, with these options
        raise NotApplicable(f"the engine refuses: {error.message}") from error
