"""The table of NeMo RL's keys: every mapped key is proven by changing its value and looking at the resolved config."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nemorl.config import load_config
from nemorl_compat.conversions import PARTS
from nemorl_compat.key_table import GROUPS, Row, all_rows, rows
from nemorl_compat.migration import migrate
from nemorl_compat.old_config import FAMILIES
from whole_configs import MEGATRON_SETTINGS, WHOLE, put, remove, whole


class Proof(NamedTuple):
    """Give an old key these values one after the other, and find those new ones."""

    base: str
    row: Row
    key: str
    pairs: tuple[tuple[Any, Any], ...]

    @property
    def name(self) -> str:
        return f"{self.base}:{self.key}->{self.row.to}"


def _pair(proof: Any) -> tuple[Any, Any]:
    return (proof[0], proof[1]) if isinstance(proof, list) else (proof, proof)


def _bases(row: Row) -> tuple[str, ...]:
    if "base" in row.test:
        return (row.test["base"],)
    if row.only:
        return tuple(family for family in row.only if family in WHOLE)
    has_section = any("{section}" in key for key in row.keys)
    trained = [family for family in FAMILIES if family in WHOLE and family != "eval"]
    return tuple(trained) if has_section else ("grpo",)


def _proofs() -> list[Proof]:
    found = []
    for row in all_rows():
        if not row.proofs:
            continue
        for base in _bases(row):
            family = next(name for name in FAMILIES if name in WHOLE[base])
            mine = next(r for r in rows(family) if r.proofs is row.proofs)
            found += [Proof(base, mine, key, tuple(map(_pair, row.proofs))) for key in mine.keys]
    return found


def resolved(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    found = migrate(config, folders=(folder,))
    assert found.is_complete, found.features
    dumped: dict[str, Any] = load_config(found.config, for_cluster=True).model_dump(mode="json")
    return dumped


def at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        if isinstance(tree, list):
            tree = tree[int(key)] if int(key) < len(tree) else None
        else:
            tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


@pytest.mark.parametrize("base", WHOLE)
def test_a_whole_config_migrates_without_loss(base: str, prompts: Path) -> None:
    assert resolved(whole(base), prompts)["policy"]["model_name"] == "org/model"


@pytest.mark.parametrize("proof", [pytest.param(proof, id=proof.name) for proof in _proofs()])
def test_a_mapped_key_changes_the_resolved_config(proof: Proof, prompts: Path) -> None:
    config = whole(proof.base)
    for path in proof.row.test.get("absent", ()):
        remove(config, path)
    section = next(name for name in FAMILIES if name in config)
    for path, value in proof.row.test.get("with", {}).items():
        put(config, path.replace("{section}", section).removeprefix("policy." if proof.base == "eval" else "no"), value)
    where = proof.row.test.get("at") or proof.row.to
    values = [at(resolved(config, prompts), where)] if len(proof.pairs) == 1 else []
    is_evaluation = proof.base == "eval"  # what training has below `policy` it has at the top
    for old, new in proof.pairs:
        put(config, proof.key.removeprefix("policy.") if is_evaluation else proof.key, old)
        values.append(at(resolved(config, prompts), where))
        assert values[-1] == (pytest.approx(new) if isinstance(new, float) else new), (proof.key, old)
    assert any(value != values[0] for value in values), f"{proof.key} changes nothing at {where}"


MEGATRON_CRITIC = {
    "value.dtensor_cfg.enabled": False,
    "value.megatron_cfg": MEGATRON_SETTINGS,
    "cluster.gpus_per_node": 8,
}
"""A critic on Megatron, in NeMo RL's words."""
SETTINGS, SCHEDULE = "value.megatron_cfg", "value.megatron_cfg.scheduler"
WARMUP = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 7}}


