"""How many collectives this process has entered, for the heartbeats that find a rank which does not come."""

from __future__ import annotations

from contextlib import suppress

from nemorl.resources.heartbeat import count_by
from torch.distributed import distributed_c10d


def count_collectives() -> None:
    """Have the heartbeats of this process carry torch's own counters. They cost nothing where nobody asks."""
    count_by(collectives_entered)


def collectives_entered() -> dict[str, int]:
    """Collectives entered so far, by process group: torch numbers them, the same on every rank of a group.

    Sends and receives between two ranks (pipeline stages) are not numbered.
    """
    found: dict[str, int] = {}
    for group in [*distributed_c10d._world.pg_map]:
        with suppress(RuntimeError, KeyError):  # groups come and go meanwhile
            number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            found[distributed_c10d._world.pg_names[group]] = number
    return found
