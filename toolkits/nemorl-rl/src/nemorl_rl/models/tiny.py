"""A complete language model small enough to learn on a laptop CPU: for the quickstart, examples and tests.

It is an ordinary Hugging Face folder (``config.json`` of the Llama or Qwen2 architecture, a character tokenizer)
without weights: load it with ``policy.init: random``.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemorl.errors import UsageError

ALPHABET = string.digits + string.ascii_letters + " +-*/=().,:;?!<>'\"\n"
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
ROLES = ["<system>", "<user>", "<assistant>", "<tool>"]
"""One token each, so that a chat costs a tiny model one position per turn."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '" + EOS + "' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""``<user>1+1=<assistant>2<eos>``"""
TOOLS_TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<' + message.role + '>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% if message.role == 'assistant' %}" + EOS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The same for chats with tools, of which only the names are shown: a schema is long where letters are tokens."""


def write_tiny_model(
    path: Path | str,
    *,
    architecture: str = "qwen2",
    alphabet: str = ALPHABET,
    chat_template: str = CHAT_TEMPLATE,
    **sizes: Any,
) -> Path:
    """Write config and tokenizer of a tiny model into the folder ``path``.

    Args:
        path: Created if needed.
        architecture: A transformers ``model_type`` with Llama-like config fields.
        alphabet: Characters the tokenizer knows; others become ``<unk>``.
        chat_template: The tokenizer's.
        **sizes: Any field of the model's config, e.g. ``hidden_size=64, num_hidden_layers=2``.

    Returns:
        The folder, to pass as ``model``.
    """
    from transformers import AutoConfig

    if len(set(alphabet)) != len(alphabet):
        raise UsageError("the alphabet repeats a character", fix="give each character once")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer(alphabet, chat_template)
    tokenizer.save_pretrained(path)
    defaults = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    AutoConfig.for_model(architecture, **{**defaults, **sizes}).save_pretrained(path)
    return path


def character_tokenizer(alphabet: str, chat_template: str, specials: Sequence[str] = ()) -> Any:
    """A Hugging Face tokenizer of one token per character.

    Args:
        alphabet: Characters; others become ``<unk>``.
        chat_template: Jinja text.
        specials: Further tokens that are one each wherever they stand.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *ROLES, *specials, *alphabet])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, chat_template=chat_template
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*ROLES, *specials]})
    return tokenizer