@pytest.mark.parametrize(
    ("base", "key", "old", "path", "new"),
    [
        ({}, "value.optimizer.kwargs.lr", 3e-5, "optimizer.lr", 3e-5),
        ({}, "value.optimizer.kwargs.weight_decay", 0.3, "optimizer.weight_decay", 0.3),
        ({}, "value.optimizer.kwargs.betas", [0.8, 0.9], "optimizer.betas", [0.8, 0.9]),
        ({}, "value.optimizer.kwargs.eps", 1e-6, "optimizer.eps", 1e-6),
        ({}, "value.scheduler", [WARMUP, {"milestones": [7]}], "schedule.warmup_steps", 7),
        ({}, "value.max_grad_norm", 0.5, "max_grad_norm", 0.5),
        ({}, "value.precision", "float32", "precision", "float32"),
        ({}, "value.dtensor_cfg.activation_checkpointing", True, "activation_checkpointing", True),
        ({"cluster.gpus_per_node": 2}, "value.dtensor_cfg.tensor_parallel_size", 2, "tensor_parallel_size", 2),
        (MEGATRON_CRITIC, f"{SETTINGS}.enabled", True, "backend.name", "megatron"),
        (MEGATRON_CRITIC, f"{SETTINGS}.tensor_model_parallel_size", 2, "tensor_parallel_size", 2),
        (MEGATRON_CRITIC, f"{SETTINGS}.pipeline_model_parallel_size", 2, "backend.pipeline_parallel_size", 2),
        (MEGATRON_CRITIC, f"{SETTINGS}.context_parallel_size", 2, "backend.context_parallel_size", 2),
        (MEGATRON_CRITIC, f"{SETTINGS}.activation_checkpointing", True, "activation_checkpointing", True),
        (MEGATRON_CRITIC, f"{SETTINGS}.optimizer.lr", 3e-5, "optimizer.lr", 3e-5),
        (MEGATRON_CRITIC, f"{SETTINGS}.optimizer.adam_beta2", 0.98, "optimizer.betas", [0.9, 0.98]),
        (MEGATRON_CRITIC, f"{SETTINGS}.optimizer.clip_grad", 0.5, "max_grad_norm", 0.5),
        (MEGATRON_CRITIC, f"{SCHEDULE}.end_weight_decay", 0.3, "optimizer.weight_decay", 0.3),
        (MEGATRON_CRITIC, f"{SCHEDULE}.lr_warmup_iters", 33, "schedule.warmup_steps", 33),
        (MEGATRON_CRITIC | {f"{SCHEDULE}.lr_decay_style": "linear"}, f"{SCHEDULE}.lr_decay_iters", 77,
         "schedule.decay_steps", 77),
    ],
)  # fmt: skip
def test_a_critic_has_what_is_said_of_it_and_the_policy_has_not(
    base: dict[str, Any], key: str, old: Any, path: str, new: Any, prompts: Path
) -> None:
    config = whole("ppo")
    for where, value in base.items():
        put(config, where, copy.deepcopy(value))
    before = resolved(config, prompts)
    put(config, key, old)
    after = resolved(config, prompts)
    assert at(after["critic"], path) == new
    assert after["policy"] == before["policy"]
    assert at(after["policy"], path) != new


def test_a_critic_like_the_policy_has_nothing_to_say_of_its_layout() -> None:
    critic = migrate(whole("ppo")).config.get("critic", {})
    assert not {"backend", "precision", "tensor_parallel_size", "activation_checkpointing"} & critic.keys()


def test_every_new_key_is_proven_by_an_old_one() -> None:
    """A key that stands in several places (``data.train``, ``data.default``, …) is proven in one of them."""
    proven = {row.to for row in all_rows() if row.proofs}
    unproven = {row.to for row in all_rows() if row.to} - proven
    assert {to for to in unproven if not any(str(other).startswith(f"{to}.") for other in proven)} == set()


def test_the_table_names_known_groups_parts_and_families() -> None:
    for row in all_rows():
        assert row.neutral is None or row.neutral in GROUPS, row.keys
        assert row.part is None or row.part in PARTS, row.keys
        assert set(row.only) <= {*FAMILIES, "xtoken"}, row.keys
        assert row.to or row.neutral or row.differs or row.missing or row.feature or row.values, row.keys
