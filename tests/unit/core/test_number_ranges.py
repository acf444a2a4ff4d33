"""Numbers that nobody can mean are refused: waits of no length, rates that end a model in one step."""

from __future__ import annotations

import pytest
from nemorl.config.models import GenerationConfig, LoraConfig, MuonConfig, OptimizerConfig
from pydantic import ValidationError
from test_wrong_sections import CLASSES

SECONDS = [
    (owner, name)
    for owner in CLASSES
    for name, field in owner.model_fields.items()
    if name.endswith("_s") and ("float" in str(field.annotation) or "int" in str(field.annotation))
]


def test_every_wait_of_every_config_can_be_waited_for() -> None:
    assert {"worker_timeout_s", "environment_timeout_s", "restart_window_s"} <= {name for _, name in SECONDS}
    accepted = []
    for owner, name in SECONDS:
        for value in (1e-9, 1e-4, 1.1e8, 1e11, -1.0):
            try:
                owner.model_validate({name: value})
            except ValidationError as error:
                if any(item["loc"][:1] == (name,) for item in error.errors()):
                    continue
            accepted.append(f"{owner.__name__}.{name}={value}")
    assert not accepted


@pytest.mark.parametrize(
    ("owner", "field", "least", "most"),
    [
        (OptimizerConfig, "lr", 1e-12, 1.0),
        (OptimizerConfig, "eps", 1e-15, 1.0),
        (OptimizerConfig, "weight_decay", 0.0, 10.0),
        (MuonConfig, "adamw_lr", 1e-12, 1.0),
        (LoraConfig, "alpha", 1e-3, 1e5),
        (GenerationConfig, "temperature", 0.0, 100.0),
    ],
)
def test_a_range_ends_where_sense_does(owner: type, field: str, least: float, most: float) -> None:
    assert [getattr(owner(**{field: value}), field) for value in (least, most)] == [least, most]
    for value in (most * 1.01, 1e10, -1.0):
        with pytest.raises(ValidationError):
            owner(**{field: value})
