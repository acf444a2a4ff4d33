"""Checks of generation backends that can be asked what their model computes (capability ``activations``)."""

from __future__ import annotations

from typing import Any

from nemorl.errors import BackendError
from nemorl.types import GenerationRequest, SamplingParams

from nemorl_testing.activations import ACTIVATIONS, expect_those_of_transformers
from nemorl_testing.backends import shared_generator
from nemorl_testing.kit import NotApplicable, Subject, expect

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


def _observable(subject: Subject) -> Any:
    if ACTIVATIONS not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'activations'}")
    return shared_generator(subject)


def _observed(engine: Any) -> Any:
    try:
        return engine.observe(REQUEST)
    except BackendError as error:  # it is spread over devices, or compiled, with these options
        raise NotApplicable(f"the engine refuses: {error.message}") from error
