"""Every exception that Ray has is about a worker, a machine, the cluster, the environment or the call itself."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from nemorl.contracts import RequestBackend
from nemorl.errors import ForeignError, ResourceError, WorkerLostError
from nemorl.resources.ray_errors import FATES, FIXES, fate_of
from nemorl.types import GenerationRequest, SamplingParams

pytestmark = pytest.mark.slow  # Ray is imported


def every_exception() -> Iterator[type[Exception]]:
    from ray.exceptions import RayError

    waiting: list[type[Exception]] = [RayError]
    while waiting:
        found = waiting.pop()
        if found.__module__ == "ray.exceptions":
            waiting += found.__subclasses__()
            if found is not RayError:
                yield found


def made(kind: type[Exception]) -> Exception:
    """An exception of Ray's, whatever its constructor wants."""
    error = kind.__new__(kind)
    error.args = ("the node is at 97 % of its memory",)
    kind.__str__ = lambda self: self.args[0]  # type: ignore[method-assign, assignment, return-value]
    return error


def test_each_is_known_by_its_own_name_and_none_twice() -> None:
    names = [name for known in FATES.values() for name in known]
    assert len(names) == len(set(names))
    assert {kind.__name__ for kind in every_exception()} == set(names), (
        "sort what this Ray has new, drop what it has not"
    )


def group() -> Any:
    from nemorl.resources.ray_answers import Answers
    from nemorl.resources.ray_ranks import GroupSettings
    from nemorl.resources.ray_workers import RayWorkerGroup

    found = RayWorkerGroup.__new__(RayWorkerGroup)
    found.settings, found._answers = GroupSettings(), Answers(1.0, None)
    return found


def worker(number: int, host: str) -> Any:
    from nemorl.resources.ray_actor import WorkerFacts
    from nemorl.resources.ray_ranks import GroupSettings, Rank

    return Rank(number, GroupSettings(), None, WorkerFacts(host, "", 7), (), 0)


@pytest.mark.parametrize("name", sorted({name for known in FATES.values() for name in known} - {"RayTaskError"}))
def test_a_worker_that_is_gone_is_replaced_and_all_else_ends_the_run_in_words(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.exceptions

    kind = getattr(ray.exceptions, name)
    monkeypatch.setattr(kind, "__str__", kind.__str__)  # as it was, afterwards
    error = made(kind)
    rank = worker(3, "node9")

    def get() -> None:
        raise error

    with pytest.raises((WorkerLostError, ResourceError, ForeignError), match=r"rank\s3") as caught:
        group()._answers.read("train_step", rank, get, {})
    is_lost = fate_of(error) == "worker"
    assert isinstance(caught.value, WorkerLostError) is is_lost is rank.is_lost
    assert is_lost or FIXES[fate_of(error)] == caught.value.fix
    assert "97 %" in str(caught.value) or isinstance(error, ray.exceptions.RayActorError)


def test_a_reply_that_nobody_expects_hangs_nobody() -> None:
    answers: list[Future[Any]] = []
    rank, workers = worker(0, "here"), group()
    workers._ranks = [rank]

    def invoke(*_: Any) -> Any:
        answers.append(Future())
        return SimpleNamespace(future=lambda: answers[-1])

    workers._invoke = invoke
    reply = workers.submit(0, RequestBackend.submit, GenerationRequest((5,), SamplingParams()))
    answers[0].set_exception(RuntimeError("not of Ray at all"))
    with pytest.raises(RuntimeError, match=r"^not"):
        reply.result(timeout=10)
