"""What goes wrong in a loss is said in the loss's name, wherever it happens; running out of memory is not its fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from nemorl.errors import ForeignError
from nemorl.metrics import Sum
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.steps import evaluate_loss

OWNER = r"loss Broken \(.*test_loss_owner\)"


@dataclass(frozen=True)
class Broken:
    """A loss that does what it is told."""

    does: Callable[[], Any]
    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, outputs: torch.Tensor, batch: TokenBatch) -> Any:
        return self.does()


def raising(error: BaseException) -> Callable[[], Any]:
    def does() -> Any:
        raise error

    return does


def evaluate(does: Callable[[], Any]) -> Any:
    return evaluate_loss(Broken(does), torch.zeros(2), TokenBatch.from_sequences([[1, 2]], [[False, True]]))


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("old"), StopIteration("end")], ids=repr)
def test_an_error_in_a_loss_names_the_loss(error: Exception) -> None:
    with pytest.raises(ForeignError, match=rf"{OWNER} raised {type(error).__name__}") as caught:
        evaluate(raising(error))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "returned None, not"),
        (torch.zeros(()), "not \\(scalar tensor, metrics\\)"),
        ((1.0, {}), "not \\(scalar tensor, metrics\\)"),
        ((torch.zeros(3), {}), r"a tensor of shape \(3,\), not a scalar"),
        ((torch.zeros(()), {"clipped": 0.5}), "its metric 'clipped' is 0.5"),
    ],
)
def test_what_is_no_loss_is_refused_in_its_name(answer: Any, said: str) -> None:
    with pytest.raises(ForeignError, match=rf"{OWNER} raised TypeError: .*{said}"):
        evaluate(lambda: answer)


def test_a_loss_that_works_is_passed_on() -> None:
    value, metrics = evaluate(lambda: (torch.tensor(2.0), {"clipped": Sum(1.0)}))
    assert (float(value), metrics) == (2.0, {"clipped": Sum(1.0)})


def test_running_out_of_memory_in_a_loss_stays_what_it_is() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(raising(torch.OutOfMemoryError("16 GiB")))
