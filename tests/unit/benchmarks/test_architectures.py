"""The page of architectures: what is wrong stands out, and results may come in parts."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def architectures(load_benchmark):
    return load_benchmark("architectures")


def test_every_architecture_has_a_row_and_what_is_wrong_stands_out(architectures, tmp_path, monkeypatch):
    monkeypatch.setattr(architectures, "version", lambda name: "1")
    file = tmp_path / "results.jsonl"
    lines = [
        {"name": "llama", "train": 1e-6, "saved": "first", "hf": 9e-4, "vllm": 1.1e-3},
        {"name": "llama", "fsdp": float("inf"), "saved": 2e-7},
        {"name": "rwkv", "vllm": "no | such thing", "vllm_saved": "no | such thing"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = architectures.page(architectures.read(file))
    assert "| llama | 1e-06 | **inf** | 2e-07 | 9e-04 | **0.0011** | not run |" in text
    assert "| rwkv | not run | not run | not run | not run | no (1) | no (1) |" in text
    assert "1. no / such thing" in text
    rows = {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")}
    assert rows == {"architecture", *architectures.ARCHITECTURES}
