"""Images in prompts: vLLM samples from the distribution that the trainer computes, whatever it has cached.

It needs torchvision, which its code for these models imports. Without it these tests skip; beside a torch for CPUs
alone, the wheel of PyPI does once its two operators are declared::

    lib = torch.library.Library("torchvision", "DEF")
    lib.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # and the same for qnms
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from nemorl.config.models import LoraConfig
from nemorl.errors import BackendError, DataError
from nemorl.media import Media, is_media, media_runs
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle
from nemorl_rl.transports.shared_memory import SharedMemory
from recorded_messages import Raises
from sights import SAMPLED, Trainer
from vllm_engines import build_generator

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 1e-5
"""Nats, float32."""
KINDS = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module", autouse=True)
def _needs_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        pytest.skip(
            f"vLLM cannot import its code for Qwen-VL without torchvision ({error}): pip install --no-deps the "
            f"torchvision of torch {torch.__version__}"
        )


@pytest.fixture(scope="module", params=KINDS)
def trainer(request: Any) -> Trainer:
    return Trainer(request.param)


@pytest.fixture(scope="module")
def engine(trainer: Trainer) -> Iterator[Any]:
    """On the stored weights, which no test changes."""
    built = build_generator(trainer.folder)
    yield built
    built.shutdown()


def test_one_image_two_one_twice_and_none_are_sampled_as_the_trainer_scores_them(trainer: Trainer, engine: Any) -> None:
    first, second, third = trainer.drawings
    requests = [
        trainer.request(items, text)
        for items, text in (
            ([first], "what?"),
            ([third], "what?"),  # the same words, another image of the same size
            ([first, second], "and these?"),
            ([second, first], "and these?"),
            ([first, first], "and these?"),
            ([], "no image"),
        )
    ]
    before = [trainer.sight.family.item(item).tokens for item in trainer.drawings]
    assert before[0] == before[2], "the images are to be told apart by what they show, not by their size"
    for _ in range(2):  # the second time vLLM has cached what it can
        groups = engine.generate(requests)
        assert max(trainer.gaps(requests, groups)) < TOLERANCE
        assert {len(group) for group in groups} == {2}
    other = replace(requests[0], token_ids=requests[1].token_ids, media=requests[1].media)
    assert min(trainer.gaps([other], [groups[0]])) > 0.01, "another image makes too little of a difference to be seen"


def test_a_cached_prefix_is_that_of_its_own_image(trainer: Trainer, engine: Any) -> None:
    # 150 tokens before the image and more than 128 after it: blocks of the cache (128 tokens on the CPU) that begin
    # with one text and differ by the image alone, and blocks after it.
    first, _, third = trainer.drawings
    sampled = replace(SAMPLED, prompt_logprobs=False)  # vLLM reads no cache where those of the prompt are asked for
    requests = []
    for item in (first, third):
        base = trainer.request([item], "x" * 150, sampled)
        requests.append(replace(base, token_ids=(*trainer.encode("y" * 150), *base.token_ids)))
    assert len(requests[0].token_ids) == len(requests[1].token_ids) < 500
    policy = {"max_sequence_tokens": 600}
    built = build_generator(trainer.folder, policy=policy)
    try:
        for request in (*requests, *requests):
            assert max(trainer.gaps([request], built.generate([request]))) < TOLERANCE
    finally:
        built.shutdown()


@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
def test_after_an_update_an_image_is_seen_by_the_new_tower(build: Any, transport: str) -> None:
    for kind in KINDS:
        trainer, publisher = Trainer(kind), SharedMemory()
        requests = [trainer.request(trainer.drawings[:count], "what?") for count in (1, 2)]
        engine = build(trainer.folder, trainer.handle(1))
        assert max(trainer.gaps(requests, engine.generate(requests))) < TOLERANCE
        trainer.change("visual", seed=1)
        assert max(trainer.gaps(requests, engine.generate(requests))) > 0.1, "the change is too small to prove anything"
        if transport == "in_process":
            engine.update_weights(trainer.handle(2), 2)
        else:
            engine.update_weights(WeightHandle(transport, 2, publisher.publish(trainer.export)), 2)
        groups = engine.generate(requests)
        publisher.close()
        assert max(trainer.gaps(requests, groups)) < TOLERANCE
        assert groups[0][0].weight_versions == (2,)


def test_a_request_that_runs_through_an_update_sees_by_the_new_tower_after_it(build: Any) -> None:
    old, new = Trainer("qwen3_vl"), Trainer("qwen3_vl")
    new.change("visual", seed=1)
    engine = build(old.folder, old.handle(1), policy={"max_sequence_tokens": 700})
    request = old.request(
        old.drawings[:1], "what?", replace(SAMPLED, max_new_tokens=600, prompt_logprobs=False), tuple(range(6))
    )
    short = old.request(old.drawings[:1], "what?", SamplingParams(max_new_tokens=8))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, [request])
        engine.generate([short])  # once it has ended, the long ones are under way
        engine.update_weights(new.handle(2), 2)
        (completions,) = running.result()
    spanning = [one for one in completions if one.weight_versions == (1, 2)]
    assert spanning, "no completion was still running when the update came"
    for one in spanning:
        switch, prompt = one.version_starts[1], len(request.token_ids)
        by_old, by_new = (model.logprobs(request, one.token_ids)[prompt:] for model in (old, new))
        found = torch.tensor(one.logprobs)
        assert float((found[:switch] - by_old[:switch]).abs().max()) < 10 * TOLERANCE
        assert float((found[switch:] - by_new[switch:]).abs().max()) < 10 * TOLERANCE
        assert float((found[switch:] - by_old[switch:]).abs().max()) > 0.1


def test_a_response_ends_where_it_says_a_placeholder(trainer: Trainer, build: Any) -> None:
    changed = Trainer(trainer.kind)
    with torch.no_grad():  # the placeholder is by far the likeliest token
        changed.model.get_output_embeddings().weight[changed.placeholder] *= 20
    engine = build(changed.folder, changed.handle(1))
    sampling = replace(SAMPLED, max_new_tokens=64)
    request = changed.request(changed.drawings[:1], "what?", sampling, tuple(range(8)))
    groups = engine.generate([request])
    ended = [one for one in groups[0] if one.token_ids[-1] == changed.placeholder]
    assert ended
    assert {one.finish_reason for one in ended} == {"stop"}
    assert not any(changed.placeholder in one.token_ids[:-1] for one in groups[0])
    assert max(changed.gaps([request], groups)) < 10 * TOLERANCE
    # In a later turn it is a word like others, of the trainer and of vLLM.
    told = (*request.token_ids, *ended[0].token_ids, *changed.encode("go on"))
    later = replace(request, token_ids=told, sampling=replace(sampling, max_new_tokens=4))
    assert max(changed.gaps([later], engine.generate([later]))) < 10 * TOLERANCE


def test_adapters_of_the_language_model_come_apart_from_what_sees(build: Any) -> None:
    for kind in KINDS:
        lora = LoraConfig(rank=3, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
        trainer, stored = Trainer(kind, lora), Trainer(kind)
        # vLLM 0.32 on the CPU cannot score prompts beside adapters where it makes room for one of the output head.
        sampled = replace(SAMPLED, prompt_logprobs=False)
        requests = [trainer.request(trainer.drawings[:count], "what?", sampled) for count in (0, 1, 2)]
        engine = build(trainer.folder, trainer.handle(1), policy={"lora": lora.model_dump()})
        groups = engine.generate(requests)
        assert max(trainer.gaps(requests, groups)) < TOLERANCE
        assert max(stored.gaps(requests, groups)) > 0.1, "the adapters are too small to prove anything"
        trainer.change("lora_", seed=2, by=0.05)
        engine.update_weights(trainer.handle(2), 2)
        assert max(trainer.gaps(requests, engine.generate(requests))) < TOLERANCE


def test_adapters_of_the_tower_are_refused_by_name(build: Any, raises: Raises) -> None:
    lora = LoraConfig(rank=3, target_modules=("q_proj", "qkv"))
    trainer = Trainer("qwen2_5_vl", lora)
    with raises(BackendError, "adapter"):
        build(trainer.folder, trainer.handle(1), policy={"lora": lora.model_dump()})


@pytest.mark.full
@pytest.mark.parametrize("spread", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_an_engine_of_two_processes_sees_the_same(build: Any, spread: dict[str, int]) -> None:
    # Two layers are too few for Qwen3-VL's features of two depths on the first of two stages.
    for kind in KINDS if "tensor_parallel_size" in spread else KINDS[:1]:
        trainer = Trainer(kind)
        requests = [trainer.request(trainer.drawings[:count], "what?") for count in (0, 1, 2)]
        engine = build(trainer.folder, trainer.handle(1), **spread)
        engine.generate(requests)
        trainer.change("visual", seed=1)
        engine.update_weights(trainer.handle(2), 2)
        assert max(trainer.gaps(requests, engine.generate(requests))) < TOLERANCE


@pytest.mark.full
def test_guesses_after_an_image_are_judged_by_a_model_that_sees_it(trainer: Trainer, build: Any) -> None:
    engine = build(trainer.folder, speculative={"num_speculative_tokens": 4, "prompt_lookup_min": 2})
    greedy = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    requests = [
        trainer.request(trainer.drawings[:1], "abc abc abc", how) for how in (greedy, replace(greedy, temperature=1.0))
    ]
    assert max(trainer.gaps(requests, engine.generate(requests))) < TOLERANCE
    assert engine.take_metrics()["draft_guessed_tokens"].value > 0


def test_an_item_that_is_cut_absent_or_damaged_is_refused(trainer: Trainer, engine: Any, raises: Raises) -> None:
    request = trainer.request(trainer.drawings[:1], "what?")
    ((start, end),) = media_runs(request.token_ids)
    cut = replace(request, token_ids=request.token_ids[: end - 1] + request.token_ids[end:])
    headless = replace(request, token_ids=request.token_ids[:start] + request.token_ids[start + 1 :])
    for wrong in (cut, headless):
        with raises(BackendError, "tokens", varies=r"Media\(.*\)|\d+ to \d+|makes \d+"):
            engine.generate([wrong])
    with raises(BackendError, r"do\snot\scome"):
        engine.generate([replace(request, media=())])
    damaged = Media("image", b"no image at all")
    with raises(DataError, varies=r"Media\(.*\)"):
        engine.generate([replace(request, token_ids=tuple(damaged.token_ids(6)), media=(damaged,))])
    sound = Media("audio", b"...")
    with raises(BackendError, "audio"):
        engine.generate([replace(request, token_ids=(5, *sound.token_ids(3), 6), media=(sound,))])
    assert max(trainer.gaps([request], engine.generate([request]))) < TOLERANCE


def test_without_its_own_reset_vllm_answers_from_features_of_the_old_tower(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    trainer = Trainer("qwen2_5_vl")
    requests = [trainer.request(trainer.drawings[:2], "what?")]
    engine = build(trainer.folder, trainer.handle(1))
    engine.generate(requests)
    trainer.change("visual", seed=1)
    with monkeypatch.context() as patched:
        patched.setattr(LLMEngine, "reset_encoder_cache", lambda self: None)
        engine.update_weights(trainer.handle(2), 2)
    assert max(trainer.gaps(requests, engine.generate(requests))) > 0.1
    engine.update_weights(trainer.handle(3), 3)
    assert max(trainer.gaps(requests, engine.generate(requests))) < TOLERANCE


def test_a_vllm_that_expands_once_more_is_found_out(
    trainer: Trainer, engine: Any, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    from nemorl_vllm import processed

    insides: Callable[..., Any] = processed.engine_input

    def expanded_twice(*args: Any) -> Any:
        made = insides(*args)
        return {**made, "prompt_token_ids": [*made["prompt_token_ids"], trainer.placeholder]}

    request = trainer.request(trainer.drawings[:1], "what?")
    monkeypatch.setattr("nemorl_vllm.shown.engine_input", expanded_twice)
    with raises(BackendError, r"came\sback", varies=r"\d+"):
        engine.generate([request])


def test_a_vllm_with_other_insides_is_named_with_its_version(
    trainer: Trainer, engine: Any, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    from vllm.multimodal.inputs import MultiModalKwargsItems

    request = trainer.request(trainer.drawings[:1], "what?")
    monkeypatch.delattr(MultiModalKwargsItems, "from_hf_inputs")
    with raises(BackendError, "0.32"):
        engine.generate([request])
    monkeypatch.undo()
    text: GenerationRequest = trainer.request([], "no image")
    assert not any(map(is_media, text.token_ids))
    assert max(trainer.gaps([text], engine.generate([text]))) < TOLERANCE
