"""``compare replay --backend megatron``: a step of a run that another backend trained, computed by megatron-core."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from command_line import Command, command
from nemorl_rl.models.tiny import write_tiny_model
from real_runs import real_run

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

pytestmark = [pytest.mark.full, pytest.mark.megatron]

BOUND = 4e-4
"""Nats. Between embedding and log-prob of this model lie two layers of seven matrices and one of the head, whose sums
have at most 64 terms: fewer than 1,000 roundings one after the other, each of 2^-24 = 6e-8 of values that are below 6:
1000 * 6e-8 * 6."""
OF_TRAINER = ("advantages", "logprobs", "loss", "gradient")


@pytest.fixture
def nemorl(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command(monkeypatch, capfd)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a padding token, whose embedding transformers gives no gradient and megatron-core does."""
    folder = tmp_path_factory.mktemp("replayed")
    model = write_tiny_model(folder / "model", hidden_size=32, intermediate_size=64, pad_token_id=None)
    return real_run(model, folder / "run", max_steps=2)


@pytest.mark.parametrize("only", [["--only", "trainer"], []])
def test_megatron_makes_the_step_of_another_backend_up_to_rounding(
    run: Path, nemorl: Command, tmp_path: Path, only: list[str]
) -> None:
    asked = ["compare", "replay", run, "--step", 2, "--backend", "megatron", *only, "--json"]
    within = nemorl(*asked, "--tolerance", BOUND, "--output", tmp_path / "replay")
    assert within.code == 0, within.err + within.out
    parts = tuple(finding["part"] for finding in within.json["steps"])
    assert parts == (OF_TRAINER if only else ("data", "tokens", "rewards", *OF_TRAINER))  # the update is not compared
    assert "the optimizer's state does not pass from one backend to another" in within.json["text"][-1]

    one, other = (_logprobs(folder) for folder in (run, tmp_path / "replay"))
    assert 0 < float((one - other).abs().max()) < BOUND  # another computation, of the same thing
    assert "name: megatron" in (tmp_path / "replay/config.yaml").read_text()


def test_the_first_log_prob_that_megatron_rounds_otherwise_is_named(run: Path, nemorl: Command) -> None:
    done = nemorl("compare", "replay", run, "--step", 2, "--backend", "megatron", "--only", "trainer", "--json")
    assert done.code == 1, done.err
    parting = done.json["parting"]
    assert (parting["part"], parting["difference"]["quantity"]) == ("logprobs", "old log-prob")
    assert abs(parting["difference"]["first"] - parting["difference"]["second"]) < BOUND


def _logprobs(run: Path) -> torch.Tensor:
    """[N] of the trainer, of all tokens that step 2 trained on."""
    rows = pq.read_table(run / "records/train/step_000002.parquet").to_pylist()
    rows.sort(key=lambda row: row["sample_id"])
    parts = [torch.tensor(row["sequences"][0]["old_logprobs"]) for row in rows]
    return torch.cat(parts)
