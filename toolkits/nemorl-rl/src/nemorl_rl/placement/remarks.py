"""Remarks of a run's parts, written into its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemorl_rl.placement.tenant_resources import TenantResources

if TYPE_CHECKING:
    from nemorl.trainer import BaseTrainer


class Remarks:
    """A hook: what backends do otherwise than their defaults would, and what was found of memory. Of trainers whose
    resources are :class:`TenantResources`."""

    def on_step_end(self, trainer: BaseTrainer[Any], step: int) -> None:
        resources = trainer.run.resources
        assert isinstance(resources, TenantResources), "trainers with this hook have them"
        for text in resources.new_remarks():
            trainer.directory.event("remark", step=step, message=text)
