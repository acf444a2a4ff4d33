"""Settings whose translation takes more than a new name: a function per subject, named by the ``part`` of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemorl_compat.conversions.data import data, environment
from nemorl_compat.conversions.generation import generation, validation
from nemorl_compat.conversions.losses import algorithm, loop, loss, minibatches, penalties, rewards, single_controller
from nemorl_compat.conversions.models import backend, critic, lora, optimizer, teacher, tokenizer
from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.conversions.run import checkpoints, cluster, loggers
from nemorl_compat.conversions.sight import media
from nemorl_compat.old_config import OldConfig

PARTS: Mapping[str, Callable[[OldConfig, Pieces], None]] = {
    part.__name__: part
    for part in (
        algorithm,
        loop,
        backend,
        tokenizer,
        lora,
        optimizer,
        teacher,
        critic,
        media,
        generation,
        validation,
        minibatches,
        loss,
        rewards,
        single_controller,
        penalties,
        data,
        environment,
        checkpoints,
        cluster,
        loggers,
    )
}
"""By name, in the order in which they run."""
