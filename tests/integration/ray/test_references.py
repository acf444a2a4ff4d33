"""Values that calls refer to, on a real Ray: sent once, kept where they are, let go, and lost."""

from __future__ import annotations

import operator
import time

import numpy
import pytest
import ray
from nemorl.contracts.workers import Composed, References
from nemorl.errors import ForeignError, WorkerLostError
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_ranks import GroupSettings
from nemorl.resources.ray_workers import RayWorkerGroup
from workers import Adder

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def ids_in_use() -> set[str]:
    """Objects that this process or a task of its holds a reference to."""
    return {name.decode() for name in ray._private.worker.global_worker.core_worker.get_all_reference_counts()}


def hexes(*references: References) -> set[str]:
    return {one.hex() for part in references for one in part}


def test_a_call_takes_what_was_sent_and_what_another_call_kept(group: RayWorkerGroup) -> None:
    sent = group.put([3, 5])
    kept = group.scatter_kept(Adder.add, Composed(operator.neg, (sent,)))
    assert group.read(kept) == [0 - 3, 1 - 5]  # each adds its rank
    assert group.scatter(Adder.add, Composed(operator.mul, (sent, kept))) == [0 + 3 * -3, 1 + 5 * -4]


def test_one_rank_of_a_copy_keeps_the_result_for_all(cluster: RayVirtualCluster) -> None:
    group = RayWorkerGroup(cluster, Adder, settings=GroupSettings(shards=(0, 0)))
    kept = group.scatter_kept(Adder.add, Composed(operator.pos, (group.put([7]),)))
    assert (len(kept), group.read(kept)) == (1, [7])
    group.shutdown()


def test_a_call_that_fails_is_reported_though_nobody_reads_its_result(group: RayWorkerGroup) -> None:
    with pytest.raises(ForeignError):
        group.scatter_kept(Adder.fail, [0, 1], "breaks")


def test_references_outlive_a_worker_that_dies(group: RayWorkerGroup) -> None:
    large = numpy.arange(300_000)  # too large to travel inside a call
    sent = group.put([large, large])
    kept = group.scatter_kept(Adder.add, Composed(operator.pos, (sent,)))
    with pytest.raises(WorkerLostError):
        group.scatter_kept(Adder.fail, [1, 1], "dies")
    group.restart()
    again = group.scatter(Adder.add, Composed(operator.add, (sent, kept)))
    assert [found[10] for found in again] == [10 + 10 + 0, 10 + 11 + 1]


def read_until(end_s: float, group: RayWorkerGroup, references: References) -> None:
    """Values stay in the store until Ray knows that their owners are gone."""
    while time.monotonic() < end_s:
        group.read(references)


def test_a_value_that_is_lost_ends_the_call_by_name(group: RayWorkerGroup) -> None:
    kept = [reference for (reference,) in group.call(Adder.owned)]
    for rank in group._ranks:
        ray.kill(rank.actor)
    group.restart()
    began_s = time.monotonic()
    with pytest.raises(WorkerLostError):
        read_until(began_s + 30, group, kept)
    with pytest.raises(WorkerLostError):
        group.scatter(Adder.add, Composed(len, (kept,)))
    assert time.monotonic() - began_s < 50  # before the deadline of 60 s: it is known, not waited for
    group.restart()
    sent = group.put([1, 2])  # again
    assert group.scatter(Adder.add, Composed(operator.pos, (sent,))) == [1, 3]


def test_nothing_stays_in_the_store_when_references_are_dropped(group: RayWorkerGroup) -> None:
    large = numpy.arange(300_000)
    sent = group.put([large, large])
    kept = group.scatter_kept(Adder.add, Composed(operator.pos, (sent,)))
    names = hexes(sent, kept)
    assert names <= ids_in_use()
    del sent, kept
    deadline = time.monotonic() + 20  # calls that ended tell the driver a moment later
    while names & ids_in_use() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not names & ids_in_use()
