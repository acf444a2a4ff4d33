"""Memory that leaves and comes back: the same tensors, the same bytes, nothing held meanwhile."""

from __future__ import annotations

import pytest
import torch
from nemorl.contracts.memory import WeightsForgottenError
from nemorl.errors import BackendError
from nemorl_tensors.engines.parking import Parking, bytes_held
from recorded_messages import Raises
from torch import nn


def test_a_tensor_and_its_views_come_back_as_they_were() -> None:
    whole = torch.arange(24.0).view(4, 6)
    view, parameter = whole[1:3, ::2], nn.Parameter(whole)
    wanted = whole.clone()
    parking = Parking()
    parking.leave("weights", [whole, view, parameter.detach()])
    assert bytes_held([whole, view, parameter]) == 0
    parking.come_back("weights")
    assert torch.equal(whole, wanted)
    assert torch.equal(view, wanted[1:3, ::2])
    assert parameter.data_ptr() == whole.data_ptr() == view.data_ptr() - 6 * 4
    parameter.data.add_(1)  # they are still one memory
    assert torch.equal(view, wanted[1:3, ::2] + 1)


def test_bytes_are_counted_once_per_storage() -> None:
    whole = torch.zeros(10, dtype=torch.bfloat16)
    assert bytes_held([whole, whole[:5], whole.view(2, 5)]) == 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = (torch.rand(7, 3) * 100).to(dtype)
    tensor.view(torch.uint8)[0, 0] = 1
    wanted = tensor.clone()
    parking = Parking()
    for _ in range(2):
        parking.leave("part", [tensor])
        parking.leave("part", [tensor])  # it is away already
        parking.come_back("part")
        parking.come_back("part")
    assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8))


def test_what_is_forgotten_has_memory_again_and_nothing_in_it() -> None:
    tensor = torch.ones(1000)
    parking = Parking()
    parking.leave("cache", [tensor], forget=True)
    parking.come_back("cache")
    assert bytes_held([tensor]) == 4000
    tensor.fill_(2)
    assert float(tensor.sum()) == 2000


def test_nothing_is_computed_from_what_was_forgotten_until_it_is_renewed(raises: Raises) -> None:
    tensor, parking = torch.ones(4), Parking()
    parking.leave("weights", [tensor])
    parking.leave("weights", [tensor], forget=True)  # the host's copy goes as well
    with raises(BackendError, "weights"):
        parking.require_content("weights")
    parking.come_back("weights")
    parking.require("weights")  # it is here, to be filled
    for _ in range(2):
        with raises(WeightsForgottenError, "weights"):
            parking.require_content("weights")
        parking.leave("weights", [tensor])
        parking.come_back("weights")
    tensor.fill_(3)
    parking.renewed("weights")
    parking.require_content("weights")
    assert float(tensor.sum()) == 12


def test_parts_leave_by_themselves(raises: Raises) -> None:
    weights, moments = torch.ones(4), torch.ones(6)
    parking = Parking()
    parking.leave("optimizer", [moments])
    parking.require("weights")
    with raises(BackendError, "optimizer"):
        parking.require("weights", "optimizer")
    assert (bytes_held([weights]), bytes_held([moments])) == (16, 0)
    parking.come_back("optimizer")
    parking.require("optimizer")


def test_memory_of_a_file_stays_where_it_is(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "weights.bin"
    path.write_bytes(torch.arange(8.0).numpy().tobytes())
    mapped = torch.from_file(str(path), size=8)
    parking = Parking()
    parking.leave("weights", [mapped])
    assert float(mapped.sum()) == 28
    parking.come_back("weights")
