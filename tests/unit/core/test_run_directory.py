"""Who may write where: claiming a run's directory, continuing in it, and refusing another config."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from nemorl.base.text.yaml_text import format_yaml, parse_yaml
from nemorl.config.base import RESUMABLE, Config, identity
from nemorl.config.load import load_config
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigError, NemorlError, RunInUseError, UsageError
from nemorl.storage.run_directory import RunDirectory, default_name, run_path, to_yaml
from pydantic import Field
from recorded_messages import Raises


def config(**changes: Any) -> RunConfig:
    return load_config({"algorithm": "grpo", "model": "some/model", **changes})


def claim(wanted: RunConfig, *, resume: bool) -> RunDirectory:
    return RunDirectory.claim(wanted, resume=resume, tell=lambda _: None)


def start(wanted: RunConfig, *, resume: bool = False) -> Path:
    """Claim a directory and leave in it what a run leaves that completes a step and ends."""
    with claim(wanted, resume=resume) as directory:
        (directory.path / "config.yaml").write_text(to_yaml(wanted))
        (directory.path / "metrics.jsonl").write_text('{"step": 1}\n')
    return directory.path


def claimed(wanted: RunConfig, *, resume: bool = True) -> tuple[Path, bool]:
    """A claim that is given up at once: the directory, and whether it is a continuation."""
    with claim(wanted, resume=resume) as directory:
        return directory.path, directory.is_resumed


@pytest.fixture(autouse=True)
def _inside_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_default_name_follows_from_the_config() -> None:
    assert default_name(config()) == default_name(config())
    assert default_name(config()) != default_name(config(seed=1))
    assert default_name(config()).startswith("grpo-")
    assert run_path(config()) == Path("runs") / default_name(config())


MAY_CHANGE = {
    "": "cluster validation checkpoint loggers plugins max_steps max_epochs run_dir records weights",
    "policy.": "python tensor_parallel_size activation_checkpointing microbatch_tokens",
    "policy.backend.": "layout attn_implementation data_parallel_replicas sequence_parallel logprob_chunk_tokens "
    "shelved_adapters_gib expert_parallel_size context_parallel_size context_parallel_method offload",
    "generation.": "python",
    "generation.backend.": "max_batch_rows kv_cache_tokens snapshots",
    "rollouts.": "adapters max_batches_per_step breaker environment_concurrency mismatch_warning mismatch_limit",
    "environment.": "workers",
}
"""All that may differ when a grpo run with the math environment goes on. What is tested to be neutral, and how: below
and in ``test_resume_layout.py`` and ``integration/dtensor``."""


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(data, dict) or not data:
        yield path, data
        return
    for key, below in data.items():
        yield from leaves(below, f"{path}.{key}" if path else key)


def altered(data: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy that says something else at ``path``."""
    data = copy.deepcopy(data)
    *above, last = path.split(".")
    target = data
    for key in above:
        target = target[key]
    target[last] = {"other": target[last]}
    return data


@pytest.mark.slow
def test_all_but_what_changes_no_result_makes_a_run_the_run_it_is(tmp_path: Path) -> None:
    wanted = config(run_dir=str(tmp_path / "mine"), data="arithmetic", environment="math")
    recorded = start(wanted) / "config.yaml"
    data = yaml.safe_load(to_yaml(wanted))
    paths = [path for path, _ in leaves(data)]
    free = [f"{section}{name}." for section, names in MAY_CHANGE.items() for name in names.split()]
    assert len(paths) > 100
    for path in paths:
        recorded.write_text(yaml.safe_dump(altered(data, path)))
        if f"{path}.".startswith(tuple(free)):
            assert claimed(wanted) == (tmp_path / "mine", True), path
            continue
        with pytest.raises(ConfigError) as caught:
            claimed(wanted)
        # A mapping differs from a value as a whole, from nothing in what it holds.
        assert {problem.path.removesuffix(".other") for problem in caught.value.problems} == {path}


