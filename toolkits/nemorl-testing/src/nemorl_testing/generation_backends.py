"""Checks of generation backends: what they sample and what they say its log-prob was, against plain transformers."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from nemorl.contracts import GenerationBackend
from nemorl.contracts.memory import SleepingBackend, WeightsForgottenError
from nemorl.errors import BackendError, NemorlError
from nemorl.media import Media
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl.weights import IN_PROCESS
from nemorl_rl.data.tokenizer import Tokenizer

from nemorl_testing.backends import (
    MAX_SEQUENCE_TOKENS,
    build_generator,
    in_process_copies,
    in_process_weights,
    model_folder,
    other_model,
    reference,
    require_in_process,
    shared_generator,
)
from nemorl_testing.batches import FIRST_TEXT_TOKEN
from nemorl_testing.kit import NotApplicable, Subject, expect
from nemorl_testing.models import greedy_continuation, load_reference, response_logprobs

PROMPTS = ((9, 18, 10), (11, 12, 13, 14, 15, 16, 17, 40), (30,), (61, 60, 20, 21, 61))
SAMPLED = SamplingParams(max_new_tokens=12)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)


def check_one_completion_per_seed(subject: Subject) -> None:
    """One list per request and one completion per seed, in order; an empty call gives an empty list. (DESIGN 5)"""
    backend = shared_generator(subject)
    expect(isinstance(backend, GenerationBackend), f"{type(backend).__name__} lacks a verb of GenerationBackend")
    expect(backend.generate([]) == [], "generate([]) is not []")
    seeds = ((1, 2, 3), (4,), (5, 6), (7,))
    requests = [GenerationRequest(ids, SAMPLED, seed) for ids, seed in zip(PROMPTS, seeds, strict=True)]
    found = backend.generate(requests)
    counts = [len(completions) for completions in found]
    expect(counts == [3, 1, 2, 1], f"3, 1, 2 and 1 seeds gave {counts} completions")
    for completion in (c for completions in found for c in completions):
        expect(isinstance(completion, Completion), f"{completion!r} is no Completion")
        ids, logprobs = completion.token_ids, completion.logprobs
        expect(len(ids) == len(logprobs) > 0, f"{len(ids)} token ids, {len(logprobs)} log-probs")
        expect(all(type(i) is int for i in ids) and all(type(p) is float for p in logprobs), f"{completion!r}")
        expect(all(math.isfinite(p) and p <= 0 for p in logprobs), f"log-probs {logprobs}")


def check_logprobs_equal_transformers(subject: Subject) -> None:
    """Log-probs are those of softmax(logits / temperature), at temperature 1 when greedy. (DESIGN 7.2)"""
    for temperature in (1.0, 0.6, 1.5, 0.0):
        _expect_true_logprobs(subject, replace(SAMPLED, temperature=temperature))


def check_truncation_does_not_renormalise(subject: Subject) -> None:
    """top-p, top-k and min-p restrict what is drawn, not the log-prob that is reported. (DESIGN 7.2)"""
    for changes in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}):
        _expect_true_logprobs(subject, replace(SAMPLED, **changes))  # type: ignore[arg-type]


def check_seeds_decide_the_tokens(subject: Subject) -> None:
    """The same seed gives the same tokens in the same call again; other seeds give others. (DESIGN 5)"""
    backend = shared_generator(subject)
    request = GenerationRequest(PROMPTS[0], SAMPLED, tuple(range(8)))
    first, again = (_tokens(backend.generate([request])[0]) for _ in range(2))
    expect(first == again, f"the same seeds gave {first} and then {again}")
    expect(len(set(first)) >= 6, f"8 seeds gave {len(set(first))} different responses: {first}")


def check_rows_do_not_depend_on_their_batch(subject: Subject) -> None:
    """A response is the same alone and among others. (DESIGN 7.1)"""
    backend = shared_generator(subject)
    requests = [GenerationRequest(ids, SAMPLED, (3, 4)) for ids in PROMPTS]
    together = [_tokens(completions) for completions in backend.generate(requests)]
    alone = [_tokens(backend.generate([request])[0]) for request in requests]
    expect(alone == together, f"alone {alone}, together {together}")


def check_greedy_takes_the_most_likely_token(subject: Subject) -> None:
    """Temperature 0 follows the argmax of the plain model. (DESIGN 5)"""
    requests = [GenerationRequest(ids, GREEDY, (0, 1)) for ids in PROMPTS]
    model, stop = reference(model_folder(subject)), _end_ids(subject)
    for request, found in zip(requests, shared_generator(subject).generate(requests), strict=True):
        wanted = greedy_continuation(model, request.token_ids, GREEDY.max_new_tokens, stop)
        expect(_tokens(found) == [wanted] * 2, f"got {_tokens(found)}, the most likely tokens are {wanted}")


def check_length_limits_are_honoured(subject: Subject) -> None:
    """No response is longer than max_new_tokens or the sequence limit; one that is cut says ``length``. (DESIGN 5)"""
    backend, stop = shared_generator(subject), _end_ids(subject)
    long_prompt = tuple([PROMPTS[0][0]] * (MAX_SEQUENCE_TOKENS - 4))
    for prompt, asked, limit in ((PROMPTS[0], 1, 1), (PROMPTS[1], 5, 5), (long_prompt, 50, 4)):
        request = GenerationRequest(prompt, replace(SAMPLED, max_new_tokens=asked), tuple(range(4)))
        for completion in backend.generate([request])[0]:
            ids, ended = completion.token_ids, completion.token_ids[-1] in stop
            expect(len(ids) <= limit, f"{len(ids)} tokens, the limit is {limit}")
            expect(ended or len(ids) == limit, f"{completion} ended after {len(ids)} of {limit} tokens")
            wanted = "stop" if ended else "length"
            expect(completion.finish_reason == wanted, f"finish_reason of {completion} should be {wanted!r}")


def check_end_token_ends_a_response(subject: Subject) -> None:
    """The model's end token is the last of its response, kept in it, and the reason is ``stop``. (DESIGN 5)"""
    request = GenerationRequest(PROMPTS[0], replace(SAMPLED, max_new_tokens=64, temperature=2.0), tuple(range(16)))
    stop, ended = _end_ids(subject), 0
    for completion in shared_generator(subject).generate([request])[0]:
        places = [place for place, token in enumerate(completion.token_ids) if token in stop]
        expect(not places or places == [len(completion.token_ids) - 1], f"{completion} goes on after its end token")
        expect((completion.finish_reason == "stop") == bool(places), f"{completion} gives the wrong reason")
        ended += bool(places)
    if not ended:
        raise NotApplicable("no response of this model met its end token")


