"""Tiny models that see or hear, one per family, each a Hugging Face folder with weights, tokenizer and processor.

Nothing is downloaded: architectures from their configs, weights drawn, tokens are bytes.
"""

from __future__ import annotations

import atexit
import io
import shutil
import tempfile
import wave
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy
import torch
from nemorl.media import Media

from nemorl_testing.seeing_hearing import qwen2_audio, qwen25_omni
from nemorl_testing.seeing_others import gemma3, llava, tiled
from nemorl_testing.seeing_qwen import qwen2_vl, qwen3_5, qwen3_vl, qwen25_vl


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


FAMILIES: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen25_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": partial(qwen3_vl, "Moe"),
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": partial(qwen3_5, "Moe"),
    "idefics3": partial(tiled, "Idefics3"),
    "llava": llava,
    "gemma3": gemma3,
    "qwen2_5_omni_thinker": qwen25_omni,
    "qwen2_audio": qwen2_audio,
    "smolvlm": partial(tiled, "SmolVLM"),
}
"""Model, tokenizer and processor by transformers' ``model_type``."""
