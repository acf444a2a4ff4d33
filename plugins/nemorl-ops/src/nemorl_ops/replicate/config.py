"""The hook ``replicate`` and its options. Importing this imports no fsspec."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from nemorl.config import FileName, Options
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import HookConfig
from nemorl_trust.encryption import plaintext_problem
from pydantic import Field

METRICS = {
    "replication/behind_steps": MetricInfo(
        "Replica behind",
        "steps",
        "steps between the newest checkpoint and the newest that has a verified copy",
        "more than the steps between two checkpoints: the copy is slower than the run, or fails",
    ),
    "replication/failures": MetricInfo(
        "Failed copies", "copies", "copies given up so far, each after all attempts", "any"
    ),
    "replication/gib": MetricInfo("Copied", "GiB", "bytes sent so far"),
}
SECRET = re.compile(r"secret|token|password|access_?key|api_?key|^key$", re.IGNORECASE)
"""Names of options that hold secrets."""


class ReplicateConfig(HookConfig):
    """Copies every checkpoint of a run to a second place while the run goes on, and continues from there."""

    summary: ClassVar[str] = "copies checkpoints to a second place (S3, GCS, another disk) while the run goes on"
    metrics: ClassVar[Mapping[str, MetricInfo]] = METRICS

    to: FileName
    """Folder of replicas, as a URL that fsspec knows: ``s3://bucket/runs``, ``gs://…``, ``file:///mnt/…``. The run's is
    in it, under the name of the run directory."""
    options: Options = Field(default_factory=dict)
    """For fsspec's file system, e.g. ``{client_kwargs: {endpoint_url: "https://…"}}``. No secrets: those are looked for
    where the provider's tools look for them, such as ``AWS_ACCESS_KEY_ID``."""
    plaintext: bool = False
    """Let weights go to a store on another machine over ``http`` all the same (``endpoint_url``)."""
    resume: bool = False
    """Begin from the newest whole replica when the run directory has no checkpoint."""
    verify: bool = True
    """Read every file back and compare its checksum. ``false`` compares sizes alone, at half the traffic."""
    attempts: int = Field(3, ge=1)
    """Times that a copy is tried, with growing pauses."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest wait for one answer of the second place."""
    wait_at_end_s: float = Field(540.0, ge=0)
    """Longest wait for the last copies when the run ends; less than ``plugins.hook_timeout_s``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if "://" not in self.to:
            fix = f"write file://{self.to} for a folder of this machine, or s3://bucket/folder"
            yield ConfigIssue("to", f"{self.to!r} is no URL", fix)
        for path in _secrets(self.options):
            fix = "leave it out: the environment (AWS_ACCESS_KEY_ID, …) or the provider's own file has it"
            yield ConfigIssue(f"options.{path}", "a secret would be written into config.yaml", fix)

        for path, url in _texts({"to": self.to, "options": self.options}):
            if not self.plaintext and (problem := plaintext_problem(url)) is not None:
                yield ConfigIssue(path, *problem)

    def build(self) -> object:
        from nemorl_ops.replicate.hook import Replication

        return Replication(self)


def _texts(options: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{above}{name}.")
        elif isinstance(value, str):
            yield f"{above}{name}", value


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    yield from (path for path, _ in _texts(options) if SECRET.search(path.rpartition(".")[2]))