def check_stop_token_ids_end_a_response(subject: Subject) -> None:
    """A response ends with the first of its stop_token_ids, which is kept; others are not affected. (DESIGN 5)"""
    seed, free = _free_response(subject)
    for token in free[2], free[5]:
        stopped = replace(SAMPLED, stop_token_ids=(token,))
        requests = [GenerationRequest(PROMPTS[0], params, (seed,)) for params in (stopped, SAMPLED)]
        (found,), (other,) = shared_generator(subject).generate(requests)
        wanted = free[: free.index(token) + 1]
        expect(found.token_ids == wanted, f"stopping at {token} gave {found.token_ids}, expected {wanted}")
        expect(found.finish_reason == "stop", f"finish_reason is {found.finish_reason!r}")
        expect(other.token_ids == free, "the stop token of one request changed another")


def check_stop_strings_end_a_response(subject: Subject) -> None:
    """A response ends with the token that completes a stop string, across token boundaries too. (DESIGN 5)"""
    decode = Tokenizer.load(model_folder(subject)).decode
    seed, free = _free_response(subject)
    for first, last in ((3, 3), (4, 6)):
        text = decode(free[first : last + 1])
        request = GenerationRequest(PROMPTS[0], replace(SAMPLED, stop_strings=("never said", text)), (seed,))
        found = shared_generator(subject).generate([request])[0][0]
        wanted = next(free[:end] for end in range(1, len(free) + 1) if text in decode(free[:end]))
        expect(found.token_ids == wanted, f"stopping at {text!r} gave {found.token_ids}, expected {wanted}")
        expect(found.finish_reason == "stop", f"finish_reason is {found.finish_reason!r}")


