"""A draft that learns beside its policy: what it learns from, what it costs the algorithm (nothing), what is kept."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import nemorl
import pytest
import torch
from nemorl.base.files.jsonl import read_jsonl
from nemorl.config.base import RESUMABLE
from nemorl.config.load import validate
from nemorl.config.models import PolicyConfig
from nemorl.errors import ConfigError
from nemorl.plugins.index import Index
from nemorl.plugins.registry import Registry
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_cli.console import Console
from nemorl_dtensor.config import HFGenerationConfig
from nemorl_dtensor.generation import HFGeneration
from nemorl_rl.callbacks import Callback
from nemorl_rl.drafts.config import FreshDraft, GuessesAhead, KeepFresh, draft_models
from nemorl_rl.drafts.training import DraftLoss, spread
from nemorl_rl.placement.tenants import SYNC, phases
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.drafted import DraftedHandle, parts_of
from nemorl_testing.models import load_reference, plain_logprobs
from nemorl_testing.models import tiny_model as saved_model
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises
from safetensors.torch import load_file

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]


class Guessing(HFGeneration):
    """The embedded engine, which notes the drafts that come with its updates and guesses nothing."""

    drafts: ClassVar[list[dict[str, torch.Tensor]]] = []

    def update_weights(self, handle: WeightHandle, version: int) -> int | None:
        draft = parts_of(handle)[1]
        if draft is not None:
            assert draft.version == version
            self.drafts.append({name: tensor.clone() for bucket in draft.buckets() for name, tensor in bucket.items()})
        return super().update_weights(handle, version)


class GuessingConfig(HFGenerationConfig, GuessesAhead):
    """Options of ``Guessing``."""

    draft: Annotated[str | None, RESUMABLE] = None
    keep_fresh: Annotated[KeepFresh, RESUMABLE] = KeepFresh()

    @property
    def fresh_draft(self) -> FreshDraft | None:
        return None if self.draft is None else FreshDraft(self.draft, self.keep_fresh)

    def build(self, generation: Any, policy: Any, worker: Any, weights: Any) -> Any:
        return Guessing(generation, policy, worker, weights, self)


@pytest.fixture(autouse=True)
def _guessing() -> Iterator[None]:
    Guessing.drafts.clear()
    with use_registry(Registry(Index.installed())):
        nemorl.register_generation_backend("guessing")(GuessingConfig)
        yield


def settings(run_dir: Path, *, fresh: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    backend = {"name": "guessing", "draft": str(saved_model(num_hidden_layers=1)), "keep_fresh": fresh or {"lr": 0.01}}
    return {
        "algorithm": "grpo",
        "model": str(saved_model()),
        "run_dir": str(run_dir),
        "max_steps": 3,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 4,
        "policy": {"max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}},
        "generation": {"max_new_tokens": 6, "backend": backend},
        "validation": {"every": 2, "max_samples": 2},
        "checkpoint": {"every": 1, "keep_last": 9, "export": False},
        **changes,
    }


def reward(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)) % 7)


def fit(given: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The records of all steps."""
    nemorl.load_config(given).build().fit(ROWS, reward, console=Console(quiet=True), **options)
    return [record for record in read_jsonl(Path(given["run_dir"]) / "metrics.jsonl") if "train/loss" in record]


def draft_of(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    [file] = (run_dir / f"checkpoints/step_{step:06d}/draft/model").iterdir()
    return load_file(file)


def test_the_loss_is_the_distance_from_the_policy_at_what_it_sampled() -> None:
    batch = TokenBatch.from_sequences([[5, 7, 2]], [[False, True, True]])
    batch = batch.with_tokens(generation_logprobs=torch.tensor([math.nan, -0.5, -0.25]))
    logprobs = torch.tensor([math.nan, -1.5, -0.75], requires_grad=True)
    loss, _ = DraftLoss()(logprobs, batch)
    # ((-0.5 + 1.5) + (-0.25 + 0.75)) / 2 = 0.75, and each of two tokens has half of the gradient of -log p
    assert loss.item() == pytest.approx(0.75)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -0.5, -0.5]


def test_a_budget_of_tokens_takes_samples_of_all_prompts() -> None:
    def sample(index: int) -> Sample:
        return Sample(Prompt(index, "", (5,)), (5, 7), (False, True), (0.0, -0.5), Score(1.0), "", "stop")

    samples = Samples([sample(index) for index in (0, 0, 1, 1, 2, 2)])
    # 12 tokens for 6 samples: a budget of 7 has room for 3 of them
    assert [one.prompt.index for one in spread(samples, 7)] == [0, 1, 2]
    assert len(spread(samples, 12)) == 6
    assert len(spread(samples, None)) == 6
    assert len(spread(samples, 1)) == 1
    assert spread([], 4) == []


