"""The contract of generation backends, and what this one promises besides."""

from __future__ import annotations

from pathlib import Path

from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_testing import conformance

from nemorl_example.config import ExampleConfig

test_conformance = conformance("generation_backends", "example")


def test_how_many_rows_grow_side_by_side_changes_no_token(nemorl_tiny_model: Path) -> None:
    policy = PolicyConfig(model_name=str(nemorl_tiny_model), max_sequence_tokens=64)
    request = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=8), seeds=tuple(range(5)))
    found = []
    for rows in (5, 2):
        config = ExampleConfig(max_batch_rows=rows)
        engine = config.build(GenerationConfig(), policy, WorkerContext(), None)
        found.append([completion.token_ids for completion in engine.generate([request])[0]])
        engine.shutdown()
    assert found[0] == found[1]
