"""Checks of generation backends that are given prompts with images (capability ``media``)."""

from __future__ import annotations

from nemorl.errors import BackendError
from nemorl.media import Media
from nemorl.types import GenerationRequest, SamplingParams

from nemorl_testing.backends import shared_generator
from nemorl_testing.kit import Subject, expect


def check_an_image_for_a_model_that_reads_text_is_refused_by_name(subject: Subject) -> None:
    """A prompt that shows an image to a model or engine that reads text alone is refused, and says so. (DESIGN 10)"""
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
