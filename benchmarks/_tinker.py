"""What the benchmarks of the Tinker server share: a tiny model of characters, and the command as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""The cookbook chooses a chat format by the model's name: this one's has no thoughts. Only the name is that model's."""
CHARACTERS = [*map(chr, range(32, 127)), "\n"]
SPECIALS = ["im_start", "im_end", "endoftext"]
TAGS = ["think", "/think", "tool_call", "/tool_call", "tool_response", "/tool_response"]
SERVE = [sys.executable, "-c", "from nemorl_cli import main; main()", "serve"]


def write_model(work: Path, *, context_tokens: int = 4096, **sizes: int) -> Path:
    """A Qwen2 with saved random weights and a head of its own, one token per character and per mark of its chats.

    It lies in ``work`` under its name, where clients and server that run in ``work`` find it.
    """
    import torch
    from nemorl_rl.models.tiny import CHAT_TEMPLATE, character_tokenizer, write_tiny_model
    from transformers import AutoConfig, AutoModelForCausalLM

    specials = [f"<|{name}|>" for name in SPECIALS] + [f"<{name}>" for name in TAGS]
    tokenizer = character_tokenizer("".join(CHARACTERS), CHAT_TEMPLATE, specials)
    path = work / NAME
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, **sizes}
    write_tiny_model(
        path, vocab_size=len(tokenizer), max_position_embeddings=context_tokens, tie_word_embeddings=False, **shape
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    model.save_pretrained(path)
    return path


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    env: dict[str, str]
    """Of its clients."""
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds that it has used, all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(work: Path, *words: str) -> Iterator[Served]:
    """``nemorl serve --tinker`` in ``work``."""
    line = [*SERVE, NAME, "--tinker", "--json", "--directory", "served", *words]
    with (work / "server.log").open("w") as log:
        process = subprocess.Popen(line, cwd=work, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        if not told:
            raise RuntimeError((work / "server.log").read_text())
        facts = json.loads(told)
        (key,) = facts["api_keys"].values()
        yield Served({**os.environ, "TINKER_BASE_URL": facts["base_url"], "TINKER_API_KEY": key}, process.pid)
    finally:
        process.terminate()
        process.wait(60)