def check_ignored_end_tokens_end_nothing(subject: Subject) -> None:
    """With ignore_eos a response goes on past the model's end tokens, to max_new_tokens or its own stops. (DESIGN 5)"""
    backend, stop = shared_generator(subject), _end_ids(subject)
    free = replace(SAMPLED, max_new_tokens=64, temperature=2.0, ignore_eos=True)
    seeds = tuple(range(16))
    [found, bounded] = backend.generate(
        [
            GenerationRequest(PROMPTS[0], free, seeds),
            GenerationRequest(PROMPTS[0], replace(free, stop_token_ids=tuple(stop)), seeds),
        ]
    )
    for completion in found:
        expect(len(completion.token_ids) == 64, f"{completion} has not 64 tokens")
        expect(completion.finish_reason == "length", f"finish_reason is {completion.finish_reason!r}")
    for completion in bounded:
        ended = completion.token_ids[-1] in stop
        expect(ended or len(completion.token_ids) == 64, f"{completion} ignores its own stop tokens")
    if not any(set(stop) & set(completion.token_ids) for completion in found):
        raise NotApplicable("no response of this model met its end token")


def check_prompt_logprobs_equal_transformers(subject: Subject) -> None:
    """Log-probs of a prompt are those of softmax(logits), 0.0 for its first token, where asked for. (DESIGN 7.2)"""
    if "prompt_logprobs" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'prompt_logprobs'}")
    model = reference(model_folder(subject))
    asked = replace(SAMPLED, temperature=0.7, prompt_logprobs=True)
    requests = [GenerationRequest(ids, asked, (1, 2)) for ids in PROMPTS] + [GenerationRequest(PROMPTS[1], SAMPLED)]
    *found, [without] = shared_generator(subject).generate(requests)
    expect(without.prompt_logprobs == (), f"nobody asked for {without.prompt_logprobs}")
    for ids, completions in zip(PROMPTS, found, strict=True):
        wanted = (0.0, *response_logprobs(model, ids[:1], ids[1:], 1.0))
        for completion in completions:
            given = completion.prompt_logprobs
            expect(len(given) == len(ids) and given[0] == 0.0, f"a prompt of {len(ids)} tokens has {given}")
            gap = max(abs(one - other) for one, other in zip(given, wanted, strict=True))
            expect(gap <= subject.settings.tolerance, f"log-probs {given}, expected {wanted}: {gap:.3g} apart")


def check_requests_of_one_call_may_sample_differently(subject: Subject) -> None:
    """Each request of a call is sampled with its own settings. (DESIGN 5)"""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 1},
        {"temperature": 0.4},
        {"top_p": 0.01},
        {"min_p": 0.9999},
        {"max_new_tokens": 3},
        {},
    ]
    backend = shared_generator(subject)
    requests = [GenerationRequest(PROMPTS[1], replace(SAMPLED, **kind), (5,)) for kind in kinds]
    together = [_tokens(completions)[0] for completions in backend.generate(requests)]
    greedy = together[0]
    for kind, found in zip(kinds, together, strict=True):
        if {"top_k", "top_p", "min_p"} & kind.keys():
            expect(found == greedy, f"{kind} leaves one token to choose from: got {found}, not {greedy}")
    alone = [_tokens(backend.generate([request])[0])[0] for request in requests]
    expect(alone == together, f"alone {alone}, in one call {together}")


def check_top_k_draws_from_the_k_most_likely(subject: Subject) -> None:
    """With top_k = 3, every token is one of the three most likely. (DESIGN 5)"""
    request = GenerationRequest(PROMPTS[0], replace(SAMPLED, temperature=2.0, top_k=3), tuple(range(4)))
    model = reference(model_folder(subject))
    for ids in _tokens(shared_generator(subject).generate([request])[0]):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*PROMPTS[0], *ids]])).logits[0, len(PROMPTS[0]) - 1 : -1]
        ranks = (logits > logits.gather(1, torch.tensor(ids)[:, None])).sum(1).tolist()
        expect(max(ranks) < 3, f"tokens of rank {ranks} were drawn")


def check_update_weights_takes_effect(subject: Subject) -> None:
    """After update_weights, everything comes from the new weights and carries their version. (DESIGN 7.8)"""
    require_in_process(subject)
    old, new = load_reference(model_folder(subject)), other_model(subject)
    backend = build_generator(subject, in_process_weights(old, 3))
    for version, model in ((3, old), (8, new), (9, old)):
        if version > 3:
            backend.update_weights(in_process_weights(model, version), version)
        for params in (GREEDY, SAMPLED):
            _expect_logprobs_of(model, backend, params, subject.settings.tolerance, version)


