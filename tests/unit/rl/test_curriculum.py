"""The prompts of a run that samples by what became of them: draws, what is in flight, restarts, and whole runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import nemorl
import pytest
from buffer_world import World, names, worlds
from installed_plugins import Install
from nemorl.errors import ConfigError, PluginError, UsageError
from nemorl.metrics import values
from nemorl.plugins.index import Index
from nemorl.plugins.registry import Registry, replace_registry
from nemorl.types import Prompt, Sample, Score
from nemorl_cli.console import Console
from nemorl_rl.curriculum.curriculum import Curriculum
from nemorl_rl.curriculum.sampler import Draw, PromptSampler
from nemorl_rl.curriculum.thompson import Thompson
from nemorl_rl.curriculum.uniform import Uniform
from nemorl_rl.data.mixtures import Mixture
from nemorl_rl.data.rows import RowDataModule
from nemorl_rl.rollouts.buffer import AsyncRolloutBuffer
from nemorl_rl.rollouts.schedule import Settled
from recorded_messages import Raises

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]
STRATEGIES = ("uniform", "pass_rate", "thompson", "budget")


def group(*rewards: float) -> list[Sample]:
    prompt = Prompt(0, "1+1=", (5,))
    return [Sample(prompt, (5, 6), (False, True), (0.0, -1.0), Score(reward), "2", "stop") for reward in rewards]


class Lowest(PromptSampler):
    """The first rows that may be chosen."""

    def choose(self, draw: Draw) -> list[int]:
        return list(draw.free[: draw.count])


# Draws


def test_what_is_in_flight_is_not_drawn_again() -> None:
    curriculum = Curriculum(Lowest(), [6], seed=1)
    assert curriculum.draw(1, [0, 0]) == [0, 1]
    assert curriculum.draw(2, [0, 0]) == [2, 3]
    curriculum.settle(1, 1, group(1.0), 1)
    assert curriculum.draw(3, [0, 0]) == [1, 4]
    # One row is free, two are wanted: all may be chosen.
    assert curriculum.draw(4, [0, 0]) == [0, 1]


def test_a_row_that_was_given_up_is_free_and_unknown() -> None:
    curriculum = Curriculum(Lowest(), [3], seed=1)
    curriculum.draw(1, [0, 0])
    curriculum.settle(1, 0, None, 1)
    curriculum.settle(1, 1, group(1.0, 0.0), 1)
    assert curriculum.in_flight == set()
    assert [row for row, _ in curriculum.statistics] == [1]


def test_a_draw_that_is_not_settled_is_the_same_after_a_restart() -> None:
    before = Curriculum(Thompson(), [50], seed=1)
    for number in range(1, 4):
        before.draw(number, [0] * 8)
    drawn = {number: before.draw(number, []) for number in (1, 2, 3)}
    before.settle(2, 5, group(1.0, 0.0), 1)
    again = Curriculum(Thompson(), [50], seed=1)
    again.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert {number: again.draw(number, []) for number in (1, 2, 3)} == drawn
    assert again.in_flight == before.in_flight
    assert again.draw(4, [0] * 8) == before.draw(4, [0] * 8)
    assert again.state_dict() == before.state_dict()


def test_of_another_number_of_rows_nothing_is_known() -> None:
    before = Curriculum(Lowest(), [6], seed=1)
    before.draw(1, [0, 0])
    before.settle(1, 0, group(1.0), 1)
    again = Curriculum(Lowest(), [1], seed=1)
    again.load_state_dict(before.state_dict())
    assert (len(again.statistics), again.in_flight, again.newest) == (0, set(), 1)
    assert again.draw(1, [0]) == [0]


def test_metrics_tell_pass_rates_by_how_hard_a_prompt_was_at_first() -> None:
    curriculum = Curriculum(Lowest(), [10], seed=1)
    curriculum.draw(1, [0] * 3)
    for place, rewards in enumerate(([0.0, 0.0], [1.0, 0.0], [1.0, 1.0])):
        curriculum.settle(1, place, group(*rewards), 1)
    curriculum.draw(2, [0])
    curriculum.settle(2, 0, group(1.0, 1.0), 1)  # the hard one: 2 of 4, in the same step
    assert values(curriculum.metrics()) == {
        "prompts/seen_frac": 0.3,
        "prompts/visits": pytest.approx(4 / 3),
        "prompts/pass_rate/hard": 0.5,
        "prompts/pass_rate/medium": 0.5,
        "prompts/pass_rate/easy": 1.0,
    }


class Astray(PromptSampler):
    def choose(self, draw: Draw) -> list[int]:
        return [99] * draw.count


def test_a_sampler_that_chooses_rows_that_there_are_not_is_named(raises: Raises) -> None:
    with raises(PluginError, "Astray", 99):
        Curriculum(Astray(), [10], seed=1).draw(1, [0])


# Data


def drawn(data: RowDataModule, batches: int) -> list[str]:
    return [row["prompt"] for _ in range(batches) for row in data.next_batch()]


def test_uniform_draws_what_is_drawn_without_a_sampler() -> None:
    plain, sampled = RowDataModule(ROWS, 4, seed=3), RowDataModule(ROWS, 4, seed=3, sampler=Uniform())
    assert drawn(sampled, 8) == drawn(plain, 8)
    assert sampled.state_dict() == plain.state_dict()
    assert (sampled.epoch, sampled.steps(3)) == (plain.epoch, plain.steps(3)) == (3, 7)


@pytest.mark.parametrize("sampler", [Uniform(), Thompson(), Lowest()])
def test_a_mixture_keeps_its_proportions(sampler: PromptSampler) -> None:
    tables = [[{"prompt": f"{name}{i}"} for i in range(20)] for name in "ab"]
    data = RowDataModule(Mixture(tables, [3, 1]), 8, seed=1, sampler=sampler)
    for _ in range(3):
        batch = [row["prompt"] for row in data.next_batch()]
        assert Counter(prompt[0] for prompt in batch) == {"a": 6, "b": 2}
        assert len({*batch}) == 8


# Rollouts that run ahead


@pytest.fixture(scope="module")
def build(tiny_model: Path) -> Iterator[Callable[..., World]]:
    with worlds(tiny_model) as made:
        yield made


def sampled_buffer(world: World, **settings: Any) -> tuple[AsyncRolloutBuffer, Curriculum]:
    """A buffer over 12 rows of which the lowest free ones are drawn, and its curriculum."""
    data = RowDataModule([{"prompt": name} for name in names(*range(12))], world.prompts, seed=1, sampler=Lowest())
    assert data.curriculum is not None
    curriculum = data.curriculum

    def settle(row: Settled) -> None:
        curriculum.settle(row.batch, row.index, row.group, row.step)

    limits: Any = {**world.limits, **settings}
    buffer = AsyncRolloutBuffer(
        data, world.engine, world.plan, seed_of=lambda number: number, on_settled=settle, **limits
    )
    return buffer, curriculum


def test_rollouts_that_ran_ahead_are_drawn_again_after_a_restart(build: Callable[..., World]) -> None:
    world = build(prompts=2, group=2, staleness=1)
    world.buffer, curriculum = sampled_buffer(world)
    world.doors.close()
    # Batch 1 is 0 and 1. While 1 is with its environment, batch 2 is begun without it: 2 and 3.
    assert world.take_of("0", "2") == names(0, 2)
    assert curriculum.in_flight == {1, 3}
    assert [row for row, _ in curriculum.statistics] == [0, 2]
    state = json.loads(json.dumps([curriculum.state_dict(), world.buffer.state_dict()]))
    world.let_all_go()

    again = build(prompts=2, group=2, staleness=1)
    again.buffer, restored = sampled_buffer(again)
    restored.load_state_dict(state[0])
    again.buffer.load_state_dict(state[1])
    again.doors.close()
    assert again.take_of("1", "3") == names(1, 3)
    assert restored.in_flight == {0, 2}  # batch 3, the lowest that were free
    assert [record.visits for _, record in restored.statistics] == [1, 1, 1, 1]


def test_groups_that_a_filter_rejects_are_known_too(build: Callable[..., World]) -> None:
    world = build(prompts=2, group=2, staleness=0, keep=lambda group: int(group[0].prompt.text) % 2 == 0)
    world.buffer, curriculum = sampled_buffer(world)
    # Batch 1 is 0 and 1, which is rejected and free again; 0 is in flight until it is taken, so batch 2 is 1 and 2.
    assert world.take() == names(0, 2)
    assert {row: record.visits for row, record in curriculum.statistics} == {0: 1, 1: 2, 2: 1}


# Whole runs


def settings(model: Path, run_dir: Path, **options: Any) -> dict[str, Any]:
    return {
        "algorithm": "grpo",
        "model": str(model),
        "run_dir": str(run_dir),
        "num_prompts_per_step": 3,
        "num_generations_per_prompt": 4,
        "max_steps": 6,
        "kl_penalty": 0.0,
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 3},
        "generation": {"max_new_tokens": 4},
        "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-2}},
        **options,
    }


def reward(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)) % 2)


def fit(config: Mapping[str, Any], *, resume: bool = False) -> None:
    nemorl.load_config(config).build().fit(ROWS, reward, resume=resume, console=Console(quiet=True))


def ending(run_dir: Path) -> tuple[Any, Any, bytes]:
    """The last checkpoint's data and prompts, and the weights byte by byte."""
    state = json.loads((run_dir / "checkpoints" / "step_000006" / "trainer.json").read_text())
    return state["data"], state.get("prompts"), (run_dir / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", STRATEGIES)
def test_a_run_that_is_continued_equals_one_that_was_not_interrupted(
    tiny_model: Path, tmp_path: Path, sampling: str
) -> None:
    fit(settings(tiny_model, tmp_path / "whole", prompt_sampling=sampling))
    fit(settings(tiny_model, tmp_path / "parts", prompt_sampling=sampling, max_steps=2))
    fit(settings(tiny_model, tmp_path / "parts", prompt_sampling=sampling), resume=True)
    assert ending(tmp_path / "parts") == ending(tmp_path / "whole")
    statistics = ending(tmp_path / "parts")[1]["statistics"]
    assert sum(statistics["visits"]) == 18
    assert sum(statistics["attempts"]) == 72


@pytest.mark.slow
def test_uniform_and_no_sampler_learn_the_same_to_the_bit(tiny_model: Path, tmp_path: Path) -> None:
    fit(settings(tiny_model, tmp_path / "unset"))
    fit(settings(tiny_model, tmp_path / "uniform", prompt_sampling="uniform"))
    unset, uniform = ending(tmp_path / "unset"), ending(tmp_path / "uniform")
    assert (unset[0], unset[2]) == (uniform[0], uniform[2])
    assert unset[1] is None
    assert set(uniform[1]["statistics"]["row"]) == set(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dynamic_sampling": True}], ids=["all", "filtered"])
def test_a_buffer_without_staleness_changes_nothing(tiny_model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    ahead = {"rollouts": {"mode": "async", "max_staleness": 0}}
    fit(settings(tiny_model, tmp_path / "sync", prompt_sampling="thompson", **options))
    fit(settings(tiny_model, tmp_path / "async", prompt_sampling="thompson", **options, **ahead))
    assert ending(tmp_path / "sync")[1:] == ending(tmp_path / "async")[1:]


# Config


def config(data: Any, **options: Any) -> Any:
    given = {"algorithm": "grpo", "model": "org/model", "environment": "math", "data": data}
    return nemorl.load_config({**given, **options})


def test_data_sampling_and_prompt_sampling_are_one() -> None:
    sampled = config({"name": "arithmetic", "sampling": {"name": "thompson", "target": 0.4}})
    assert sampled.prompt_sampling == Thompson(target=0.4)
    assert sampled == config("arithmetic", prompt_sampling={"name": "thompson", "target": 0.4})
    assert nemorl.load_config(sampled.model_dump(mode="json")) == sampled
    assert config("arithmetic").prompt_sampling is None


def test_an_unknown_sampler_is_named_with_those_that_there_are(raises: Raises) -> None:
    with raises(ConfigError, "thomson", "pass_rate", "thompson", path="data.sampling"):
        config({"name": "arithmetic", "sampling": "thomson"})


@pytest.mark.parametrize(
    ("options", "place"),
    [({"target": 1.0}, "target"), ({"half_life_steps": 0}, "half_life_steps"), ({"tagret": 0.4}, "tagret")],
)
def test_a_wrong_option_is_reported_where_it_was_written(raises: Raises, options: dict[str, Any], place: str) -> None:
    with raises(ConfigError, path=f"data.sampling.{place}"):
        config({"name": "arithmetic", "sampling": {"name": "thompson", **options}})
    with raises(ConfigError, path=f"prompt_sampling.{place}"):
        config("arithmetic", prompt_sampling={"name": "thompson", **options})


def test_a_data_module_that_chooses_itself_is_refused(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    trainer = nemorl.load_config(settings(tiny_model, tmp_path / "run", prompt_sampling="thompson")).build()
    with raises(UsageError, "DataModule", "data.sampling"):
        trainer.fit(RowDataModule(ROWS, 3, seed=1), reward, console=Console(quiet=True))


def test_an_installed_package_adds_a_sampler(install: Install) -> None:
    code = """
        from nemorl_rl.curriculum.sampler import PromptSampler

        class Last(PromptSampler):
            skipped: int = 0
            def scores(self, draw):
                return [float(row) if row + self.skipped < len(draw.free) else -1.0 for row in draw.free]
    """
    install("acme-last", {"prompt_sampler.last": "acme_last:Last"}, group="slots", code=code)
    before = replace_registry(Registry(Index.installed()))
    try:
        found = config({"name": "arithmetic", "sampling": {"name": "last", "skipped": 1}})
        assert found.model_dump(mode="json")["prompt_sampling"] == {"name": "last", "skipped": 1}
    finally:
        replace_registry(before)
    data = RowDataModule(ROWS, 2, seed=1, sampler=found.prompt_sampling)
    assert drawn(data, 1) == ["8+1=", "7+1="]
