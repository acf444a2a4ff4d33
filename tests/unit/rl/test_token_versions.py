"""Versions of the weights per token: as an episode has them, as its record keeps them, and a bound on their age."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.base.process.timing import Span
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl.types import Completion, Prompt, Sample, Samples, Score
from nemorl_cli.report.records.reading import FOLDER, record_files
from nemorl_cli.report.records.writing import Recorder
from nemorl_cli.report.viewing.details import detail_at
from nemorl_cli.report.viewing.index import Place
from nemorl_rl.agents.record import Call, plain_sample
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from nemorl_rl.rollouts.recording import RecordingConfig
from record_files import rows_of

PROMPT = Prompt(0, "1+1=", (1, 2))
ASYNC: dict[str, Any] = {
    "model": "org/model",
    "algorithm": "grpo",
    "rollouts": {"mode": "async", "max_staleness": 1, "on_stale": "train"},
    "kl_penalty": 0.0,
    "cluster": {"colocated": False, "workers_per_node": 2},
}


def episode(*calls: Call) -> Sample:
    return plain_sample(PROMPT, calls, Score(1.0), "", (), span=Span(0.0, 1.0))


def two_updates() -> Sample:
    """Weights 3 and 4 in the first answer, 4 in the second, which observed one token; a retry of it by 5 forks."""
    first = Completion((10, 11, 12), (-1.0,) * 3, "stop", (3, 4), (0, 2))
    seen = (1, 2, 10, 11, 12, 20)
    second, retry = (Completion((token,), (-1.0,), "stop", (version,)) for token, version in ((13, 4), (14, 5)))
    return episode(Call(0, (1, 2), first), Call(1, seen, second), Call(2, seen, retry))


def test_each_token_has_the_version_that_it_was_sampled_from() -> None:
    sample = two_updates()
    assert sample.weight_versions == (3, 4, 5)
    assert sample.version_runs == ((2, 3), (4, 4))
    whole, fork = sample.sequences
    #                                1  2  10 11 12 20 13
    assert whole.token_versions == (3, 3, 3, 3, 4, 4, 4)
    assert fork.token_versions[-1] == 5  # the one token of the fork that was sampled there


def test_an_episode_of_one_version_keeps_no_runs() -> None:
    sample = episode(Call(0, (1, 2), Completion((10, 11), (-1.0, -1.0), "stop", (7,))))
    assert (sample.version_runs, sample.token_versions) == ((), (7, 7, 7, 7))


def test_a_record_and_its_page_say_which_weights_a_token_is_of(tmp_path: Path) -> None:
    same = episode(Call(0, (1, 2), Completion((10,), (-1.0,), "stop", (3,))))
    keeper = Recorder(tmp_path, RecordingConfig(), validation_every=0, decode=str, warn=print)
    keeper.rollout(Samples([two_updates(), same]), "train", 1)
    keeper.close()
    mixed, plain = rows_of(tmp_path)
    assert [part["version_runs"] for part in mixed["sequences"]] == [
        [{"start": 2, "version": 3}, {"start": 4, "version": 4}],
        [{"start": 6, "version": 5}],
    ]
    assert plain["sequences"][0]["version_runs"] is None
    (file,) = record_files(tmp_path / FOLDER)
    details = [detail_at(Place(file.path, row), {}) for row in (0, 1)]
    shown = [part["version_runs"] for detail in details for part in (detail or {})["sequences"]]
    assert shown == [[[2, 3], [4, 4]], [[6, 5]], []]


def test_a_bound_on_tokens_trains_what_was_sampled_lately() -> None:
    # Step 6 learns with the weights of version 5. Ages: 2 2 1 1 in the first sequence, 0 in the fork. Five tokens are
    # trained, each of weight 1/5; a bound of 1 leaves out the first two, and the others weigh no more for it.
    config: Any = load_config({**ASYNC, "max_token_staleness": 1, "loss_aggregation": "token"})
    trainer: Any = config.build()
    assert isinstance(trainer, PolicyGradientTrainer)
    trainer.setup()
    trainer.progress.step = 6
    batch = trainer.to_batch(Samples([two_updates()]), [2.0])
    assert batch["staleness"][batch.mask].tolist() == [2, 2, 1, 1, 0]
    batch = batch.with_tokens(old_logprobs=batch["generation_logprobs"])
    policy = batch["generation_logprobs"].clone().requires_grad_()
    loss, metrics = trainer.loss(policy, batch)
    loss.backward()
    assert policy.grad is not None
    assert policy.grad[batch.mask].tolist() == pytest.approx([0, 0, -2 / 5, -2 / 5, -2 / 5])
    assert metrics["token_staleness"].value == pytest.approx(6 / 5)
    assert metrics["stale_masked_frac"].value == pytest.approx(2 / 5)
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    "rollouts",
    [{"mode": "sync"}, {"mode": "async", "max_staleness": 2, "on_stale": "drop"}],
)
def test_a_bound_that_no_token_exceeds_is_refused(rollouts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_token_staleness"):
        load_config({**ASYNC, "rollouts": rollouts, "max_token_staleness": 2})
