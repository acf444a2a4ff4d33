"""Expansion: token ids of a text with items are those of transformers' own processor."""

from __future__ import annotations

import importlib

import pytest
import torch
from nemorl.errors import BackendError, DataError
from nemorl.media import Media, is_media
from nemorl_media.decoding import pixels
from nemorl_media.expansion import expanded_prompt
from nemorl_media.slots import family_of
from nemorl_testing.seeing import tiny_sight
from recorded_messages import Raises
from seen_families import Seer, seer

SIZES = [(90, 60), (40, 100), (120, 120), (64, 64), (300, 21), (21, 300)]


def own_processor(kind: str) -> object:
    """transformers' processor, of families whose does not need torchvision."""
    from transformers import AutoImageProcessor, AutoTokenizer

    folder = tiny_sight(kind)
    name = {"idefics3": "Idefics3", "llava": "Llava", "gemma3": "Gemma3"}[kind]
    own = {
        "idefics3": {"image_seq_len": 4},
        "llava": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "gemma3": {"image_seq_length": 4},
    }[kind]
    module = importlib.import_module(f"transformers.models.{kind}.processing_{kind}")
    return getattr(module, f"{name}Processor")(
        image_processor=AutoImageProcessor.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        **own,
    )


def written(of: Seer, media: list[Media], text: str) -> list[int]:
    """Ids of a text, items as tokens of the model."""
    items = [of.family.item(item) for item in media]
    ids = expanded_prompt(text, media, of.family, of.encode, of.tokenizer.convert_ids_to_tokens)
    assert sum(map(is_media, ids)) == sum(item.tokens for item in items)
    return of.in_vocabulary(ids, media)


@pytest.mark.parametrize("kind", ["idefics3", "llava", "gemma3"])
def test_ids_and_pixels_are_those_of_the_models_own_processor(kind: str) -> None:
    of, processor = seer(kind), own_processor(kind)
    media = [of.media(seed, size) for seed, size in enumerate(SIZES)]
    mark = of.tokenizer.convert_ids_to_tokens(of.family.placeholders["image"])
    for text in (
        of.chat(media, "what?"),
        "".join(f"line {number}\n{mark}" for number in range(len(media))),
        "".join(f"{mark}\n\nand" for _ in media),
    ):
        own = processor(images=[[pixels(item) for item in media]], text=[text], return_tensors="pt")  # type: ignore[operator]
        assert written(of, media, text) == own["input_ids"][0].tolist()
        found = torch.cat([of.family.item(item).tensors["pixel_values"] for item in media])
        assert found.equal(own["pixel_values"].view_as(found))


def test_smolvlm_writes_rows_and_columns_as_transformers_does() -> None:
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    of = seer("smolvlm")
    for seed, size in enumerate(SIZES):
        item = of.family.item(of.media(seed, size))
        text = get_image_prompt_string(
            *item.tiling,
            4,
            fake_token_around_image="<fake_token_around_image>",
            image_token="<image>",
            global_image_token="<global-img>",
        )
        assert written(of, [item.media], "look: <image>!") == of.encode(f"look: {text}!")


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_qwens_tokens_are_as_many_as_its_processor_counts(kind: str) -> None:
    of = seer(kind)
    merged = of.model.config.vision_config.spatial_merge_size**2
    processor = of.family._processor  # type: ignore[attr-defined]
    for seed, (width, height) in enumerate(SIZES):
        patches = processor.get_number_of_image_patches(height, width, {})
        assert of.family.item(of.media(seed, (width, height))).tokens == patches // merged


def test_crops_of_a_long_image_are_images_of_their_own() -> None:
    of, processor = seer("gemma3"), own_processor("gemma3")
    folder = str(tiny_sight("gemma3"))
    settings = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 20,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    cropping = family_of(of.model.config, folder, settings)
    assert cropping is not None
    scanning = Seer("gemma3", of.model, cropping, of.tokenizer)
    media = [scanning.media(1, (200, 60)), scanning.media(2, (64, 64))]
    assert [cropping.item(item).grid for item in media] == [(4, 2, 2), (1, 2, 2)]  # 200 / 60 = 3.3: three crops
    text = scanning.chat(media, "what?")
    own = processor(images=[[pixels(item) for item in media]], text=[text], return_tensors="pt", **settings)  # type: ignore[operator]
    assert written(scanning, media, text) == own["input_ids"][0].tolist()
    assert cropping.named(media[0]).digest != of.family.named(media[0]).digest  # other settings, another item


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "idefics3", "gemma3"])
def test_an_outline_stands_for_its_item_in_a_text_and_holds_nothing_of_it(kind: str) -> None:
    of = seer(kind)
    media = of.media(1)
    whole, outline = of.family.item(media), of.family.outline(media)
    assert of.family.pieces(outline) == of.family.pieces(whole)
    assert (outline.tokens, outline.nbytes, outline.media.data) == (whole.tokens, 0, b"")


def test_a_text_with_other_placeholders_than_items_is_refused(raises: Raises) -> None:
    of = seer("gemma3")
    item = of.media(1)

    def expand(text: str, *items: Media) -> list[int]:
        return expanded_prompt(text, items, of.family, of.encode, of.tokenizer.convert_ids_to_tokens)

    for text, items in (("none", [item]), ("<start_of_image>", []), ("<start_of_image>" * 2, [item])):
        with pytest.raises(DataError, match="placeholders"):
            expand(text, *items)
    with raises(DataError):
        expand("<start_of_image> and <image_soft_token>", item)
    assert expand("text alone") == of.encode("text alone")


def test_a_setting_that_makes_images_of_another_size_than_the_tower_sees_is_refused(raises: Raises) -> None:
    of = seer("llava")
    uncropped = family_of(of.model.config, str(tiny_sight("llava")), {"do_center_crop": False})
    assert uncropped is not None
    with raises(BackendError):  # of 90 x 60
        uncropped.item(of.media(1))


def test_an_image_without_tiles_is_its_small_copy() -> None:
    of = seer("idefics3")
    whole = family_of(of.model.config, str(tiny_sight("idefics3")), {"do_image_splitting": False})
    assert whole is not None
    item = whole.item(of.media(1))
    assert (item.grid, item.tiling) == ((1, 2, 2), (0, 0))
    around = "<fake_token_around_image>"
    assert whole.pieces(item) == [f"{around}<global-img>", item.media.token_ids(4), around]
