"""The contract of weight transports, and what this one promises besides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nemorl.errors import WeightsLostError
from nemorl_testing import conformance

from nemorl_example.transport import ExampleTransport

test_conformance = conformance("weight_transports", "example")


def export() -> Iterator[dict[str, torch.Tensor]]:
    yield {"weight": torch.ones(2)}


def test_two_versions_are_on_disk_and_none_once_it_is_closed() -> None:
    sender = ExampleTransport()
    files = [Path(sender.publish(export)[0]) for _ in range(3)]
    assert [file.is_file() for file in files] == [False, True, True]
    sender.close()
    assert not any(file.is_file() for file in files)


def test_weights_that_are_gone_are_an_error() -> None:
    sender = ExampleTransport()
    payload = sender.publish(export)
    sender.close()
    with pytest.raises(WeightsLostError, match="are gone"):
        list(ExampleTransport().fetch(payload))
