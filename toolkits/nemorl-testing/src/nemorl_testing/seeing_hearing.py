"""Tiny models that hear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemorl_testing.seeing_parts import byte_tokenizer, chat_template, decoder
from nemorl_testing.seeing_qwen import qwen_images


def qwen2_audio() -> tuple[Any, Any, Any]:
    """Sounds of up to four seconds, for the sake of time."""
    import transformers

    names = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    tokenizer = byte_tokenizer(names, chat_template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>"))
    audio = {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 16,
        "max_source_positions": 200,
    }  # fmt: skip
    config = transformers.Qwen2AudioConfig(
        audio_config=audio,
        text_config=decoder(tokenizer, model_type="qwen2"),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    extractor: Any = transformers.WhisperFeatureExtractor
    model: Any = transformers.Qwen2AudioForConditionalGeneration
    return model(config), tokenizer, extractor(feature_size=16, chunk_length=4, sampling_rate=16000)


class _SeesAndHears:
    """Two processors in one file, as Qwen2.5-Omni has them."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def save_pretrained(self, folder: Path) -> None:
        merged: dict[str, Any] = {}
        for part in self._parts:
            merged |= part.to_dict()
        (folder / "preprocessor_config.json").write_text(json.dumps(merged))


def qwen25_omni() -> tuple[Any, Any, Any]:
    import transformers

    names = (
        "<|vision_bos|>",
        "<|vision_eos|>",
        "<|IMAGE|>",
        "<|VIDEO|>",
        "<|audio_bos|>",
        "<|audio_eos|>",
        "<|AUDIO|>",
    )
    image, audio = "<|vision_bos|><|IMAGE|><|vision_eos|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"
    tokenizer = byte_tokenizer(names, chat_template(image, audio))
    starts, ends, images, videos, begins, stops, sounds = (tokenizer.convert_tokens_to_ids(name) for name in names)
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    hearing = {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 16,
        "max_source_positions": 200, "n_window": 20, "output_dim": 64,
    }  # fmt: skip
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config=decoder(tokenizer, rope_parameters=rope),
        vision_config=vision,
        audio_config=hearing,
        image_token_index=images,
        video_token_index=videos,
        audio_token_index=sounds,
        audio_start_token_id=begins,
        audio_end_token_id=stops,
        **{
            "vision_start_token_id": starts,
            "vision_end_token_id": ends,
        },  # its forward pass reads what it has no field of
    )
    extractor: Any = transformers.WhisperFeatureExtractor
    processor = _SeesAndHears(
        extractor(feature_size=16, chunk_length=4, sampling_rate=16000),
        qwen_images(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112}),
    )
    model: Any = transformers.Qwen2_5OmniThinkerForConditionalGeneration
    return model(config), tokenizer, processor
