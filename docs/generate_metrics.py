"""Writes the tables of ``docs/metrics.md`` from what algorithms, environments and backends declare.

    python docs/generate_metrics.py            fill in the tables
    python docs/generate_metrics.py --check    exit 1 if a table is not what would be written

The page marks each table with ``<!-- generated: NAME -->`` and ``<!-- end -->``; what is outside is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemorl.config import RunConfig
from nemorl.errors import NemorlError
from nemorl.metrics import MetricInfo
from nemorl.plugins import registry
from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.planning.work_metrics import WORK_METRICS

PAGE = Path(__file__).resolve().parent / "metrics.md"
PART = re.compile(r"(<!-- generated: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
ALGORITHMS = ("grpo", "ppo", "sft", "dpo", "kto", "orpo", "simpo", "rm", "distillation", "opsd", "mopd", "client_loop")
"""Those with a table of their own, without what stands in the tables before: PPO shares most with GRPO, ``opsd`` with
``distillation``."""
TIME = ("timing/", "performance/")


def declared(kind: str) -> Mapping[str, Mapping[str, MetricInfo]]:
    """The declarations of each installed plugin of a kind, by its name."""
    return dict(_declared(kind))


def _declared(kind: str) -> Iterator[tuple[str, Mapping[str, MetricInfo]]]:
    for entry in registry().index.of_kind(kind):
        try:
            yield entry.name, registry().load(kind, entry.id).metrics
        except NemorlError:
            continue  # of an optional package that is absent


def tables() -> Mapping[str, str]:
    """Every generated table by name."""
    algorithms = declared("algorithms")
    rollouts = {name: info for name, info in RolloutRunConfig.metrics.items() if name not in RunConfig.metrics}
    timing = {
        name: info
        for metrics in (RunConfig.metrics, RolloutRunConfig.metrics, *algorithms.values())
        for name, info in metrics.items()
        if name.startswith(TIME)
    }
    hook = declared("hooks")["efficiency"]
    found = {
        "training backends": table(WORK_METRICS),
        "rates": table({n: i for n, i in hook.items() if n.startswith("performance/")}),
        "machines": table({n: i for n, i in hook.items() if n.startswith("system/")}),
        "replication": table(declared("hooks")["replicate"]),
        "every algorithm": table(_without_time(RunConfig.metrics)),
        "sampling": table({n: i for n, i in _without_time(rollouts).items() if n.startswith("train/")}),
        "validation": table({n: i for n, i in rollouts.items() if n.startswith("validation/")}),
        "time": table(timing),
    }
    known: dict[str, MetricInfo] = dict(RolloutRunConfig.metrics)
    for name in ALGORITHMS:
        own = {metric: info for metric, info in algorithms[name].items() if known.get(metric) != info}
        found[name] = table(_without_time(own))
        if name in ("grpo", "distillation"):
            known |= algorithms[name]
    for name, metrics in declared("environments").items():
        found[f"environment {name}"] = table(metrics)
    for name, metrics in declared("training_backends").items():
        if own := {metric: info for metric, info in metrics.items() if metric not in WORK_METRICS}:
            found[f"backend {name}"] = table(own)
    for name, metrics in declared("generation_backends").items():
        if metrics:
            found[f"generation backend {name}"] = table(metrics)
    return found


def table(metrics: Mapping[str, MetricInfo]) -> str:
    """One row for metrics that are explained alike."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, info in metrics.items():
        rows.setdefault((info.title, info.meaning, info.unit, info.watch_for), []).append(f"`{name}`")
    lines = ["| name | meaning | unit | watch for |", "|---|---|---|---|"]
    for told, names in rows.items():
        _, *cells = (cell.replace("|", "\\|") for cell in told)
        lines.append(f"| {', '.join(names)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _without_time(metrics: Mapping[str, MetricInfo]) -> Mapping[str, MetricInfo]:
    return {name: info for name, info in metrics.items() if not name.startswith(TIME)}


def filled_in(text: str) -> str:
    """The page with its tables as they should be."""
    known = tables()
    return PART.sub(lambda found: f"{found[1]}\n{known[found['name']]}\n{found[3]}", text)


if __name__ == "__main__":
    from pages import update

    sys.exit(update({PAGE: filled_in(PAGE.read_text("utf-8"))}))
