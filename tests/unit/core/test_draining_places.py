"""Places on nodes that drain: what starts anew leaves those below itself, and none below others."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from nemorl.config.cluster import ClusterConfig
from nemorl.errors import DeadlineError
from recorded_messages import Raises

if TYPE_CHECKING:
    from nemorl.resources.ray_cluster import RayVirtualCluster

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


def settled(places: Any) -> Any:
    from nemorl.resources.ray_drain import settle

    settle(places)
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


class Groups:
    """Placement groups as Ray keeps them: where each is; empty while it looks for a node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *homes: str) -> None:
        self.homes: dict[int, str] = dict(enumerate(homes))
        self.removed: list[int] = []
        place = "nemorl.resources.ray_cluster."
        monkeypatch.setattr(place + "placement_group", self.asked)
        monkeypatch.setattr(place + "placement_group_table", self.table)
        monkeypatch.setattr(place + "remove_placement_group", lambda group: self.removed.append(group.number))
        monkeypatch.setattr("ray.is_initialized", lambda: True)

    def asked(self, *_: Any, **__: Any) -> Any:
        number = len(self.homes)
        self.homes[number] = ""
        return SimpleNamespace(number=number, wait=lambda _: bool(self.homes[number]))

    def table(self, group: Any) -> dict[str, Any]:
        home = self.homes[group.number]
        return {"state": "CREATED" if home else "RESCHEDULING", "bundles_to_node_id": {0: home}}

    def cluster(self, number: int) -> RayVirtualCluster:
        from nemorl.resources.ray_cluster import RayVirtualCluster

        found = RayVirtualCluster.__new__(RayVirtualCluster)
        found.config, found.bundle, found._counts = ClusterConfig(launcher="ray"), {"CPU": 1.0}, (1,)
        found._fresh, found._left, found._groups = {}, [], [SimpleNamespace(number=number)]
        found.places = found._all_places()
        return found


def test_places_on_a_node_that_has_gone_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch, "n1")
    cluster = groups.cluster(0)
    cluster.ask_elsewhere({"n1"})
    groups.homes |= {0: "", 1: "n2"}  # it goes before anything moved, and another one joins
    monkeypatch.setattr("nemorl.resources.ray_drain.draining_nodes", dict)
    settled(cluster)
    assert [group.number for group in cluster._groups] == [1]
    groups.homes[0] = "n3"  # where Ray would put the old places, for nobody
    assert cluster.ask_elsewhere({}) == set()
    assert groups.removed == [0]


def test_a_cluster_that_does_not_say_who_drains_costs_no_place_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch, "n1")
    cluster = groups.cluster(0)
    cluster.ask_elsewhere({"n1"})
    groups.homes[1] = "n2"
    monkeypatch.setattr("nemorl.resources.ray_drain.draining_nodes", lambda: None)
    settled(cluster)
    assert [group.number for group in cluster._groups] == [1]
    assert groups.removed == []


def test_places_of_which_ray_knows_nothing_are_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Groups(monkeypatch, "n1").cluster(0)
    monkeypatch.setattr("nemorl.resources.ray_cluster.placement_group_table", lambda group: {})
    assert not cluster.is_there
    assert not cluster.is_on({"n1"})
