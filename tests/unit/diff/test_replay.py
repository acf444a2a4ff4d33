"""``compare replay``: a step is made again bit for bit, or what differs first is named; the run stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from command_line import Command
from made_runs import changed, make_run, with_config, with_record, with_weight
from nemorl.errors import UsageError
from nemorl.types import Branch, Completion, GenerationRequest, Prompt, Sample, Samples, Score
from nemorl_cli.report.records.reading import FOLDER, record_files
from nemorl_cli.report.records.samples import sample_of
from nemorl_cli.report.records.table import Group, Rollout, table_of
from nemorl_insight.diff.recorded import RecordedStep, rescored
from nemorl_insight.diff.replaying import OF_REPLAY, OF_SAMPLER, OF_TRAINER, Replay
from nemorl_insight.diff.run_files import RunFiles
from nemorl_rl.serving.requests import PlacedSample, TurnPlace
from real_runs import fingerprint, real_run
from recorded_messages import Raises
from safetensors.torch import load_file
from torch.nn.utils import clip_grad_norm_
from transformers import AutoConfig, AutoModelForCausalLM

MODEL = "policy/model/shard-00001-model-00001-of-00001.safetensors"
OPTIMIZER = MODEL.replace("model/", "optimizer/", 1)


def test_a_recorded_episode_is_the_sample_that_was_recorded() -> None:
    score = Score(0.5, {"format": 0.5}, {"late": 1.0}, True, "4", True, outcome="truncated", cause="CallLimitError")
    sample = PlacedSample(
        Prompt(3, "2+2=", (5, 6), answer="4"), (5, 6, 7, 8, 9), (False, False, True, False, True),
        (0.0, 0.0, -0.5, 0.0, -0.25), score, "9", "length", 2, (3, 4), ((2, 0.25), (4, 0.25)),
        (Branch((5, 9), (False, True), (0.0, -1.5), ((1, 0.0),), ((1, 4),)),), version_runs=((2, 3), (4, 4)),
        turn_places=(TurnPlace(0, 2, 3), TurnPlace(0, 4, 5), TurnPlace(1, 1, 2)),
    )  # fmt: skip
    table = table_of(Rollout("run", "train", 4, 0.0, [Group(3, [sample])]), lambda ids: " ".join(map(str, ids)))
    (row,) = table.to_pylist()
    assert sample_of({**row, "prompt": "2+2="}, {}) == sample


class Engine:
    """Gives each token the log-prob of minus its place."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        assert all(request.sampling.prompt_logprobs for request in requests)
        scores = [tuple(-float(place) for place in range(len(request.token_ids))) for request in requests]
        return [[Completion((1,), (0.0,), "length", prompt_logprobs=one)] for one in scores]


def test_another_engine_scores_the_recorded_tokens_that_the_policy_chose() -> None:
    branch = Branch((5, 9), (False, True), (0.0, -1.5))
    sample = Sample(
        Prompt(0, "2+2=", (5, 6)), (5, 6, 7, 8), (False, False, True, True), (0.0, 0.0, -0.5, -0.25),
        Score(1.0), "78", "stop", branches=(branch,),
    )  # fmt: skip
    engine: Any = Engine()
    (found,) = rescored(Samples([sample]), engine)
    assert found.generation_logprobs == (0.0, 0.0, -2.0, -3.0)
    assert found.branches[0].generation_logprobs == (0.0, -1.0)
    assert (found.token_ids, found.reward) == (sample.token_ids, 1.0)


def test_a_replay_begins_at_the_newest_checkpoint_before_the_step(tmp_path: Path, raises: Raises) -> None:
    run = RunFiles.of(make_run(tmp_path / "a"))
    assert [Replay(run, step, tmp_path / "b").begins_after for step in (1, 2, 3)] == [0, 1, 2]
    for none in (0, 4):
        with raises(UsageError, none):
            Replay(run, none, tmp_path / "b")


def test_records_that_are_damaged_are_named(tmp_path: Path, raises: Raises) -> None:
    run = RunFiles.of(make_run(tmp_path / "a"))
    for file in record_files(run.path / FOLDER, step=2):
        file.path.write_bytes(b"PAR1 cut")
    trainer: Any = None
    with raises(UsageError, 2, run.path):
        RecordedStep.read(run, 2, trainer)


def test_a_run_that_was_given_its_data_in_python_cannot_be_replayed(tmp_path: Path, raises: Raises) -> None:
    run = changed(make_run(tmp_path / "a"), tmp_path / "b", with_config(data=None, environment=None))
    with raises(ValueError):
        Replay(RunFiles.of(run), 1, tmp_path / "c").config()


