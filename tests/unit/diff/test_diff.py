"""``compare steps``: of differences that were planted in copies of a run, the right one is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Command
from made_runs import (
    changed,
    make_run,
    with_config,
    with_metric,
    with_record,
    with_version,
    with_weight,
)
from nemorl_insight.diff.run_files import RunFiles
from nemorl_insight.diff.stages import Point
from nemorl_insight.diff.telling import first_difference, sentences
from nemorl_insight.diff.tensors import CheckpointPair, is_equal, stored_tensors, unequal
from nemorl_insight.diff.walking import Walk, walk
from recorded_messages import Raises
from safetensors.torch import load_file, save_file

Plant = Callable[[Path], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "a")


def walked(first: Path, second: Path, **options: Any) -> Walk:
    return walk(RunFiles.of(first), RunFiles.of(second), **options)


def token(place: int, value: int) -> Callable[[dict[str, Any]], None]:
    return lambda row: row["sequences"][0]["token_ids"].__setitem__(place, value)


def other_prompt(row: dict[str, Any]) -> None:
    row["prompt"] = "9+9="


CLIPPED = {"policy": {"optimizer": {"lr": 1e-5}, "max_grad_norm": 0.1}}
FASTER = {"policy": {"optimizer": {"lr": 2e-5}, "max_grad_norm": 1.0}}
PLANTED: dict[str, tuple[list[Plant], str, tuple[int, str, Point] | None, list[str]]] = {
    "another seed": (
        [with_config(seed=7), with_record("1-0-0", other_prompt)],
        "config",
        (1, "data", Point("prompt", "1+0=", "9+9=", "train-1-0-0")),
        ["seed: 42 -> 7"],
    ),
    "learning rate": (
        [with_config(**FASTER), with_metric("train/lr", 2e-5, 1), with_weight(1, "embed", 1.5)],
        "config",
        (1, "weights", Point("train/lr", 1e-5, 2e-5)),
        ["policy.optimizer.lr: 1e-05 -> 2e-05"],
    ),
    "plugin version": ([with_version("0.2.0")], "plugins", None, ["nemorl-grpo was 0.1.0, is 0.2.0"]),
    "data order": (
        [with_record("2-0-0", other_prompt), with_record("2-1-0", other_prompt)],
        "data",
        (2, "data", Point("prompt", "2+0=", "9+9=", "train-2-0-0")),
        [],
    ),
    "one token": (
        [with_record("2-1-1", token(3, 5)), with_metric("train/loss", -0.3, 2), with_weight(2, "embed", 0.0)],
        "tokens",
        (2, "tokens", Point("token", 9, 5, "train-2-1-1", 3)),
        [],
    ),
    "reward of one sample": (
        [with_record("3-0-1", lambda row: row.update(reward=0.5)), with_metric("train/reward", 0.625, 3)],
        "rewards",
        (3, "rewards", Point("reward", 0.0, 0.5, "train-3-0-1")),
        [],
    ),
    "advantage normalisation": (
        [with_config(normalize_std=False), with_record("1-0-0", lambda row: row.update(advantage=0.5))],
        "config",
        (1, "advantages", Point("advantage", 1.0, 0.5, "train-1-0-0")),
        ["normalize_std: true -> false"],
    ),
    "loss coefficient": (
        [with_config(kl_penalty=0.1), with_metric("train/loss", -0.19, 2), with_metric("train/grad_norm", 9.0, 2)],
        "config",
        (2, "loss", Point("train/loss", -0.2, -0.19)),
        ["kl_penalty: 0.01 -> 0.1"],
    ),
    "gradient clipping": (
        [with_config(**CLIPPED), with_weight(1, "head", -0.5)],
        "config",
        (
            1,
            "weights",
            Point("policy/model: head", -1.0, -0.5, detail="element 3; 1 of 8 elements differ, by at most 0.5"),
        ),
        ["policy.max_grad_norm: 1.0 -> 0.1"],
    ),
    "a weight in a checkpoint": (
        [with_weight(2, "embed", 2.125)],
        "weights",
        (
            2,
            "weights",
            Point("policy/model: embed", 2.0, 2.125, detail="element 3; 1 of 8 elements differ, by at most 0.125"),
        ),
        [],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_named(run: Path, tmp_path: Path, name: str) -> None:
    plants, first, parting, settings = PLANTED[name]
    found = walked(run, changed(run, tmp_path / "b", *plants))
    assert first_difference(found) == first
    assert [setting.difference.second if setting.kind == "plugins" else setting.text for setting in found.suspects] == (
        settings
    )
    assert found.differs
    if parting is None:
        assert found.parting is None
    else:
        assert found.parting is not None
        assert (found.parting.step, found.parting.stage, found.parting.point) == parting
    assert found.earlier_unknown() == [] or name == "loss coefficient"


def test_a_copy_is_equal_and_so_is_one_under_another_name(run: Path, tmp_path: Path, nemorl: Command) -> None:
    copy = changed(run, tmp_path / "b", with_config(run_dir="elsewhere", max_steps=9))
    done = nemorl("compare", "steps", run, copy)
    assert done.code == 0, done.err
    assert f"{run} and {copy} computed the same at steps 1-3." in done.out


def test_the_command_says_it_in_a_sentence_and_exits_1(run: Path, tmp_path: Path, nemorl: Command) -> None:
    copy = changed(run, tmp_path / "b", with_record("2-1-1", token(3, 5)))
    done = nemorl("compare", "steps", run, copy)
    assert done.code == 1
    sentence = f"{run} and {copy} part at step 2, in the sampled tokens: token 3 of sample train-2-1-1 is 9 and 5."
    assert sentence in " ".join(done.out.split())
    assert re.search(r"sampled tokens +1-2 +differs at step 2", done.out)
    answer = nemorl("compare", "steps", run, copy, "--json").json
    assert (answer["differs"], answer["first_difference"], answer["parting"]["step"]) == (True, "tokens", 2)
    assert answer["parting"]["difference"] == {
        "quantity": "token", "first": 9, "second": 5, "sample": "train-2-1-1", "token": 3, "detail": ""
    }  # fmt: skip


def test_a_folder_that_is_no_run_is_refused(run: Path, tmp_path: Path, nemorl: Command) -> None:
    done = nemorl("compare", "steps", run, tmp_path)
    assert done.code == 2
    assert "not a run directory" in done.err


def test_what_was_not_kept_is_said_to_be_not_known(run: Path, tmp_path: Path) -> None:
    copy = changed(run, tmp_path / "b", with_record("3-0-0", token(2, 5)))
    (copy / "records/train/step_000002.parquet").unlink()
    shutil.rmtree(copy / "checkpoints/step_000001")
    found = walked(run, copy)
    assert found.parting is not None
    assert found.parting.step == 3
    unknown = {(finding.step, finding.stage): finding.known_by for finding in found.earlier_unknown()}
    assert unknown == {
        (1, "weights"): "metrics",  # train/lr is known, the weights are not
        (2, "data"): "metrics",
        (2, "tokens"): "metrics",
        (2, "rewards"): "metrics",
        (2, "advantages"): "metrics",
        (2, "logprobs"): "nothing",
    }
    last = list(sentences(found))[-1]
    assert "They may have parted before that" in last
    assert "records: {every: 1" in last
    assert "checkpoint: {every: 1" in last


def test_runs_that_sample_nothing_lack_no_records(run: Path, tmp_path: Path) -> None:
    """As SFT: there are no responses that a setting could have kept."""
    plain = with_config(generation=None)
    first, second = (changed(run, tmp_path / name, plain) for name in ("first", "second"))
    for folder in (first, second):
        shutil.rmtree(folder / "records")
    found = walk(RunFiles.of(first), RunFiles.of(second))
    assert {finding.stage for finding in found.findings} == {"loss", "gradient", "weights"}
    assert all(finding.is_exact for finding in found.findings)
    longer = changed(second, tmp_path / "longer", plain, with_metric("train/total_num_tokens", 21.0, 2))
    parting = walk(RunFiles.of(first), RunFiles.of(longer)).parting
    assert parting is not None
    assert (parting.step, parting.stage, parting.known_by) == (2, "tokens", "metrics")


def test_a_mean_shows_what_the_records_kept_do_not(run: Path, tmp_path: Path) -> None:
    found = walked(run, changed(run, tmp_path / "b", with_metric("train/reward", 0.75, 2)))
    assert found.parting is not None
    assert found.parting.point == Point("train/reward", 0.5, 0.75)
    assert found.parting.lacking == "the samples that differ are not in both records"


def test_a_loss_that_became_nan_differs_from_one_that_did_not(run: Path, tmp_path: Path) -> None:
    found = walked(run, changed(run, tmp_path / "b", with_metric("train/loss", None, 2)))
    assert found.parting is not None
    assert found.parting.point == Point("train/loss", -0.2, None)


def test_rounding_is_within_the_tolerance(run: Path, tmp_path: Path) -> None:
    plants = [with_metric("train/loss", -0.1 - 1e-9, 1), with_weight(2, "embed", 2.0 + 1e-6)]
    copy = changed(run, tmp_path / "b", *plants)
    assert walked(run, copy).parting is not None
    assert walked(run, copy, tolerance=1e-5).parting is None
    closer = walked(run, copy, tolerance=1e-8).parting
    assert closer is not None
    assert closer.stage == "weights"


@pytest.mark.parametrize("tolerance", [0.0, 0.01])
def test_one_number_and_an_array_of_them_are_compared_alike(tolerance: float) -> None:
    values = [0.0, 1e-3, 1.0, 1.005, 100.0, 100.5, 102.0, float("inf"), float("-inf"), float("nan")]
    for one in values:
        for other in values:
            by_array = not unequal(np.array([one]), np.array([other]), tolerance)[0]
            assert by_array == is_equal(one, other, tolerance), (one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_tensors_are_compared_as_torch_compares_them(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemorl_insight.diff.tensors.PIECE_BYTES", 64)  # tensors are read in many pieces
    torch.manual_seed(0)
    one = {"b.weight": (10 * torch.randn(17, 9)).to(dtype), "a.weight": (10 * torch.randn(40)).to(dtype)}
    other = {name: tensor.clone() for name, tensor in one.items()}
    other["b.weight"].view(-1)[[100, 130, 152]] += 1
    for name, tensors in (("one", one), ("other", other)):
        (tmp_path / name / "policy").mkdir(parents=True)
        save_file(tensors, tmp_path / name / "policy/x.safetensors")

    assert {tensor.name: tensor.shape for tensor in stored_tensors(tmp_path / "one/policy/x.safetensors")} == {
        name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "one/policy/x.safetensors").items()
    }
    (found,) = CheckpointPair(tmp_path / "one", tmp_path / "other", 0.0).differences()
    unlike = one["b.weight"].double() - other["b.weight"].double()
    assert found.name == "policy: b.weight"
    assert (found.elements, found.differing) == (153, int(unlike.count_nonzero())) == (153, 3)
    assert found.largest == float(unlike.abs().max())
    assert found.place == int(unlike.flatten().nonzero()[0]) == 100
    assert found.first == float(one["b.weight"].flatten()[100])


def test_a_tensor_that_one_checkpoint_lacks_and_a_damaged_header_are_said(tmp_path: Path, raises: Raises) -> None:
    one, other = ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(3)})
    for name, tensors in (("one", one), ("other", other)):
        (tmp_path / name / "policy").mkdir(parents=True)
        save_file(tensors, tmp_path / name / "policy/x.safetensors")
    for names, lacking in ((("one", "other"), "one"), (("other", "one"), "other")):
        with raises(ValueError, "b", lacking):
            list(CheckpointPair(*(tmp_path / name for name in names), 0.0).differences())
    for header in (b"[]", b'{"a": []}', b'{"a": {"dtype": "F32"}}'):
        (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with raises(ValueError, "header"):
            stored_tensors(tmp_path / "x.safetensors")


def with_inputs(**inputs: Any) -> Callable[[Path], None]:
    given = {"data": "6 rows, aa", "validation": None, "code": {}, "weights": {"policy": "1 file, aa"}}
    return lambda folder: (folder / "inputs.json").write_text(json.dumps({**given, **inputs})) and None


@pytest.mark.parametrize(
    ("inputs", "key"),
    [
        ({"data": "6 rows, bb"}, "the training rows"),
        ({"weights": {"policy": "1 file, bb"}}, "the first weights of policy"),
    ],
)
def test_what_a_run_was_given_beside_its_config_is_compared(tmp_path: Path, inputs: dict[str, Any], key: str) -> None:
    one, same, other = (
        changed(make_run(tmp_path / f"{name}0"), tmp_path / name, with_inputs(**given))
        for name, given in (("a", {}), ("b", {}), ("c", inputs))
    )
    assert not walk(RunFiles.of(one), RunFiles.of(same)).settings
    (setting,) = walk(RunFiles.of(one), RunFiles.of(other)).settings
    assert (setting.kind, setting.difference.key, setting.counts) == ("inputs", key, True)
    # A run that is older, or has none of what a fingerprint is taken of: that is said, and nothing is made up.
    older = walk(RunFiles.of(one), RunFiles.of(make_run(tmp_path / "older")))
    assert not older.settings
    assert {"the training rows", "the first weights of policy"} <= set(older.unrecorded)
    assert "Not recorded in both" in " ".join(sentences(older))


def test_an_option_of_the_environment_is_no_library(tmp_path: Path) -> None:
    runs = [
        changed(
            make_run(tmp_path / f"{name}0"), tmp_path / name, with_config(environment={"name": "f", "pattern": name})
        )
        for name in "ab"
    ]
    (setting,) = walk(*map(RunFiles.of, runs)).settings
    assert (setting.kind, setting.difference.key) == ("config", "environment.pattern")