def check_a_conversation_goes_on_with_the_weights_at_hand(subject: Subject) -> None:
    """What an engine keeps of a conversation changes no response, and new weights make it worthless. (DESIGN 5)"""
    require_in_process(subject)
    model, other = load_reference(model_folder(subject)), other_model(subject)
    backend = build_generator(subject, in_process_weights(model, 1))
    for version, then in ((1, model), (2, other)):
        requests = [GenerationRequest(ids, SAMPLED, (1, 2), goes_on=True) for ids in PROMPTS]
        found = backend.generate(requests)
        turns = [(*ids, *c.token_ids, *PROMPTS[1]) for ids, group in zip(PROMPTS, found, strict=True) for c in group]
        if version > 1:
            backend.update_weights(in_process_weights(then, version), version)
        for goes_on in (True, False):
            _expect_logprobs_of(then, backend, SAMPLED, subject.settings.tolerance, version, turns, goes_on=goes_on)


def check_weights_in_process_are_shared(subject: Subject) -> None:
    """Weights handed over in process are used where they are: no second copy. (DESIGN 5)"""
    require_in_process(subject)
    if subject.settings.device != "cpu":
        raise NotApplicable("the owners of tensors are looked up on CPU only")
    model = load_reference(model_folder(subject))
    backend = build_generator(subject, in_process_weights(model, 1))
    backend.generate([GenerationRequest(PROMPTS[0], GREEDY)])
    live = {name: p.data_ptr() for name, p in model.named_parameters()}
    mine = {id(p) for p in model.parameters()}
    seen = {o.data_ptr() for o in gc.get_objects() if type(o) in _TENSORS and id(o) not in mine and _has_storage(o)}
    copied = [name for name, pointer in live.items() if pointer not in seen]
    expect(not copied, f"nothing but the trainer holds {len(copied)} of {len(live)} parameters: {copied[:3]}")


def _has_storage(tensor: torch.Tensor) -> bool:
    """Not so of tensors on the meta device, and of those in a layout of oneDNN's own."""
    return not tensor.is_meta and tensor.layout == torch.strided


def check_sleep_changes_nothing(subject: Subject) -> None:
    """After sleep and wake tokens and log-probs are the same. (DESIGN 5)"""
    if "sleep" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'sleep'}")
    engine, model = build_generator(subject), other_model(subject)
    expect(isinstance(engine, SleepingBackend), "the backend has no sleep, wake and held_bytes")
    assert isinstance(engine, SleepingBackend)
    request = [GenerationRequest(PROMPTS[0], SAMPLED, (1, 2))]
    before = engine.generate(request)
    for _ in range(2):  # the second time it sleeps already
        engine.sleep(1)
    engine.wake(["weights"])
    engine.wake(["weights", "cache"])
    expect(engine.generate(request) == before, "the same seeds give other tokens or log-probs after sleep and wake")
    if IN_PROCESS in subject.config.weight_transports:
        for level in (1, 2):
            engine.sleep(level)
            engine.wake(["weights"])
            engine.update_weights(in_process_weights(model, level), level)
            engine.wake(["cache"])
            _expect_logprobs_of(model, engine, SAMPLED, subject.settings.tolerance, level)


def check_sleep_gives_memory_back(subject: Subject) -> None:
    """Asleep it holds no memory, but for what its author says it cannot give back (``stays_asleep``). (DESIGN 5)"""
    if "sleep" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'sleep'}")
    engine = build_generator(subject)
    assert isinstance(engine, SleepingBackend)
    if IN_PROCESS in subject.config.weight_transports:  # those on disk may be mapped from it, and take no memory
        engine.update_weights(in_process_copies(load_reference(model_folder(subject)), 1), 1)
    engine.generate([GenerationRequest(PROMPTS[0], SAMPLED, (1, 2))])
    awake, staying = engine.held_bytes(), subject.settings.stays_asleep
    if not any(size for part, size in awake.items() if part not in staying):
        raise NotApplicable(f"awake, it counts no memory that it could give back: {dict(awake)} bytes")
    engine.sleep(1)
    held = {part: size for part, size in engine.held_bytes().items() if size and part not in staying}
    expect(not held, f"asleep, it holds {held} bytes")


