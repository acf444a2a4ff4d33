"""Parts of a policy that the config lets rest in the host's memory, and parts that the driver sends away."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from nemorl.errors import BackendError
from nemorl_tensors.engines.residency import Residency
from torch import Tensor, nn


class Moments:
    """An optimizer of two moments, 4 and 8 float32 numbers."""

    def __init__(self) -> None:
        self.held = {"exp_avg": torch.arange(4.0), "exp_avg_sq": torch.arange(8.0)}

    def gradients(self) -> list[Tensor]:
        return []

    def tensors(self) -> Mapping[str, Tensor]:
        return self.held


def resting(device: str = "cpu") -> tuple[Residency, Moments]:
    moments = Moments()
    return Residency([nn.Linear(2, 3)], [nn.Linear(2, 3)], lambda: moments, device, ("optimizer", "reference")), moments


def test_what_rests_holds_no_memory_and_comes_in_when_it_is_needed() -> None:
    residency, moments = resting()
    # Linear(2, 3): 6 + 3 numbers of 4 bytes; moments: 4 + 8 of them.
    assert residency.held_bytes() == {"weights": 36, "gradients": 0, "optimizer": 48, "reference": 36}
    for _ in range(2):  # the second time nothing is left to move
        residency.rest()
    assert residency.held_bytes() == {"weights": 36, "gradients": 0, "optimizer": 0, "reference": 0}
    residency.require("optimizer")
    assert residency.held_bytes() == {"weights": 36, "gradients": 0, "optimizer": 48, "reference": 0}
    assert moments.held["exp_avg_sq"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_what_the_driver_sends_away_from_its_rest_is_refused_until_it_is_back() -> None:
    residency, moments = resting()
    residency.rest()
    residency.offload(["optimizer"], keep_gradients=False)
    residency.rest()  # it is away, and stays so
    for ask in (residency.require, residency.expect):
        with pytest.raises(BackendError):
            ask("optimizer")
    residency.onload(["optimizer"])
    assert residency.held_bytes()["optimizer"] == 0, "it rests again"
    residency.expect("optimizer")
    residency.require("optimizer")
    assert moments.held["exp_avg"].tolist() == [0, 1, 2, 3]


def test_what_the_driver_brings_back_from_its_work_is_where_it_was() -> None:
    residency, moments = resting()
    residency.offload(["optimizer", "weights"], keep_gradients=False)
    residency.onload(["optimizer", "weights"])
    residency.require("optimizer")
    assert residency.held_bytes()["weights"] == 36
    assert moments.held["exp_avg"].tolist() == [0, 1, 2, 3]


def test_tensors_that_lie_elsewhere_are_none_of_a_device_s_memory() -> None:
    residency, moments = resting("cuda:0")
    assert not any(residency.held_bytes().values())
    residency.rest()
    assert moments.held["exp_avg"].tolist() == [0, 1, 2, 3]
