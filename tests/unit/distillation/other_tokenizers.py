"""Model folders whose tokenizers cut text in ways of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.models.tiny import BOS, EOS, PAD, UNK, write_tiny_model
from nemorl_testing.models import SIZES
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The answer to 12+7 is 19, and the answer to 3+4 is 7.",
    "Größe und Maß: naïve café, 東京 and 🙂 cost more bytes than letters.",
    "def add(a, b):\n    return a + b\n",
] * 3


def save(inner: Inner, folder: Path, **special: str) -> Path:
    """A tokenizer as a folder."""
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK, **special}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def byte_level(size: int) -> Inner:
    """Byte-pair encoding of bytes, as GPT-2, Qwen and Llama 3 have it."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=size, special_tokens=[EOS, PAD], initial_alphabet=alphabet)
    )
    return inner


def metaspace(size: int) -> Inner:
    """Byte-pair encoding of words with a mark for spaces and bytes for unknown characters, as Llama 2 and Gemma have
    it."""
    inner = Inner(models.BPE(unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    inner.train_from_iterator(
        [line[:40] for line in CORPUS], trainers.BpeTrainer(vocab_size=size, special_tokens=[UNK, "</s>", PAD])
    )
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    described = json.loads(inner.to_str())
    vocabulary = described["model"]["vocab"]
    described["model"]["byte_fallback"] = True
    vocabulary.update({f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)})
    return Inner.from_str(json.dumps(described))


def pairs(letters: str, merges: list[tuple[str, str]]) -> Inner:
    """Letters, and some pairs of them."""
    tokens = [PAD, BOS, EOS, UNK, *letters, *("".join(pair) for pair in merges)]
    inner = Inner(models.BPE({token: index for index, token in enumerate(tokens)}, merges, unk_token=UNK))
    inner.decoder = decoders.Fuse()
    return inner


def loaded(inner: Inner, folder: Path, **special: str) -> Tokenizer:
    return Tokenizer.load(str(save(inner, folder, **special)))


def write_model(folder: Path, inner: Inner, *, seed: int | None = None, **sizes: Any) -> Path:
    """A tiny model of these tokens; without ``seed`` it has no weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_tiny_model(folder, **{**SIZES, "num_hidden_layers": 1, "vocab_size": inner.get_vocab_size(), **sizes})
    save(inner, folder)
    if seed is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
    return folder
