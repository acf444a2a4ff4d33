"""Tiny models that see or hear, one per family, each a Hugging Face folder with weights, tokenizer and processor.

Nothing is downloaded: architectures from their configs, weights drawn, tokens are bytes.
"""

from __future__ import annotations

import atexit
import io
import json
import shutil
import tempfile
import wave
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy
import torch
from nemorl.media import Media

BYTES = ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""Of the decoder. Head size 32, the smallest that all attention kernels take."""
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@cache
def tiny_sight(family: str, seed: int = 0) -> Path:
    """The folder of a family's model. Made once per process. Read only.

    Args:
        family: A key of ``FAMILIES``.
        seed: Of the weights.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"nemorl-{family}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, tokenizer, processor = FAMILIES[family]()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:  # far from uniform, and what an image shows matters
                    parameter.copy_(
                        torch.randn_like(parameter) * (0.3 if "embed" in name else 1.2 / parameter[0].numel() ** 0.5)
                    )
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = tokenizer.eos_token_id, 0
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)
    return folder


def drawing(seed: int, width: int = 90, height: int = 60) -> Media:
    """An image of some coloured rectangles."""
    from PIL import Image, ImageDraw

    generator = numpy.random.default_rng(seed)

    def colour() -> tuple[int, ...]:
        return tuple(int(part) for part in generator.integers(0, 255, 3))

    image = Image.new("RGB", (width, height), colour())
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        x, y = int(generator.integers(0, width - 20)), int(generator.integers(0, height - 20))
        draw.rectangle([x, y, x + 18, y + 18], fill=colour())
    file = io.BytesIO()
    image.save(file, "PNG")
    return Media("image", file.getvalue())


def tune(seed: int, seconds: float = 0.5, rate: int = 16_000) -> Media:
    """A sound of some tones one after the other, as a WAV file."""
    generator = numpy.random.default_rng(seed)
    times = numpy.arange(int(seconds * rate)) / rate
    pitches = generator.uniform(100, 3000, 8)[(times * 8 / max(seconds, 1e-6)).astype(int)]
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((numpy.sin(2 * numpy.pi * pitches * times) * 12_000).astype("<i2").tobytes())
    return Media("audio", file.getvalue())


def byte_tokenizer(specials: Sequence[str], template: str, **named: str) -> Any:
    """A tokenizer whose tokens are bytes and ``specials``.

    Args:
        specials: Tokens of the family.
        template: The chat template.
        **named: Special tokens by the names that a processor asks for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*BYTES, *specials]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: place for place, token in enumerate([*alphabet, *names])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(names)
    tokens = {"pad_token": names[0], "bos_token": names[1], "eos_token": names[3]}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, chat_template=template, extra_special_tokens=named, **tokens
    )


def chat_template(image: str = "", audio: str = "") -> str:
    """ChatML whose contents are text or parts; ``image`` and ``audio`` are what it writes for an item."""
    parts = "{% if c.type == 'text' %}{{ c.text }}"
    parts += "".join(
        "{% elif c.type == '" + kind + "' %}" + said for kind, said in (("image", image), ("audio", audio)) if said
    )
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}" + parts + "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _decoder(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        **TEXT,
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        **more,
    }


def _qwen_tokens() -> tuple[Any, dict[str, Any]]:
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


def _qwen25_vl() -> tuple[Any, Any, Any]:
    import transformers

    tokenizer, ids = _qwen_tokens()
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=_decoder(tokenizer, rope_parameters=rope), vision_config=vision, **ids
    )
    processor = _qwen_images(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112})
    model: Any = transformers.Qwen2_5_VLForConditionalGeneration
    return model(config), tokenizer, processor


def _qwen3_vl() -> tuple[Any, Any, Any]:
    import transformers

    tokenizer, ids = _qwen_tokens()
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10000.0}
    vision = {
        "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=_decoder(tokenizer, head_dim=32, rope_parameters=rope), vision_config=vision, **ids
    )
    model: Any = transformers.Qwen3VLForConditionalGeneration
    return model(config), tokenizer, _images_of_16()


def _qwen3_5() -> tuple[Any, Any, Any]:
    """A layer of linear attention and one of full."""
    import transformers

    tokenizer, ids = _qwen_tokens()
    rope = {
        "rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    }  # fmt: skip
    text = _decoder(
        tokenizer,
        head_dim=32,
        rope_parameters=rope,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
    }  # fmt: skip
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **ids)
    model: Any = transformers.Qwen3_5ForConditionalGeneration
    return model(config), tokenizer, _images_of_16()


def _images_of_16() -> Any:
    """The processor of models with patches of 16 pixels."""
    half = [0.5] * 3
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    return _qwen_images(patch_size=16, size=size, image_mean=half, image_std=half)


def _qwen_images(**settings: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**settings)


def _tiled(kind: str) -> tuple[Any, Any, Any]:
    """Idefics3 or SmolVLM: tiles of 64 pixels, four tokens each; images are two tiles wide or high."""
    import importlib

    import transformers

    grid = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    names = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *grid)
    tokenizer = byte_tokenizer(names, chat_template("<image>"))
    config = getattr(transformers, f"{kind}Config")(
        text_config=_decoder(tokenizer, model_type="llama"),
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


def _llava() -> tuple[Any, Any, Any]:
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = byte_tokenizer(("<image>",), chat_template("<image>"), image_token="<image>")
    config = transformers.LlavaConfig(
        text_config=_decoder(tokenizer, model_type="llama"),
        vision_config={
            **VISION, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, "projection_dim": 32,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )  # fmt: skip
    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    model: Any = transformers.LlavaForConditionalGeneration
    return model(config), tokenizer, processor


def _gemma3() -> tuple[Any, Any, Any]:
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
        text_config=_decoder(tokenizer, head_dim=32, sliding_window=16, layer_types=layers, tie_word_embeddings=True),
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


def _qwen2_audio() -> tuple[Any, Any, Any]:
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
        text_config=_decoder(tokenizer, model_type="qwen2"),
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


def _qwen25_omni() -> tuple[Any, Any, Any]:
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
        text_config=_decoder(tokenizer, rope_parameters=rope),
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
        _qwen_images(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112}),
    )
    model: Any = transformers.Qwen2_5OmniThinkerForConditionalGeneration
    return model(config), tokenizer, processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "qwen2_5_vl": _qwen25_vl,
    "qwen3_vl": _qwen3_vl,
    "idefics3": partial(_tiled, "Idefics3"),
    "llava": _llava,
    "gemma3": _gemma3,
    "qwen3_5": _qwen3_5,
    "qwen2_5_omni_thinker": _qwen25_omni,
    "qwen2_audio": _qwen2_audio,
    "smolvlm": partial(_tiled, "SmolVLM"),
}
"""Model, tokenizer and processor by transformers' ``model_type``."""
