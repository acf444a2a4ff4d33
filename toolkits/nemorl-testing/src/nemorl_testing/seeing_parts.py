"""What tiny models that see or hear have in common: sizes, a tokenizer of bytes, a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nemorl.media import is_media

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


def decoder(tokenizer: Any, **more: Any) -> dict[str, Any]:
    """Options of a decoder's config."""
    return {
        **TEXT,
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        **more,
    }


def words(token_ids: Iterable[int], placeholder: int) -> list[int]:
    """The ids as a tokenizer knows them, each token of an item as ``placeholder``."""
    return [placeholder if is_media(token) else token for token in token_ids]
