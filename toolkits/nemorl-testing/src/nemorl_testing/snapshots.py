"""Checks of engines that hold several versions of the weights, or of adapters (``nemorl_rl.serving.snapshots``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from nemorl.contracts import GenerationBackend, RequestBackend
from nemorl.types import Completion, GenerationRequest
from nemorl_rl.serving.snapshots import VersionNotHeldError

from nemorl_testing.backends import build_generator, require_in_process
from nemorl_testing.kit import NotApplicable, Subject, expect
from nemorl_testing.models import response_logprobs
from nemorl_testing.single_requests import ATTEMPTS, LIMIT_S, LONG, ONE_LONG, PROMPTS, SAMPLED
from nemorl_testing.versioned_weights import Weights, policy_of, two_weights


def check_a_named_version_is_sampled_from(subject: Subject) -> None:
    """A request is sampled from the weights that it names, else from the newest, whatever became of the trainer's own
    tensors meanwhile. (DESIGN 5)"""
    models = [weights.model for weights in two_weights(subject)]
    trained, new = two_weights(subject)
    engine = _engine(subject, trained)
    with torch.no_grad():  # as an optimizer does: into the tensors that the engine was given
        for name, tensor in trained.tensors.items():
            tensor.copy_(new.tensors[name])
    engine.update_weights(trained.handle(1), 1)
    for version in (None, 0, 1, 0):
        drawn_from = 1 if version is None else version
        request = GenerationRequest(PROMPTS[0], SAMPLED, (1, 2), version=version)
        [found] = engine.generate([request])
        for completion in found:
            _expect_logprobs(models[drawn_from], request, completion, subject)
        _expect_version(found, drawn_from)


def check_a_version_that_is_not_held_is_refused_by_name(subject: Subject) -> None:
    """Weights that never came, or were dropped, are refused with a VersionNotHeldError that lists those held. (DESIGN
    5)"""
    weights, _ = two_weights(subject)
    engine = _engine(subject, weights)
    for version in (1, 2):
        engine.update_weights(weights.handle(version), version)
    for version in (0, 3):
        try:
            engine.generate([GenerationRequest(PROMPTS[0], SAMPLED, version=version)])
        except VersionNotHeldError as error:
            expect("1, 2" in error.message, f"versions 1 and 2 are there, and the error says: {error.message}")
        else:
            expect(False, f"a request for version {version} was answered where 1 and 2 are")
    expect(len(engine.generate([GenerationRequest(PROMPTS[0], SAMPLED)])) == 1, "generate fails after a bad request")


def check_running_requests_keep_the_version_that_they_name(subject: Subject) -> None:
    """An update changes no running request that names its weights; one whose weights it drops fails. (DESIGN 5)"""
    if "submit" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'submit'}")
    weights = two_weights(subject)
    engine = _engine(subject, weights[0])
    assert isinstance(engine, RequestBackend)
    wanted = engine.submit(replace(LONG, version=0)).result(LIMIT_S)
    for version in range(ATTEMPTS):
        kept, follower = engine.submit(replace(ONE_LONG, version=version)), engine.submit(ONE_LONG)
        # More rows than an engine of small batches takes at once: it outlasts those that the next one waits for.
        dropped = engine.submit(replace(ONE_LONG, seeds=tuple(range(8)), version=max(0, version - 1)))
        engine.submit(GenerationRequest(PROMPTS[2], replace(SAMPLED, max_new_tokens=2))).result(LIMIT_S)
        engine.update_weights(weights[(version + 1) % 2].handle(version + 1), version + 1)
        _expect_version(kept.result(LIMIT_S), version)
        last = follower.result(LIMIT_S)[0].weight_versions[-1]
        expect(last in (version, version + 1), f"weights {version} and {version + 1} were the newest, not {last}")
        if version == 0:
            expect(_tokens(kept.result()) == _tokens(wanted)[:1], "other tokens than without an update")
        elif isinstance(dropped.exception(LIMIT_S), VersionNotHeldError):
            return
    expect(False, f"no request failed whose weights an update dropped, in {ATTEMPTS} attempts")


def _engine(subject: Subject, weights: Weights) -> GenerationBackend:
    """One that holds two versions, of which these are version 0."""
    require_in_process(subject)
    return build_generator(subject, weights.handle(0), {"snapshots": 2}, policy_of(weights))


def _expect_logprobs(model: Any, request: GenerationRequest, completion: Completion, subject: Subject) -> None:
    wanted = response_logprobs(model, request.token_ids, completion.token_ids, 1.0)
    gap = max(abs(one - other) for one, other in zip(completion.logprobs, wanted, strict=True))
    seen = f"asked for version {request.version}, the log-probs are {gap:.3g} from those of its weights"
    expect(gap <= subject.settings.tolerance, seen)


def _expect_version(completions: Sequence[Completion], version: int) -> None:
    for completion in completions:
        seen = f"a request for version {version} was answered by {completion.weight_versions}"
        expect(completion.weight_versions == (version,), seen)


def _tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]
