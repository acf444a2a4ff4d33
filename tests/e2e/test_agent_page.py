"""The page "Train your agent in 15 minutes" is done as it says, with fewer steps and a model of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.full]

PAGE = Path(__file__).parents[2] / "docs/agents/index.md"
FILES = re.compile(r"`([\w.]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
DONE_ELSEWHERE = ("nemorl quickstart", "pip install")
FEWER = ["max_steps=2", "num_prompts_per_step=2", "num_generations_per_prompt=2", "validation.every=0"]
LIMIT_S = 280


def test_its_commands_do_what_they_say(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="openai, the client of the page's agent, is not installed")
    for name, text in FILES.findall(PAGE.read_text(encoding="utf-8")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    config = yaml.safe_load((tmp_path / "vote.yaml").read_text())
    quick = {"model": str(tiny_model), "policy": {**config["policy"], "init": "random"}}
    (tmp_path / "vote.yaml").write_text(yaml.safe_dump({**config, **quick}))
    lines = [line for block in COMMANDS.findall(PAGE.read_text(encoding="utf-8")) for line in block.splitlines()]
    said = [said_by(line, tmp_path) for line in lines if not line.startswith(DONE_ELSEWHERE)]
    assert len(said) == 6
    assert "environment/calls" in (tmp_path / "runs/vote/metrics.jsonl").read_text()
    assert '"train/environment/sequences": 3.0' in (tmp_path / "runs/inside/metrics.jsonl").read_text()
    assert "train-1-" in said[3]
    assert "3 turns" in said[3]


def said_by(line: str, folder: Path) -> str:
    """What a command of the page prints; it must succeed."""
    words = line.split()
    assert words[0] == "nemorl", f"what does {line!r} do?"
    fewer = FEWER if words[1] == "train" else ["validation.max_samples=2"] if words[1] == "eval" else []
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "nemorl", *words[1:], *fewer],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