def test_what_may_change_between_a_run_and_its_continuation_is_not_in_the_name() -> None:
    changes = {
        "max_steps": 3,
        "run_dir": None,
        "validation": {"every": 3},
        "checkpoint": {"every": 7},
        "max_epochs": 2,
        "cluster": {"launcher": "ray", "workers_per_node": 4},
        "policy": {
            "tensor_parallel_size": 2,
            "microbatch_tokens": 99,
            "backend": {"name": "dtensor", "data_parallel_replicas": 2, "layout": "packed"},
        },
        "generation": {"backend": {"name": "hf", "max_batch_rows": 3}},
        "rollouts": {"environment_concurrency": 2},
    }
    assert default_name(config(**changes)) == default_name(config())
    assert default_name(config(policy={"precision": "bfloat16"})) != default_name(config())


class Sampler(Config):
    """As a plugin inside a plugin has it."""

    seed: int = 0
    width: Annotated[int, RESUMABLE] = 1


class Outer(Config):
    one: Sampler = Sampler()
    maybe: Sampler | None = None
    many: tuple[Sampler, ...] = ()
    named: dict[str, Sampler] = Field(default_factory=dict)


def test_a_mark_counts_wherever_a_config_stands() -> None:
    marked = Outer(maybe=Sampler(width=2), many=(Sampler(width=3), Sampler(seed=4)), named={"a": Sampler(width=5)})
    assert identity(marked, marked.model_dump(mode="json")) == {
        "one": {"seed": 0},
        "maybe": {"seed": 0},
        "many": [{"seed": 0}, {"seed": 4}],
        "named": {"a": {"seed": 0}},
    }
    # What a run recorded may have another shape: it is kept, to be told as a difference.
    assert identity(Outer(), {"one": [3], "maybe": {"width": 2}, "gone": 1}) == {
        "one": [3],
        "maybe": {"width": 2},
        "gone": 1,
    }


def test_the_resolved_config_names_the_same_run(tmp_path: Path) -> None:
    resolved = tmp_path / "config.yaml"
    resolved.write_text(to_yaml(config()))
    assert default_name(load_config(resolved)) == default_name(config())


def test_a_default_directory_that_is_taken_gets_a_number() -> None:
    first, second, third = (start(config()) for _ in range(3))
    assert [path.name for path in (second, third)] == [f"{first.name}-2", f"{first.name}-3"]


def test_a_default_directory_is_continued_on_request() -> None:
    first = start(config())
    assert claimed(config()) == (first, True)


def test_resuming_where_nothing_is_starts_a_run() -> None:
    path, is_resumed = claimed(config())
    assert path.is_dir()
    assert not is_resumed


def test_an_explicit_directory_that_holds_a_run_is_refused(tmp_path: Path, raises: Raises) -> None:
    wanted = config(run_dir=str(tmp_path / "mine"))
    start(wanted)
    with raises(UsageError, "mine", "--resume"):
        claim(wanted, resume=False)


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_completed_no_step_is_no_run(tmp_path: Path, resume: bool, raises: Raises) -> None:
    place = tmp_path / "mine"
    start(config(run_dir=str(place), seed=7))
    (place / "metrics.jsonl").write_text('{"step": 0, "validation/accuracy": 0.5}\n{"st')
    assert claimed(config(run_dir=str(place)), resume=resume) == (place, False)
    (place / "checkpoints/step_000001").mkdir(parents=True)
    with raises(NemorlError):
        claimed(config(run_dir=str(place)), resume=resume)


def test_two_new_runs_at_once_get_a_directory_each(raises: Raises) -> None:
    first, second = (claim(config(), resume=False) for _ in range(2))
    assert second.path == first.path.with_name(f"{first.path.name}-2")
    with raises(RunInUseError, varies=r"grpo-\w+"):
        claim(config(), resume=True)
    for directory in (first, second):
        directory.close()


def test_a_refused_claim_leaves_no_lock(tmp_path: Path) -> None:
    place = str(tmp_path / "mine")
    start(config(run_dir=place))
    with pytest.raises(ConfigError):
        claim(config(run_dir=place, seed=7), resume=True)
    assert claimed(config(run_dir=place)) == (tmp_path / "mine", True)


