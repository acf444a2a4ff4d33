"""A Ray cluster that is lost, or has come back as another one, while a run closes or replaces its workers."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl.errors import ResourceError
from recorded_messages import Raises

pytestmark = pytest.mark.slow  # Ray is imported


class Gone:
    """A rank of a cluster that is not there: whatever is asked of its actor, Ray raises."""

    number, is_lost = 0, False

    @property
    def actor(self) -> Any:
        from ray.exceptions import AuthenticationError

        raise AuthenticationError("RPC error: WrongClusterID: the GCS has restarted")


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of one such rank."""
    import ray
    from nemorl.resources.ray_ranks import GroupSettings
    from nemorl.resources.ray_workers import RayWorkerGroup

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    group = RayWorkerGroup.__new__(RayWorkerGroup)
    group.settings, group._ranks, group._factory = GroupSettings(), [Gone()], None  # type: ignore[list-item]
    return group


def test_workers_of_a_lost_cluster_are_given_up_without_an_error(lost: Any) -> None:
    lost.shutdown()
    assert lost._ranks == []


def test_workers_that_cannot_be_replaced_are_an_error_that_says_how_to_go_on(lost: Any, raises: Raises) -> None:
    from nemorl.resources.ray_launcher import RayLauncher

    launcher = RayLauncher.__new__(RayLauncher)
    launcher.drains = None
    with raises(ResourceError, "WrongClusterID"):
        launcher.restart(lost)
