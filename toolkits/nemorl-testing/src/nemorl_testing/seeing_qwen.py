"""Tiny models of the Qwen-VL family: patches are merged, positions have three dimensions."""

from __future__ import annotations

from typing import Any

from nemorl_testing.seeing_parts import byte_tokenizer, chat_template, decoder

EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def qwen_tokens() -> tuple[Any, dict[str, Any]]:
    """A tokenizer, and what the model's config says of its tokens."""
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = byte_tokenizer(names, chat_template("<|vision_start|><|image_pad|><|vision_end|>"))
    start, end, image, video = (tokenizer.convert_tokens_to_ids(name) for name in names)
    return tokenizer, {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "tie_word_embeddings": False,
    }


def qwen25_vl() -> tuple[Any, Any, Any]:
    import transformers

    tokenizer, ids = qwen_tokens()
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=decoder(tokenizer, rope_parameters=rope), vision_config=vision, **ids
    )
    processor = qwen_images(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112})
    model: Any = transformers.Qwen2_5_VLForConditionalGeneration
    return model(config), tokenizer, processor


def qwen2_vl() -> tuple[Any, Any, Any]:
    import transformers

    tokenizer, ids = qwen_tokens()
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    vision = {
        "depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    config = transformers.Qwen2VLConfig(
        text_config=decoder(tokenizer, rope_parameters=rope), vision_config=vision, **ids
    )
    processor = qwen_images(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112})
    model: Any = transformers.Qwen2VLForConditionalGeneration
    return model(config), tokenizer, processor


def qwen3_vl(moe: str = "") -> tuple[Any, Any, Any]:
    """With ``moe`` = "Moe" a mixture of experts.

    Args:
        moe: Part of the names of transformers' classes.
    """
    import transformers

    tokenizer, ids = qwen_tokens()
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10000.0}
    vision = {
        "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    text = decoder(tokenizer, head_dim=32, rope_parameters=rope, **(EXPERTS if moe else {}))
    config = getattr(transformers, f"Qwen3VL{moe}Config")(text_config=text, vision_config=vision, **ids)
    return getattr(transformers, f"Qwen3VL{moe}ForConditionalGeneration")(config), tokenizer, images_of_16()


def qwen3_5(moe: str = "") -> tuple[Any, Any, Any]:
    """A layer of linear attention and one of full; with ``moe`` = "Moe" a mixture of experts.

    Args:
        moe: Part of the names of transformers' classes.
    """
    import transformers

    tokenizer, ids = qwen_tokens()
    rope = {
        "rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    }  # fmt: skip
    text = decoder(
        tokenizer,
        head_dim=32,
        rope_parameters=rope,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        **(EXPERTS if moe else {}),
    )
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
    }  # fmt: skip
    config = getattr(transformers, f"Qwen3_5{moe}Config")(text_config=text, vision_config=vision, **ids)
    return getattr(transformers, f"Qwen3_5{moe}ForConditionalGeneration")(config), tokenizer, images_of_16()


def images_of_16() -> Any:
    """The processor of models with patches of 16 pixels."""
    half = [0.5] * 3
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    return qwen_images(patch_size=16, size=size, image_mean=half, image_std=half)


def qwen_images(**settings: Any) -> Any:
    """The processor of all of these, on Pillow."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**settings)
