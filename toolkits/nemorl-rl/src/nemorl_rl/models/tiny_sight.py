"""A complete model that sees, small enough to learn on a laptop CPU: Qwen2.5-VL's architecture, as ``tiny`` is Qwen2's.

An ordinary Hugging Face folder without weights: load it with ``policy.init: random``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemorl_rl.models.tiny import ALPHABET, EOS, character_tokenizer

START, END, IMAGE, VIDEO = "<vision_start>", "<vision_end>", "<image>", "<video>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}"
    + START
    + IMAGE
    + END
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}" + EOS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""``<user><vision_start><image><vision_end>how many?<assistant>3<eos>``"""
PATCH, PIXELS, HIDDEN_SIZE = 7, 28, 64
"""Pixels of a patch's side, of which a token is two by two, and of an image's, whatever it has in its file; width of
the decoder."""
SPREAD = 0.1
"""Standard deviation of random weights. The usual 0.02 suits wide layers: in ones of 48 and 64 a signal fades, and
after 300 steps two models of three hardly look (docs/results/quickstart-vision.md)."""


def write_tiny_sight(path: Path | str) -> Path:
    """Write config, tokenizer and image processor of a tiny model that sees into the folder ``path``.

    Args:
        path: Created if needed.

    Returns:
        The folder, to pass as ``model``.
    """
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer(ALPHABET, CHAT_TEMPLATE, (START, END, IMAGE, VIDEO))
    tokenizer.save_pretrained(path)
    start, end, image, video = tokenizer.convert_tokens_to_ids([START, END, IMAGE, VIDEO])
    text: dict[str, Any] = {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
        "tie_word_embeddings": False,
        "initializer_range": SPREAD,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": 48,
        "num_heads": 2,
        "intermediate_size": 96,
        "out_hidden_size": HIDDEN_SIZE,
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "spatial_merge_size": 2,
        "window_size": 2 * PIXELS,
        "fullatt_block_indexes": [0],
        "initializer_range": SPREAD,
    }
    Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    ).save_pretrained(path)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        temporal_patch_size=1,
        merge_size=2,
        size={"shortest_edge": PIXELS**2, "longest_edge": PIXELS**2},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).save_pretrained(path)
    return path