@pytest.mark.parametrize(
    ("step", "changes", "only", "parts"),
    [
        (1, ["policy.backend=megatron"], None, OF_REPLAY),  # both begin at the model: nothing has to come over
        (2, ["policy.backend=megatron"], None, OF_REPLAY[:-1]),  # the optimizer's state does not: no update
        (2, ["policy.backend=megatron"], "trainer", OF_TRAINER[:-1]),
        (2, ["policy.backend={name: dtensor, layout: padded}"], None, OF_REPLAY),  # the same backend
        (2, ["generation.backend=vllm"], None, OF_REPLAY),  # it samples anew
        (2, ["generation.backend=vllm"], "sampler", ("tokens",)),  # it scores the recorded tokens
        (2, ["generation.temperature=0.5"], "sampler", OF_SAMPLER),
    ],
)
def test_what_another_setting_can_be_compared_in(
    tmp_path: Path, step: int, changes: list[str], only: Any, parts: tuple[str, ...]
) -> None:
    backends = with_config(policy={"backend": "dtensor"}, generation={"backend": "hf", "max_new_tokens": 4})
    run = changed(make_run(tmp_path / "a"), tmp_path / "b", backends)
    assert Replay(RunFiles.of(run), step, tmp_path / "c", changes, only).parts == parts


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_run(tiny_model, tmp_path_factory.mktemp("runs") / "a")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--step", "1"], ["--step", "3"], ["--step", "3", "--only", "trainer"], ["--step", "2", "--only", "sampler"]],
)
def test_a_step_is_made_again_bit_for_bit_and_the_run_stays_as_it_is(
    run: Path, nemorl: Command, options: list[str]
) -> None:
    before = fingerprint(run)
    done = nemorl("compare", "replay", run, *options, "--json")
    assert done.code == 0, done.err + done.out
    assert done.json["parting"] is None
    known = {finding["part"]: finding["known_by"] for finding in done.json["steps"]}
    of_sampler = {"data": "records", "tokens": "records", "rewards": "records"}
    of_trainer = {"advantages": "records", "logprobs": "records", "loss": "metrics", "gradient": "metrics"}
    of_trainer |= {"weights": "checkpoint"}
    halves = {"sampler": of_sampler, "trainer": of_trainer}
    assert known == halves.get(options[-1], {**of_sampler, **of_trainer})
    assert fingerprint(run) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("policy.max_grad_norm=0.01", "weights"),
        ("normalize_std=false", "advantages"),
        ("generation.temperature=0.5", "tokens"),
    ],
)
def test_another_setting_shows_where_it_takes_effect(run: Path, nemorl: Command, setting: str, part: str) -> None:
    done = nemorl("compare", "replay", run, "--step", 2, "--set", setting)
    assert done.code == 1, done.err
    found = nemorl("compare", "replay", run, "--step", 2, "--set", setting, "--json").json["parting"]
    assert (found["step"], found["part"]) == (2, part)
    assert f"made again from the checkpoint of step 1 with {setting}, differs first" in " ".join(done.out.split())


@pytest.mark.slow
def test_a_record_or_checkpoint_that_was_changed_afterwards_is_found(
    run: Path, tmp_path: Path, nemorl: Command
) -> None:
    def other_token(row: dict[str, Any]) -> None:
        tokens = row["sequences"][0]["token_ids"]
        tokens[-1] = (tokens[-1] + 1) % 64

    copy = changed(run, tmp_path / "b", with_record("2-1-3", other_token), with_weight(3, "model.norm.weight", 0.5))
    sampled = nemorl("compare", "replay", copy, "--step", 2, "--only", "sampler", "--json")
    assert sampled.code == 1
    difference = sampled.json["parting"]["difference"]
    assert (difference["quantity"], difference["sample"]) == ("token", "train-2-1-3")
    weights = nemorl("compare", "replay", copy, "--step", 3, "--json").json["parting"]
    assert (weights["part"], weights["difference"]["quantity"]) == ("weights", "policy/model: model.norm.weight")


@pytest.mark.slow
def test_what_a_half_lacks_is_said_with_the_setting_that_keeps_it(
    tiny_model: Path, tmp_path: Path, nemorl: Command
) -> None:
    run = real_run(tiny_model, tmp_path / "a", records={"groups": 1}, max_steps=1)
    done = nemorl("compare", "replay", run, "--step", 1, "--only", "trainer")
    assert done.code == 2
    assert "recorded 8 of the 32 samples of step 1" in done.err
    assert "`records: {every: 1, groups: 4}` keeps all of them" in done.err


@pytest.mark.slow
def test_the_update_is_the_one_that_torch_makes_by_hand(run: Path, tiny_model: Path, nemorl: Command) -> None:
    """Step 2 without a line of ours: a transformers model, autograd, torch's own clipping and AdamW.

    One update per rollout: the ratio is 1 and its gradient that of the policy's log-prob, so
    loss = -sum(A * log p) / trained tokens. Cosine over 3 steps: the factor of the second update is
    (1 + cos(pi * 1 / 3)) / 2 = 0.75.
    """
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tiny_model), attn_implementation="eager"
    ).float()
    model.get_input_embeddings().padding_idx = None  # a sampled padding token is a token
    model.load_state_dict(load_file(run / "checkpoints/step_000001" / MODEL), strict=False)
    model.tie_weights()
    decays = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01}]
    norms = {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}  # as is usual
    optimizer = torch.optim.AdamW([*decays, norms], lr=5e-3 * 0.75, betas=(0.9, 0.999), eps=1e-8)
    moments = load_file(run / "checkpoints/step_000001" / OPTIMIZER)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {key: moments[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}

    rows = pq.read_table(run / "records/train/step_000002.parquet").to_pylist()
    count = sum(sum(row["sequences"][0]["mask"]) for row in rows)
    for row in rows:
        tokens, mask = (torch.tensor(row["sequences"][0][name]) for name in ("token_ids", "mask"))
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        (-row["advantage"] * logprobs[mask[1:]].sum() / count).backward()
    norm = clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()

    answer = nemorl("compare", "replay", run, "--step", 2, "--json").json
    assert answer["parting"] is None  # so what is in the run is what the replay made
    logged = RunFiles.of(run).metrics[2]
    assert logged["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert float(norm) > 0.3  # it was clipped
    learned = load_file(run / "checkpoints/step_000002" / MODEL)
    before = load_file(run / "checkpoints/step_000001" / MODEL)
    for name, parameter in model.named_parameters():
        update, by_hand = learned[name] - before[name], parameter.detach() - before[name]
        assert float((update - by_hand).norm() / by_hand.norm()) < 1e-3, name
