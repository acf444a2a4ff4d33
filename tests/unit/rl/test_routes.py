"""Routes of an episode of several turns, and runs that ask for routes which nobody tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
from nemorl.base.process.timing import Span
from nemorl.config import PolicyConfig
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl.types import Completion, Prompt, Sample, Score
from nemorl_dtensor import DTensorConfig
from nemorl_rl.agents.record import Call, plain_sample
from nemorl_rl.models.tiny import write_tiny_model
from recorded_messages import Raises

PROMPT = Prompt(0, "1+1=", (1, 2))
REPLAY: dict[str, Any] = {"name": "dtensor", "router": {"replay": True}}


def answer(prompt: tuple[int, ...], said: tuple[int, ...], first: int | None) -> Completion:
    """One whose tokens, with those of its prompt, went to experts ``first``, ``first`` + 1, ...; its last to none."""
    if first is None:
        return Completion(said, (-1.0,) * len(said), "stop")
    routes = numpy.append(numpy.arange(first, first + len(prompt) + len(said) - 1), -1).astype(numpy.int16)
    return Completion(said, (-1.0,) * len(said), "stop", routes=routes[:, None, None])


def episode(*calls: Call) -> Sample:
    return plain_sample(PROMPT, calls, Score(1.0), "", (), span=Span(0.0, 1.0))


def experts(sample: Any) -> list[int]:
    found: list[int] = sample.routes[:, 0, 0].tolist()
    return found


def test_a_token_keeps_the_routes_of_the_request_that_computed_it_first() -> None:
    seen = (1, 2, 10, 11, 20)
    sample = episode(Call(0, (1, 2), answer((1, 2), (10, 11), 30)), Call(1, seen, answer(seen, (13, 14), 50)))
    # Request 1 computed tokens 1 2 10 (30, 31, 32), and drew 11; request 2 computed all of 1 2 10 11 20 13 (50 to 55).
    assert sample.token_ids == (1, 2, 10, 11, 20, 13, 14)
    assert experts(sample) == [30, 31, 32, 53, 54, 55, -1]


def test_a_fork_has_the_routes_of_its_own_request() -> None:
    seen = (1, 2, 10, 20)
    calls = [
        Call(0, (1, 2), answer((1, 2), (10,), 30)),
        Call(1, seen, answer(seen, (13,), 50)),
        Call(2, seen, answer(seen, (14,), 70)),
    ]
    sample = episode(*calls)
    (fork,) = sample.branches
    assert experts(sample) == [30, 31, 52, 53, -1]
    assert experts(fork) == [70, 71, 72, 73, -1]
    assert [experts(part) for part in sample.sequences] == [experts(sample), experts(fork)]


def test_an_answer_that_tells_nothing_leaves_its_tokens_without_routes() -> None:
    seen = (1, 2, 10, 20)
    sample = episode(Call(0, (1, 2), answer((1, 2), (10,), 30)), Call(1, seen, answer(seen, (13,), None)))
    assert experts(sample) == [30, 31, -1, -1, -1]
    later = (1, 2, 10, 20, 13, 21)
    told = Call(2, later, answer(later, (15,), 90))
    sample = episode(Call(0, (1, 2), answer((1, 2), (10,), 30)), Call(1, seen, answer(seen, (13,), None)), told)
    assert experts(sample) == [30, 31, 92, 93, 94, 95, -1]
    silent = episode(Call(0, (1, 2), answer((1, 2), (10,), None)))
    assert silent.routes is None


MIXTURE = {"architecture": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
RUN: dict[str, Any] = {"algorithm": "grpo", "environment": "math", "data": "arithmetic", "kl_penalty": 0.0}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("mixture"), **MIXTURE)  # type: ignore[arg-type]


def test_a_run_that_replays_asks_its_sampler_for_routes(mixture: Path) -> None:
    policy = {"init": "random", "backend": REPLAY}
    config: Any = load_config({**RUN, "model": str(mixture), "policy": policy})
    assert config.sampling().routes
    assert not config.generation.sampling().routes, "validation does not"
    plain: Any = load_config({**RUN, "model": str(mixture), "policy": {"init": "random"}})
    assert not plain.sampling().routes


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"generation": {"backend": {"name": "server", "urls": ["http://127.0.0.1:9"]}}}, "policy.backend"),
        (
            {
                "policy": {"init": "random", "backend": {**REPLAY, "name": "megatron"}},
                "generation": {"backend": "megatron"},
            },
            "policy.backend",
        ),
    ],
)
def test_a_sampler_that_cannot_tell_routes_is_refused_by_name(
    mixture: Path, changes: dict[str, Any], path: str, raises: Raises
) -> None:
    policy = {"init": "random", "backend": REPLAY}
    with raises(ConfigError, path=path):
        load_config({**RUN, "model": str(mixture), "policy": policy, **changes})


def test_a_training_backend_that_cannot_replay_routes_is_refused_by_name(mixture: Path) -> None:
    class Forgetful(DTensorConfig):
        supports: ClassVar[Any] = DTensorConfig.supports - {"routes"}

    policy = PolicyConfig(model_name=str(mixture))
    for kind, expected in ((DTensorConfig, []), (Forgetful, ["backend.router.replay"])):
        backend = kind.model_validate({"router": {"replay": True}})
        assert [issue.path for issue in backend.rank_problems(policy, 1)] == expected


def test_a_model_without_experts_and_a_run_without_sampler_are_refused(
    tmp_path: Path, mixture: Path, raises: Raises
) -> None:
    policy = {"init": "random", "backend": REPLAY}
    dense = write_tiny_model(tmp_path)
    with raises(ConfigError, "experts", path="policy.backend.router.replay"):
        load_config({**RUN, "model": str(dense), "policy": policy})
    with raises(ConfigError, "routes", path="policy.backend"):
        load_config({"algorithm": "sft", "model": str(mixture), "policy": policy, "data": "arithmetic"})
