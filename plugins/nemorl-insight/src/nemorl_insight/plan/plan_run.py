"""``nemorl.plan_run``: the plan of a run on given devices as plain data, for whoever starts runs elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig


def plan_run(config: RunConfig, nodes: int | None = None, gpus: str | None = None) -> dict[str, Any]:
    """The plan of a run on given devices, as plain data. Needs no GPU, no weights and no torch.

    Args:
        config: The run.
        nodes: Machines. Unset: the run's.
        gpus: Devices of each, e.g. ``8xH100``. Unset: the run's, of this machine's kind.

    Returns:
        ``verdict`` in words; ``present``, the layout of the config, with ``fits`` and ``seconds_per_step``;
        ``cannot_fit``, whether that is certain not to fit; ``smallest_change`` that fits, as keys of the config with
        their values, or ``None``; ``candidates``, the fastest layouts.

    Raises:
        UsageError: The devices or the sizes of the model are not known.

    >>> nemorl.plan_run(nemorl.load_config("grpo.yaml"), 2, "8xH100")["verdict"]  # doctest: +SKIP
    'fits with 12.3 GiB free on the fullest device (training)'
    """
    from nemorl_rl.planning.memory.reading import Lengths, Sizes, fleet_of, scene_of

    from nemorl_insight.plan.plan import Plan

    return Plan.of(scene_of(config, fleet_of(config.cluster, nodes, gpus), Sizes(), Lengths())).as_dict()
