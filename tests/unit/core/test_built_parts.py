"""A plugin whose ``build()`` returns nothing is named where it is built."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl.errors import PluginError
from nemorl.plugins.kinds import (
    DatasetConfig,
    EnvironmentConfig,
    GenerationBackendConfig,
    HookConfig,
    LoggerConfig,
    ReportSectionConfig,
    TrainingBackendConfig,
    WeightTransportConfig,
)
from recorded_messages import Raises

KINDS = (
    EnvironmentConfig, GenerationBackendConfig, HookConfig, LoggerConfig, ReportSectionConfig, TrainingBackendConfig,
    WeightTransportConfig,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nothing_and_a_class_are_no_part(kind: Any, raises: Raises) -> None:
    class Forgetful(kind):  # type: ignore[misc]
        def build(self, *arguments: Any, **options: Any) -> Any:
            list(arguments)

    class Careless(kind):  # type: ignore[misc]
        def build(self, *arguments: Any, **options: Any) -> Any:
            return dict

    class Sound(kind):  # type: ignore[misc]
        def build(self, *arguments: Any, **options: Any) -> Any:
            return (self, arguments)

    class Heir(Sound):
        pass

    with raises(PluginError, "test_built_parts", "Forgetful"):
        Forgetful().build(1)
    with raises(PluginError, "Careless", "dict"):
        Careless().build()
    heir = Heir()
    assert heir.build(1) == (heir, (1,))


def test_a_dataset_may_have_no_such_split() -> None:
    class OneSplit(DatasetConfig):
        def build(self, split: str) -> Any:
            return [{"prompt": "1"}] if split == "train" else None

    assert OneSplit().build("validation") is None
