"""A model that does not see what it is shown is not trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nemorl.contracts import Head, WeightsName
from nemorl.errors import BackendError
from nemorl.media import FIRST_ID, Media
from nemorl_media.blanks import blank_image, negative
from nemorl_media.decoding import pixels
from nemorl_rl.audit.dead_inputs import require_live_inputs, swaps
from nemorl_tensors import TokenBatch
from recorded_messages import Raises
from torch import Tensor

RED = blank_image(shade=200)


class Policy:
    """Its log-probs are sums of the ids before, those of items and of the environment only where it is told to."""

    def __init__(self, *, sees: bool = True, hears: bool = True, shift: float = -1.0) -> None:
        self.sees, self.hears, self.shift = sees, hears, shift

    def get_logprobs(self, batch: TokenBatch, weights: WeightsName = "policy") -> Tensor:
        counted = torch.where(batch.token_ids >= FIRST_ID, (batch.token_ids >> 14) % 97 * self.sees, batch.token_ids)
        if not self.hears:
            first = int(batch.mask.nonzero()[0])
            told = ~batch.mask & (torch.arange(len(counted)) > first) & (batch.token_ids < FIRST_ID)
            counted = torch.where(told, 0, counted)
        weight = torch.arange(1, len(counted) + 1)
        return torch.where(batch.mask, self.shift * (counted * weight).cumsum(0).float() * 1e-3, 0.0)


def batch(*, item: Media | None = RED, told: list[int] | None = None) -> TokenBatch:
    shown = [] if item is None else [*item.token_ids(2)]
    ids = [5, *shown, 6, 20, 21, *(told or []), 22]
    mask = [False] * (2 + len(shown)) + [True, True] + [False] * len(told or []) + [True]
    return TokenBatch.from_sequences([ids], [mask], media=[] if item is None else [item])


def require(policy: Policy, given: TokenBatch, head: Head = "language_model") -> None:
    require_live_inputs(policy, given, head)  # type: ignore[arg-type]


def test_the_negative_of_an_image_has_its_size_and_other_pixels() -> None:
    other = pixels(negative(RED))
    assert other.size == pixels(RED).size
    assert (pixels(RED).getpixel((0, 0)), other.getpixel((0, 0))) == ((200, 200, 200), (55, 55, 55))


def test_a_swap_changes_the_input_and_nothing_else() -> None:
    given = batch(told=[8, 9])
    image, observation = swaps(given)
    assert (image.kind, observation.kind) == ("image", "observation")
    places = (image.one.token_ids != image.other.token_ids).nonzero().flatten().tolist()
    assert places == [1, 2]
    assert observation.other.token_ids.tolist()[6:8] == [9, 8]
    assert image.other.media.keys() == {RED.name, negative(RED).name}


@pytest.mark.parametrize(
    ("blind", "given", "said"),
    [
        ({"sees": False}, batch(), "^images do not reach the model"),
        ({"hears": False}, batch(told=[8, 9]), "^what the environment says between two answers does not reach"),
        ({"sees": False, "hears": False}, batch(told=[8, 9]), "^images do and what the environment"),
    ],
)
def test_what_does_not_count_is_named(blind: dict[str, Any], given: TokenBatch, said: str) -> None:
    require(Policy(), given)
    with pytest.raises(BackendError, match=said):
        require(Policy(**blind), given)


def test_nothing_is_said_of_inputs_that_are_not_there_or_of_certainties() -> None:
    require(Policy(sees=False, hears=False), batch(item=None))
    require(Policy(sees=False), batch(item=None, told=[8, 8]))
    require(Policy(sees=False, shift=0.0), batch())


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the encoder makes of images is taken for zero."""
    from nemorl_media.families.qwen_vl import Qwen25VL
    from nemorl_media.family import Seen

    encode = Qwen25VL.encode
    monkeypatch.setattr(Qwen25VL, "encode", lambda *args: Seen(encode(*args).embeds * 0.0))


def sft(folder: Any) -> Any:
    from nemorl.config.load import load_config
    from nemorl_rl.models.tiny_sight import write_tiny_sight

    return load_config(
        {
            "algorithm": "sft",
            "model": str(write_tiny_sight(folder / "base")),
            "run_dir": str(folder / "run"),
            "data": {"name": "drawings", "num_train": 8, "num_validation": 0},
            "batch_size": 4,
            "max_steps": 1,
            "policy": {"init": "random"},
        }
    ).build()


def test_a_run_that_sees_is_trained(tmp_path: Any) -> None:
    assert sft(tmp_path).fit(None).steps == 1


@pytest.mark.usefixtures("blind")
def test_a_run_that_is_blind_ends_before_it_learns(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.setattr("nemorl_dtensor.verification._verify_sight", lambda *_: None)  # which would say so before
    with raises(BackendError):
        sft(tmp_path).fit(None)