DAMAGE: dict[str, Any] = {
    "gone": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "emptied": lambda path: path.write_text(""),
    "cut": lambda path: path.write_text("policy: {model_name"),
    "a list": lambda path: path.write_text("[1]"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_lost_its_config_is_neither_continued_nor_overwritten(
    tmp_path: Path, damage: Any, resume: bool, raises: Raises
) -> None:
    wanted = config(run_dir=str(tmp_path / "mine"))
    damage(start(wanted) / "config.yaml")
    with raises(UsageError, "mine"):
        claimed(wanted, resume=resume)
    assert (tmp_path / "mine/metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_folder_without_a_run_in_it_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep me")
    path, is_resumed = claimed(config(run_dir=str(tmp_path / "mine")))
    assert not is_resumed
    assert (path / "notes.txt").is_file()


def test_another_config_is_refused_with_every_difference(tmp_path: Path, raises: Raises) -> None:
    place = str(tmp_path / "mine")
    start(config(run_dir=place))
    other = config(run_dir=place, seed=7, policy={"optimizer": {"lr": 1e-3}}, kl_penalty=0.0, max_steps=99)
    with raises(ConfigError, path=["kl_penalty", "policy.optimizer.lr", "seed"]) as caught:
        claim(other, resume=True)
    assert {problem.path: problem.message for problem in caught.value.problems} == {
        "kl_penalty": "the run has 0.01, this config 0.0",
        "policy.optimizer.lr": "the run has 1e-06, this config 0.001",
        "seed": "the run has 42, this config 7",
    }


def test_a_run_goes_on_under_a_version_that_has_more_options(tmp_path: Path, raises: Raises) -> None:
    wanted = config(run_dir=str(tmp_path / "mine"))
    place = start(wanted)
    recorded = parse_yaml((place / "config.yaml").read_text())
    del recorded["kl_penalty"]
    del recorded["policy"]["optimizer"]["betas"]
    (place / "config.yaml").write_text(format_yaml(recorded))
    assert claimed(wanted) == (place, True)
    (place / "config.yaml").write_text(format_yaml({**recorded, "of_another_version": 3}))
    with raises(ConfigError, path=["kl_penalty", "of_another_version", "policy.optimizer.betas"]):
        claim(wanted, resume=True)


@pytest.mark.parametrize(
    "change",
    [{"max_steps": 9}, {"max_epochs": 3}, {"validation": {"every": 1}}, {"checkpoint": {"keep_last": 5}}],
    ids=str,
)
def test_what_does_not_change_a_step_may_change(tmp_path: Path, change: dict[str, Any]) -> None:
    place = str(tmp_path / "mine")
    path = start(config(run_dir=place))
    assert claimed(config(run_dir=place, **change)) == (path, True)


def test_another_plugin_of_a_kind_is_a_difference(tmp_path: Path) -> None:
    place = str(tmp_path / "mine")
    start(config(run_dir=place, data="arithmetic"))
    with pytest.raises(ConfigError) as caught:
        claim(config(run_dir=place, data={"name": "arithmetic", "max_digits": 3}), resume=True)
    assert [problem.path for problem in caught.value.problems] == ["data.max_digits"]


def test_the_resolved_config_is_complete_yaml() -> None:
    data = yaml.safe_load(to_yaml(config()))
    assert data["policy"]["model_name"] == "some/model"
    assert data["policy"]["backend"]["name"] == "dtensor"
    assert set(data) == set(type(config()).model_fields) - {"model"}


def test_events_are_appended_lines(tmp_path: Path) -> None:
    for name in ("started", "finished"):
        with claim(config(run_dir=str(tmp_path / "mine")), resume=True) as directory:
            directory.event(name, step=3)
    lines = [json.loads(line) for line in (tmp_path / "mine/events.jsonl").read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [("started", 3), ("finished", 3)]
    assert all(line["time"] > 0 for line in lines)
