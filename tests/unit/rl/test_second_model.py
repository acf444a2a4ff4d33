"""A second model that learns, as the page about algorithms shows it: its loss is sound, its reference is asked for."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from nemorl.errors import UsageError
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_rl.policy_gradient.config import ClippedConfig
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from nemorl_tensors import TokenBatch
from nemorl_testing.losses import certify_loss
from recorded_messages import Raises

PAGE = Path(__file__).parents[3] / "docs/plugin-kinds/algorithm.md"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page's code about a model that judges, as a module: losses travel by pickle."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "Judge" in block)
    folder = tmp_path_factory.mktemp("second_model")
    (folder / "acme_judge.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("acme_judge")
        sys.modules.pop("acme_judge")


def test_the_loss_of_the_page_is_certified(shown: Any) -> None:
    batch = TokenBatch.from_sequences([[5, 6, 7], [5, 8]], [[False, True, True], [False, True]])
    batch = batch.with_tokens(reference_logprobs=torch.tensor([0.0, -1.0, -2.0, 0.0, -1.0]))
    certificate = certify_loss(shown.OutcomeLoss(), example=batch.with_sequences(outcomes=torch.tensor([1.0, 0.0])))
    assert certificate.is_sound, str(certificate)


class Model:
    """Finds every token half a nat likelier than the reference does."""

    def train_step(self, minibatch: TokenBatch, loss: Any) -> dict[str, Any]:
        assert minibatch["outcomes"].tolist() == [1.0, 0.0]
        return {}

    def get_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        return batch["reference_logprobs"] + 0.5


def test_the_transform_of_the_page_pays_tokens_by_what_the_model_says(shown: Any) -> None:
    def sample(reward: float) -> Sample:
        return Sample(Prompt(0, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(reward), "2", "stop")

    samples = Samples([sample(1), sample(0)])
    batch = TokenBatch.from_samples(samples, [0.5, -0.5])
    batch = batch.with_tokens(reference_logprobs=torch.full((4,), -1.0))
    paid, _ = shown.Judge(Model(), 0.1)(batch, samples)
    assert paid["advantages"][paid.mask].tolist() == pytest.approx([0.55, -0.45])


class Unasked:
    requires: ClassVar[frozenset[str]] = frozenset({"reference_logprobs"})

    def __call__(self, batch: Any, samples: Any) -> Any:
        return batch, {}


class JudgedTrainer(PolicyGradientTrainer[ClippedConfig]):
    config_class = ClippedConfig

    def token_credit(self) -> list[Any]:
        return [Unasked()]


def test_a_transform_that_reads_a_reference_which_nobody_asked_for_is_refused(raises: Raises) -> None:
    with raises(UsageError, "reference_logprobs") as refused:
        JudgedTrainer(ClippedConfig(model="org/model", kl_penalty=0)).setup()
    assert "`needs_reference` of ClippedConfig" in str(refused.value.fix)
    JudgedTrainer(ClippedConfig(model="org/model", kl_penalty=0.1)).setup()
