"""Tiny models that see, of families with a tower of one image size."""

from __future__ import annotations

from typing import Any

from nemorl_testing.seeing_parts import VISION, byte_tokenizer, chat_template, decoder


def tiled(kind: str) -> tuple[Any, Any, Any]:
    """Idefics3 or SmolVLM: tiles of 64 pixels, four tokens each; images are two tiles wide or high."""
    import importlib

    import transformers

    grid = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    names = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *grid)
    tokenizer = byte_tokenizer(names, chat_template("<image>"))
    config = getattr(transformers, f"{kind}Config")(
        text_config=decoder(tokenizer, model_type="llama"),
        vision_config={**VISION, "image_size": 64, "patch_size": 16},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    module = importlib.import_module(f"transformers.models.{kind.lower()}.image_processing_pil_{kind.lower()}")
    processor = getattr(module, f"{kind}ImageProcessorPil")(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 64}
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config), tokenizer, processor


def llava() -> tuple[Any, Any, Any]:
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = byte_tokenizer(("<image>",), chat_template("<image>"), image_token="<image>")
    config = transformers.LlavaConfig(
        text_config=decoder(tokenizer, model_type="llama"),
        vision_config={
            **VISION, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, "projection_dim": 32,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )  # fmt: skip
    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    model: Any = transformers.LlavaForConditionalGeneration
    return model(config), tokenizer, processor


def gemma3() -> tuple[Any, Any, Any]:
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    tokenizer = byte_tokenizer(
        names,
        chat_template("<start_of_image>"),
        **dict(zip(("boi_token", "eoi_token", "image_token"), names, strict=True)),
    )
    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])  # runs of line ends are tokens, as in Gemma's own
    start, end, image = (tokenizer.convert_tokens_to_ids(name) for name in names)
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3Config(
        text_config=decoder(tokenizer, head_dim=32, sliding_window=16, layer_types=layers, tie_word_embeddings=True),
        vision_config={**VISION, "image_size": 64, "patch_size": 16, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=image,
        boi_token_index=start,
        eoi_token_index=end,
        tie_word_embeddings=True,
    )
    processor = Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
    model: Any = transformers.Gemma3ForConditionalGeneration
    return model(config), tokenizer, processor
