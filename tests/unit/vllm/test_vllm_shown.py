"""What vLLM is shown of requests with images, up to the call into vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.media import Media
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_media.kept_items import KeptItems
from nemorl_testing.models import tiny_model
from nemorl_testing.seeing import drawing, tiny_sight
from recorded_messages import Raises

pytest.importorskip("nemorl_vllm", reason="nemorl-vllm is not installed")


def limits_of(folder: Path, **settings: Any) -> Any:
    from nemorl_vllm.conversion import VLLMLimits

    return VLLMLimits(PolicyConfig.model_validate({"model_name": str(folder), "max_sequence_tokens": 64, **settings}))


@pytest.fixture(scope="module")
def limits() -> Any:
    return limits_of(tiny_sight("qwen2_5_vl"))


@pytest.fixture(scope="module")
def request_with_image(limits: Any) -> GenerationRequest:
    family = limits.shown.family
    item = family.named(drawing(1))
    return GenerationRequest((5, *item.token_ids(family.item(item).tokens), 6), SamplingParams(), media=(item,))


def test_an_engine_of_a_model_that_sees_takes_pixels_as_they_are_and_one_of_text_is_as_before(limits: Any) -> None:
    assert limits.shown.engine_arguments == {
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"audio": 0, "video": 0},
    }
    of_text = limits_of(tiny_model()).shown
    assert (of_text.family, of_text.engine_arguments, of_text.end_ids) == (None, {}, frozenset())


def test_a_prompt_is_processed_once_on_its_way_to_the_engine(
    limits: Any, request_with_image: GenerationRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, processed = limits.shown, list[Media]()
    process = type(shown.family).process

    def counted(item: Media) -> Any:
        processed.append(item)
        return process(shown.family, item)

    monkeypatch.setattr(shown.family, "process", counted)
    monkeypatch.setattr(shown.family, "_items", KeptItems(0))  # a family forgets each item at the next one
    other = shown.family.named(drawing(7))
    ids = tuple(other.token_ids(6))
    requests = [request_with_image, replace(request_with_image, token_ids=ids, media=(other,))]
    for index, one in enumerate(requests):
        limits.check(index, one)
    taken = [shown.take(one) for one in requests]
    assert [[place.item.media for place in items] for items in taken] == [[one.media[0]] for one in requests]
    assert len(processed) == 2
    assert not shown._waiting, "what was taken is kept no longer"


def test_a_refused_request_leaves_nothing_behind(limits: Any, request_with_image: GenerationRequest) -> None:
    long = replace(request_with_image, token_ids=(*request_with_image.token_ids, *[5] * 64))
    hot = replace(request_with_image, sampling=SamplingParams(temperature=3.0))
    unanswered = replace(request_with_image, seeds=())
    for wrong in (long, hot):
        with pytest.raises(BackendError):
            limits.check(0, wrong)
    limits.check(0, unanswered)
    assert not limits.shown._waiting


def test_a_model_of_text_is_shown_no_image(request_with_image: GenerationRequest, raises: Raises) -> None:
    of_text = limits_of(tiny_model())
    with raises(BackendError, "images", "media"):
        of_text.check(0, request_with_image)
    with raises(BackendError, "images", "media"):  # items without ids would be lost without a word
        of_text.check(0, replace(request_with_image, token_ids=(5, 6)))


def test_gemma_3_is_shown_no_image_and_reads_text(
    limits: Any, request_with_image: GenerationRequest, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.setattr(limits.shown, "_kind", "gemma3")
    with raises(BackendError, "gemma3"):
        limits.check(0, request_with_image)
    limits.check(0, GenerationRequest((5, 6), SamplingParams()))
