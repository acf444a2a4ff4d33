"""Places on nodes that drain: what starts anew leaves those below itself, and none below others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from nemorl.config.cluster import ClusterConfig
from nemorl.errors import DeadlineError
from recorded_messages import Raises

pytestmark = pytest.mark.slow  # Ray is imported

LEAVING = {"n1": "10.0.0.1 (n1)"}


class Places:
    """Of one group; there is room elsewhere after so many looks."""

    def __init__(self, node: str, looks: int = 0, **config: Any) -> None:
        self.node, self.looks, self.config = node, looks, ClusterConfig(launcher="ray", **config)
        self.is_asked = self.is_fresh = False

    def ask_elsewhere(self, leaving: Collection[str]) -> set[str]:
        self.is_asked = self.node in leaving
        return {self.node} & {*leaving}

    @property
    def is_room_elsewhere(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def take_fresh_places(self) -> None:
        self.is_fresh = self.is_asked

    def ask_no_more(self) -> None:
        self.is_asked = False


@pytest.fixture(autouse=True)
def draining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemorl.resources.ray_drain.draining_nodes", lambda: LEAVING)
    monkeypatch.setattr("nemorl.resources.ray_drain.WAIT_S", 0.0)


def settled(places: Places) -> Places:
    from nemorl.resources.ray_drain import settle

    settle(places)  # type: ignore[arg-type]
    return places


def test_what_starts_anew_waits_for_places_of_its_own_beside_a_node_that_drains() -> None:
    assert settled(Places("n1", looks=3)).is_fresh
    assert not settled(Places("n2")).is_fresh


def test_an_engine_that_starts_anew_moves_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's node drains, and there is no room elsewhere: what becomes of it is not the engine's to wait for."""
    from nemorl.resources.ray_drain import DrainWatch
    from nemorl.resources.ray_launcher import RayLauncher
    from nemorl.resources.ray_workers import RayWorkerGroup

    trainer, engine = Places("n1", looks=10**6, placement_timeout_s=60), Places("n2")
    launcher, group = RayLauncher.__new__(RayLauncher), RayWorkerGroup.__new__(RayWorkerGroup)
    launcher.drains = DrainWatch([trainer])  # type: ignore[list-item]
    group.cluster = engine  # type: ignore[assignment]
    restarted: list[Any] = []
    monkeypatch.setattr(RayWorkerGroup, "restart", lambda self, factory: restarted.append(factory))
    launcher.restart(group, None)
    assert restarted == [None]
    assert (trainer.is_asked, trainer.is_fresh, trainer.looks) == (False, False, 10**6)


def test_places_that_do_not_come_are_an_error_that_names_the_node(raises: Raises) -> None:
    with raises(DeadlineError, "10.0.0.1", "placement_timeout_s"):
        settled(Places("n1", looks=10**9, placement_timeout_s=0.01))
