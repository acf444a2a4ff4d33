"""Capabilities are a closed set: what is declared or asked for is one of those that the contracts list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from nemorl.contracts import GenerationCapability, TrainingCapability
from nemorl.plugins import registry

ROOT = Path(__file__).parents[3]
KNOWN = {*get_args(TrainingCapability), *get_args(GenerationCapability)}


def asked() -> Iterator[tuple[str, str]]:
    """Capabilities that sources ask for by name, with the file."""
    for folder in ("core", "toolkits", "plugins", "nemorl-dtensor", "nemorl-megatron", "nemorl-vllm"):
        for path in (ROOT / folder).rglob("*.py"):
            for found in re.finditer(r'"(\w+)" (?:not )?in [\w.()]*supports\b', path.read_text()):
                yield found[1], path.name


def test_what_is_asked_for_exists() -> None:
    names = [*asked()]
    assert len(names) > 30
    assert [(name, file) for name, file in names if name not in KNOWN] == []


def test_each_is_declared_by_some_backend_and_none_is_declared_besides() -> None:
    declared = {
        kind: {name for entry in registry().index.of_kind(kind) for name in registry().load(kind, entry.id).supports}
        for kind in ("training_backends", "generation_backends")
    }
    assert declared["training_backends"] == {*get_args(TrainingCapability)}
    assert declared["generation_backends"] == {*get_args(GenerationCapability)}