def test_every_update_brings_the_engine_the_draft_that_learns(tmp_path: Path) -> None:
    first = Kept()
    records = fit(settings(tmp_path / "run"), callbacks=[first])
    stored = load_file(Path(saved_model(num_hidden_layers=1)) / "model.safetensors")
    before, *after = Guessing.drafts
    assert len(after) == 3
    assert all(before[name].equal(stored[name]) for name in stored)
    name = "model.layers.0.mlp.down_proj.weight"
    found = [one[name] for one in Guessing.drafts]
    assert all(not one.equal(other) for one, other in pairwise(found))
    for step in (1, 2, 3):  # what was sent is what was saved
        saved = draft_of(tmp_path / "run", step)
        assert saved[name].equal(after[step - 1][name])
    batch = TokenBatch.from_samples(first.samples[0])
    gaps = batch["generation_logprobs"] - plain_logprobs(load_reference(saved_model(num_hidden_layers=1)), batch)
    assert records[0]["train/draft_loss"] == pytest.approx(gaps[batch.mask].mean().item(), rel=1e-4)
    assert all(record["timing/train/draft_training"] > 0 for record in records)
    others = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert all("train/draft_loss" not in one for one in others if "train/loss" not in one)


@pytest.mark.slow
def test_the_policy_learns_what_it_learns_without_a_draft(tmp_path: Path) -> None:
    plain = settings(tmp_path / "plain")
    plain["generation"] = {"max_new_tokens": 6}
    names = ("train/loss", "train/reward", "train/grad_norm")
    found = [
        [[record[name] for name in names] for record in fit(given)] for given in (plain, settings(tmp_path / "run"))
    ]
    assert found[0] == found[1]


@pytest.mark.slow
def test_taking_turns_on_the_devices_changes_no_draft(tmp_path: Path) -> None:
    for name, cluster in (("stay", {}), ("turns", {"take_turns": True})):
        fit(settings(tmp_path / name, cluster=cluster))
    found, wanted = draft_of(tmp_path / "turns", 3), draft_of(tmp_path / "stay", 3)
    assert all(found[name].equal(wanted[name]) for name in wanted)


@pytest.mark.slow
def test_it_learns_as_often_and_from_as_much_as_it_is_told(tmp_path: Path) -> None:
    records = fit(settings(tmp_path / "run", fresh={"lr": 0.01, "every": 2, "updates": 2, "max_tokens": 30}))
    assert ["train/draft_loss" in record for record in records] == [False, True, False]
    assert all("timing/train/policy_training" in record for record in records)
    first, second, third = (draft_of(tmp_path / "run", step)["model.norm.weight"] for step in (1, 2, 3))
    assert not first.equal(second)
    assert second.equal(third)


@pytest.mark.slow
def test_a_complete_run_leaves_its_draft_beside_its_model(tmp_path: Path) -> None:
    fit(settings(tmp_path / "run", checkpoint={"every": 0, "export": True}))
    exported = load_file(tmp_path / "run/draft/model.safetensors")
    assert exported["model.norm.weight"].equal(draft_of(tmp_path / "run", 3)["model.norm.weight"])
    assert (tmp_path / "run/draft/config.json").is_file()


class Kept(Callback):
    """Keeps what was sampled."""

    def __init__(self) -> None:
        self.samples: list[Samples] = []

    def on_rollout_end(self, samples: Samples) -> None:
        self.samples.append(samples)


class KillItself(Callback):
    """Ends the process once the draft has learnt from the third step, and the policy has not."""

    def on_rollout_end(self, step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_its_draft_and_the_optimizer_of_it(tmp_path: Path) -> None:
    run = settings(tmp_path / "run")
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, __file__, repr(run)], check=False, timeout=120, env=paths)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "run/checkpoints/step_000003").exists()
    continued = fit(run, resume=True)
    whole = fit(settings(tmp_path / "whole"))
    assert [one["train/draft_loss"] for one in continued] == [one["train/draft_loss"] for one in whole]
    found, wanted = draft_of(tmp_path / "run", 3), draft_of(tmp_path / "whole", 3)
    assert all(found[name].equal(wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"algorithm": "ppo"},
        {"algorithm": "opd", "teacher": {"model": "org/teacher"}},
        {"algorithm": "sdft"},
    ],
    ids=lambda one: one["algorithm"],
)
def test_algorithms_with_models_of_their_own_have_a_draft_besides(algorithm: dict[str, Any], tmp_path: Path) -> None:
    backend = {"name": "guessing", "draft": str(saved_model(num_hidden_layers=1))}
    config = nemorl.load_config({**algorithm, "model": "org/policy", "generation": {"backend": backend}})
    plain = nemorl.load_config({**algorithm, "model": "org/policy"})
    assert config.auxiliary_models.keys() == {*plain.auxiliary_models, "draft"}