def check_forgotten_weights_are_not_sampled_from(subject: Subject) -> None:
    """Asleep at level 2 it holds no memory; awake again it refuses requests with a WeightsForgottenError, until an
    update brings weights. (DESIGN 5)"""
    if "sleep" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'sleep'}")
    engine, request = build_generator(subject), [GenerationRequest(PROMPTS[0], SAMPLED, (1, 2))]
    assert isinstance(engine, SleepingBackend)
    engine.sleep(2)
    held = engine.held_bytes()
    expect(not any(held.values()), f"asleep at level 2, it holds {dict(held)} bytes")
    engine.wake(["weights", "cache"])
    for _ in range(2):
        try:
            found = engine.generate(request)
        except WeightsForgottenError:
            continue
        except NemorlError as error:
            expect(False, f"it has forgotten its weights, and says: {error.message}")
        expect(False, f"it has forgotten its weights, and answers {_tokens(found[0])}")
    if IN_PROCESS in subject.config.weight_transports:
        model = other_model(subject)
        engine.update_weights(in_process_weights(model, 1), 1)
        _expect_logprobs_of(model, engine, SAMPLED, subject.settings.tolerance, 1)


def check_bad_request_is_explained(subject: Subject) -> None:
    """An empty prompt, or one that fills the sequence limit, is a nemorl error, and the engine lives on. (DESIGN 5)"""
    backend = shared_generator(subject)
    for ids in ((), tuple([PROMPTS[0][0]] * MAX_SEQUENCE_TOKENS)):
        try:
            backend.generate([GenerationRequest(ids, SAMPLED)])
        except NemorlError:
            continue
        expect(False, f"a prompt of {len(ids)} tokens was accepted (limit {MAX_SEQUENCE_TOKENS})")
    expect(len(backend.generate([GenerationRequest(PROMPTS[0], SAMPLED)])) == 1, "generate fails after a bad request")


def check_shutdown_twice_is_harmless(subject: Subject) -> None:
    """A second shutdown does nothing. (DESIGN 5)"""
    backend = build_generator(subject)
    backend.shutdown()
    backend.shutdown()


_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def _end_ids(subject: Subject) -> frozenset[int]:
    stop = Tokenizer.load(model_folder(subject)).stop_token_ids
    declared = reference(model_folder(subject)).generation_config.eos_token_id
    return stop | set(declared if isinstance(declared, (list, tuple)) else [declared]) - {None}


def _free_response(subject: Subject) -> tuple[int, tuple[int, ...]]:
    """A seed, and the 12 text tokens that it gives for PROMPTS[0] when nothing stops them."""
    request = GenerationRequest(PROMPTS[0], SAMPLED, tuple(range(32)))
    for seed, ids in enumerate(_tokens(shared_generator(subject).generate([request])[0])):
        if len(ids) == SAMPLED.max_new_tokens and min(ids) >= FIRST_TEXT_TOKEN:
            return seed, ids
    raise NotApplicable("every one of 32 responses of this model is short or has special tokens")


def _expect_true_logprobs(subject: Subject, params: SamplingParams) -> None:
    backend, model = shared_generator(subject), reference(model_folder(subject))
    _expect_logprobs_of(model, backend, params, subject.settings.tolerance)


def _expect_logprobs_of(
    model: Any,
    backend: GenerationBackend,
    params: SamplingParams,
    tolerance: float,
    version: int | None = None,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    *,
    goes_on: bool = False,
) -> None:
    requests = [GenerationRequest(ids, params, (1, 2), goes_on) for ids in prompts]
    for request, completions in zip(requests, backend.generate(requests), strict=True):
        for completion in completions:
            wanted = response_logprobs(model, request.token_ids, completion.token_ids, params.temperature)
            gap = max(abs(one - other) for one, other in zip(completion.logprobs, wanted, strict=True))
            expect(gap <= tolerance, f"log-probs {completion.logprobs}, expected {wanted}: {gap:.3g} apart ({params})")
            expect(version in (None, completion.weight_version), f"weight_version {completion.weight_version}")


def check_an_image_for_a_model_that_reads_text_is_refused_by_name(subject: Subject) -> None:
    """A prompt that shows an image to a model or engine that reads text alone is refused, and says so. (DESIGN 5)"""
    item, engine = Media("image", b"..."), shared_generator(subject)
    text = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=2))
    try:
        engine.generate(
            [GenerationRequest((9, *item.token_ids(3), 10), SamplingParams(max_new_tokens=2), media=(item,))]
        )
    except BackendError as error:
        expect("image" in error.message, f"the error names no image: {error.message}")
    else:
        expect(False, "the prompt was answered")
    expect(len(engine.generate([text])[0]) == 1, "a prompt of text is not answered after it")
