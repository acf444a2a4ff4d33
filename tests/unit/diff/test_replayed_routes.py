"""A run of a mixture whose trainer replays the sampler's routes, made again bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from command_line import Command
from nemorl.types import Prompt, Sample, Score
from nemorl_cli.report.records.reading import FOLDER, read_table, record_files
from nemorl_cli.report.records.samples import sample_of
from nemorl_cli.report.records.table import Group, Rollout, table_of
from nemorl_rl.models.tiny import write_tiny_model
from real_runs import real_run

MIXTURE: dict[str, Any] = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
BACKENDS = ["dtensor", pytest.param("megatron", marks=[pytest.mark.megatron, pytest.mark.slow])]


@pytest.fixture(scope="module", params=BACKENDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "megatron":
        pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")
    folder = tmp_path_factory.mktemp("mixture")
    model = write_tiny_model(folder / "model", architecture="qwen3_moe", **MIXTURE, num_attention_heads=4, head_dim=8)
    return real_run(model, folder / "run", policy={"backend": {"name": request.param, "router": {"replay": True}}})


def test_a_run_logs_the_share_of_flipped_choices_and_keeps_the_routes(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shares = [line["train/routes_flipped"] for line in lines if "train/routes_flipped" in line]
    assert len(shares) == 3
    assert all(0 <= share < 0.01 for share in shares), "sampler and trainer round alike"
    for file in record_files(run / FOLDER, split="train", step=2):
        for row in read_table(file).to_pylist():
            sample = sample_of(row, {})
            assert sample.routes is not None
            assert sample.routes.shape == (len(sample.token_ids), 2, 2)
            assert (sample.routes[:-1] >= 0).all()


def test_a_recorded_sequence_has_the_routes_that_were_recorded() -> None:
    routes = numpy.arange(3 * 2 * 2, dtype=numpy.int16).reshape(3, 2, 2) - 1
    sample = Sample(
        Prompt(0, "1", (5,)), (5, 6, 7), (False, True, True), (0.0,) * 3, Score(0.0), "", "stop", routes=routes
    )
    (row,) = table_of(Rollout("run", "train", 1, 0.0, [Group(0, [sample])]), str).to_pylist()
    found = sample_of(row, {}).routes
    assert found is not None
    assert found.dtype == numpy.int16
    assert found.tolist() == routes.tolist()


@pytest.mark.parametrize("options", [["--step", "2"], ["--step", "3", "--only", "trainer"]])
def test_a_step_with_replayed_routes_is_made_again_bit_for_bit(run: Path, nemorl: Command, options: list[str]) -> None:
    done = nemorl("compare", "replay", run, *options, "--json")
    assert done.code == 0, done.err + done.out
    assert done.json["parting"] is None


def test_samples_as_json_leave_the_bytes_of_routes_out(run: Path, nemorl: Command) -> None:
    done = nemorl("view", "samples", run, "--tokens", "--json")
    assert done.code == 0, done.err + done.out
    assert "routes" not in done.out