@pytest.mark.slow
def test_a_run_without_a_draft_so_far_begins_one_when_it_goes_on(tmp_path: Path) -> None:
    backend = {"name": "guessing"}
    fit(settings(tmp_path / "run", max_steps=1, generation={"max_new_tokens": 6, "backend": backend}))
    assert Guessing.drafts == []
    records = fit(settings(tmp_path / "run"), resume=True)
    stored = load_file(Path(saved_model(num_hidden_layers=1)) / "model.safetensors")
    assert all(Guessing.drafts[0][name].equal(stored[name]) for name in stored)
    assert ["train/draft_loss" in record for record in records] == [False, True, True]


def test_an_algorithm_that_forgets_the_draft_is_refused(raises: Raises) -> None:
    class Forgetful(nemorl.GRPOConfig):
        @property
        def auxiliary_models(self) -> Any:
            return {}

    backend = {"name": "guessing", "draft": str(saved_model())}
    with raises(ConfigError, "auxiliary_models", path="generation.backend.speculative.keep_fresh"):
        validate(Forgetful, {"model": "org/policy", "generation": {"backend": backend}})


def test_an_engine_of_another_environment_is_refused_a_draft(raises: Raises) -> None:
    class StandIn(HFGenerationConfig):
        speculative: Any = None

    nemorl.register_generation_backend("elsewhere")(StandIn)

    def run(**options: Any) -> Any:
        backend = {"name": "elsewhere", "speculative": {"method": "draft_model", **options}}
        return nemorl.load_config({"algorithm": "grpo", "model": "org/policy", "generation": {"backend": backend}})

    assert run().auxiliary_models == {}
    with raises(ConfigError, path="generation.backend.speculative.keep_fresh"):
        run(keep_fresh={})


def test_a_draft_is_small_and_trained_whole_whatever_the_policy_is() -> None:
    policy = PolicyConfig(
        model_name="org/policy",
        backend={"name": "dtensor", "context_parallel_size": 2},
        precision="bfloat16",
        tensor_parallel_size=2,
        lora={"rank": 4},
        optimizer={"lr": 1e-6, "weight_decay": 0.3},
        schedule={"kind": "cosine"},
        microbatch_tokens=512,
    )
    model = draft_models(GuessingConfig(draft="org/draft", keep_fresh={"lr": 2e-5}), policy)["draft"]
    assert model.learns
    found = model.policy
    assert (found.model_name, found.optimizer.lr, found.lora, found.tensor_parallel_size) == (
        "org/draft",
        2e-5,
        None,
        1,
    )
    assert (found.backend, found.schedule.kind) == (type(policy.backend)(), "constant")
    assert (found.precision, found.microbatch_tokens) == ("bfloat16", 512)  # the engine has both in one precision


def test_a_draft_is_on_the_devices_while_weights_are_sent() -> None:
    assert phases(["policy", "draft"], shares_weights=False)[SYNC] == {
        "policy": ("weights",),
        "draft": ("weights",),
        "engine": ("weights",),
    }


def test_who_knows_no_drafts_reads_the_policys_weights() -> None:
    one, other = ({"w": torch.ones(1)}, {"w": torch.zeros(1)})
    policy, draft = (handle_of(found) for found in (one, other))
    both = DraftedHandle.of(policy, draft)
    assert [bucket["w"].item() for bucket in both.buckets()] == [1.0]
    assert parts_of(both) == (policy, draft)
    assert parts_of(policy) == (policy, None)
    assert both.is_in_process


def handle_of(weights: dict[str, torch.Tensor]) -> WeightHandle:
    return in_process_handle(lambda: iter([weights]), 1)


if __name__ == "__main__":
    from ast import literal_eval

    nemorl.register_generation_backend("guessing")(GuessingConfig)
    fit(literal_eval(sys.argv[1]), callbacks=[KillItself()])
