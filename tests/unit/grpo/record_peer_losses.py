"""Records what the losses of other systems say of our random batches: their own code, run from their repositories.

    python tests/unit/grpo/record_peer_losses.py FOLDER

FOLDER has a git repository for each name in ``REPOSITORIES``, with or without a work tree; functions are taken from its
HEAD by name. TRL is the installed package. Writes ``peer_losses.json`` beside this file.
"""

from __future__ import annotations
import __future__

import ast
import importlib.metadata
import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from policy_batches import BATCHES, RECORD, PeerBatch, peer_batch

REPOSITORIES = {
    "verl": "verl-project/verl",
    "skyrl": "NovaSky-AI/SkyRL",
    "prime_rl": "PrimeIntellect-ai/prime-rl",
    "areal": "areal-project/AReaL",
    "nemo_rl": "NVIDIA-NeMo/RL",
}
VERL = "verl/trainer/ppo/core_algos.py"


class Peer:
    """One repository, and functions of it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.repository = REPOSITORIES[name]
        place = folder / self.repository.replace("/", "+") / "repo"
        self._git = place if place.is_dir() else folder / self.repository.split("/")[1]
        self.commit = self._run("rev-parse", "HEAD").strip()

    def load(self, path: str, names: Sequence[str], **known: Any) -> SimpleNamespace:
        """Top-level definitions of a file, without their decorators, in the order given."""
        tree = {getattr(node, "name", ""): node for node in ast.parse(self._run("show", f"HEAD:{path}")).body}
        scope: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "np": np, "math": math, "Any": Any, **known}
        scope["defaultdict"] = defaultdict
        for name in names:
            node: Any = tree[name]
            node.decorator_list = [d for d in node.decorator_list if getattr(d, "id", "") == "dataclass"]
            code = compile(
                ast.Module([node], []), path, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True
            )
            exec(code, scope)
        return SimpleNamespace(**scope)

    def source(self, path: str, function: str) -> dict[str, str]:
        return {"repository": self.repository, "commit": self.commit, "path": path, "function": function}

    def _run(self, *arguments: str) -> str:
        found = subprocess.run(["git", "-C", str(self._git), *arguments], check=True, capture_output=True, text=True)
        return found.stdout


class Options(SimpleNamespace):
    """A config of another system, with the ``get`` that some ask."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def graded(compute: Callable[[PeerBatch, Tensor], Tensor]) -> dict[str, Any]:
    """Value and gradient by the policy's log-probs, of each batch."""
    values, gradients = [], []
    for number in range(BATCHES):
        batch = peer_batch(number)
        policy = batch.policy.clone().requires_grad_()
        value = compute(batch, policy)
        value.backward()  # type: ignore[no-untyped-call]
        assert policy.grad is not None
        values.append(_short(float(value.detach())))
        gradients.append([_short(each) for each in batch.trained(batch.flat(policy.grad))])
    return {"values": values, "gradients": gradients}


def _short(number: float) -> float:
    return float(f"{number:.8g}")


def _tokens(batch: PeerBatch) -> Tensor:
    """[S, T] advantages."""
    return batch.advantages[:, None].expand(batch.mask.shape).clone()


def verl_cases(peer: Peer) -> dict[str, Any]:
    losses = {
        "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
        "dppo_tv": {"clip_ratio": 0.2, "clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.5},
        "dppo_kl": {"clip_ratio": 0.2, "clip_ratio_low": 0.04, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0},
        "clip_cov": {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
        "kl_cov": {},
        "geo_mean": {"clip_ratio": 0.2, "clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
        "dro": {},
    }
    policy_loss = Options(
        clip_cov_ratio=0.3, clip_cov_lb=0.1, clip_cov_ub=5.0, kl_cov_ratio=0.3, ppo_kl_coef=0.7, dro_beta=0.5
    )
    tensors = peer.load("verl/utils/torch_functional.py", ["masked_sum", "masked_mean"])
    cases = {}
    for name, knobs in losses.items():
        function = f"compute_policy_loss_{name}"
        config = Options(policy_loss=policy_loss, global_batch_info={}, **knobs)
        known = {"verl_F": tensors, "ActorConfig": Options, "AlgoConfig": dict}
        loss = getattr(peer.load(VERL, ["agg_loss", function], **known), function)

        def compute(
            batch: PeerBatch, policy: Tensor, loss: Any = loss, config: Any = config, name: str = name
        ) -> Tensor:
            torch.manual_seed(0)
            old = batch.generation if name.startswith("dppo") else batch.old
            found: Tensor = loss(old, policy, _tokens(batch), batch.mask, config=config)[0]
            return found

        cases[f"verl_{name}"] = {**peer.source(VERL, function), **graded(compute)}
    return cases


def verl_advantages(peer: Peer) -> dict[str, Any]:
    function = "compute_optimal_token_baseline_advantage"
    estimate = getattr(peer.load(VERL, [function]), function)
    found = []
    for number in range(BATCHES):
        batch = peer_batch(number)
        ends = batch.mask.sum(1) - 1
        rewards = torch.zeros(batch.mask.shape).scatter(1, ends[:, None], batch.rewards[:, None])
        advantages, _ = estimate(rewards, batch.mask, np.array(batch.groups), batch.old, batch.collisions)
        found.append([_short(each) for each in batch.trained(batch.flat(advantages))])
    return {"verl_optimal_token_baseline": {**peer.source(VERL, function), "advantages": found}}


def skyrl_cases(peer: Peer) -> dict[str, Any]:
    path = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
    tensors = peer.load("skyrl/backends/skyrl_train/utils/torch_utils.py", ["masked_mean", "safe_exp_delta"])
    known = {"masked_mean": tensors.masked_mean, "safe_exp_delta": tensors.safe_exp_delta}
    known["apply_off_policy_correction"] = lambda loss, old, rollout, mask, config: (loss, mask, {})
    scope = peer.load(path, ["reduce_loss", "dppo_policy_loss"], **known)
    cases = {}
    for kind, low, high in (("binary_tv", 0.1, 0.15), ("binary_kl", 0.04, 0.05)):
        config = Options(dppo=Options(dppo_type=kind, delta_low=low, delta_high=high), off_policy_correction=Options())

        def compute(batch: PeerBatch, policy: Tensor, config: Any = config) -> Tensor:
            found = scope.dppo_policy_loss(policy, batch.old, _tokens(batch), config, batch.mask, batch.generation)[0]
            return found / batch.mask.sum()  # SkyRL divides advantages beforehand

        cases[f"skyrl_dppo_{kind}"] = {**peer.source(path, "dppo_policy_loss"), **graded(compute)}
    return cases


def prime_rl_cases(peer: Peer) -> dict[str, Any]:
    path = "src/prime_rl/trainer/rl/loss.py"
    names = ["LossInputs", "LossOutputs", "_safe_mean", "compute_importance_ratio_and_mismatch_kl", "default_loss_fn"]
    known = {"dataclass": __import__("dataclasses").dataclass, "field": __import__("dataclasses").field}
    scope = peer.load(path, names, **known)
    config = Options(dppo_mask_low=0.1, dppo_mask_high=0.15, adv_tau=1.0, kl_tau=0.05)

    def compute(batch: PeerBatch, policy: Tensor) -> Tensor:
        total = torch.zeros(())
        for row in range(len(policy)):
            of = policy[row], batch.generation[row], None, _tokens(batch)[row], batch.mask[row].bool()
            total = total + scope.default_loss_fn(scope.LossInputs(*of), config).loss
        return total / batch.mask.sum()

    return {"prime_rl_default": {**peer.source(path, "default_loss_fn"), **graded(compute)}}


def areal_cases(peer: Peer) -> dict[str, Any]:
    path = "areal/utils/functional/functional.py"
    names = ["RejectionSamplingResult", "_check_bounds", "compute_binary_kl_divergence"]
    known = {"dataclass": __import__("dataclasses").dataclass}
    scope = peer.load(path, [*names, "apply_rejection_sampling", "ppo_actor_loss_fn"], **known)
    config = Options(level="token", action="mask", metric="binary_kl", upper=0.05, lower=None, agg="mean")

    def compute(batch: PeerBatch, policy: Tensor) -> Tensor:
        args = policy, batch.old, batch.generation, _tokens(batch), 0.2, batch.mask.bool()
        found: Tensor = scope.ppo_actor_loss_fn(*args, eps_clip_higher=0.28, rejection_sampling=config)[0]
        return found

    return {"areal_kpop": {**peer.source(path, "ppo_actor_loss_fn"), **graded(compute)}}


def nemo_rl_cases(peer: Peer) -> dict[str, Any]:
    paths = {name: f"nemo_rl/algorithms/{name}.py" for name in ("utils", "advantage_estimator")}
    path = "nemo_rl/algorithms/loss/loss_functions.py"
    utils = peer.load(paths["utils"], ["calculate_kl", "masked_mean"])
    kinds = Options(TOKEN_LEVEL="token", SEQUENCE_LEVEL="sequence", LOGPROB=0)
    normalizers = SimpleNamespace(TOKENS=0, SEQUENCES=1, NONE=2)
    known = {
        "calculate_kl": utils.calculate_kl,
        "masked_mean": utils.masked_mean,
        "LossType": kinds,
        "LossInputType": kinds,
        "MetricNormalizer": normalizers,
        "LossFunction": object,
        "BaseModel": type("BaseModel", (), {"__init_subclass__": classmethod(lambda cls, **_: None)}),
    }
    scope = peer.load(path, ["ClippedPGLossConfig", "ClippedPGLossFn"], **known)
    config = scope.ClippedPGLossConfig()
    config.reference_policy_kl_penalty, config.reference_policy_kl_type = 0.5, "k2"
    cases = {}
    for name, approximates in (("k2", False), ("k2_weighted", True)):
        config.use_on_policy_kl_approximation = approximates
        loss = scope.ClippedPGLossFn(config)

        def compute(batch: PeerBatch, policy: Tensor, loss: Any = loss) -> Tensor:
            shifted = {
                "token_mask": batch.mask.float(),
                "advantages": _tokens(batch),
                "prev_logprobs": batch.old,
                "generation_logprobs": batch.generation,
                "reference_policy_logprobs": batch.reference,
            }
            data = {name: torch.nn.functional.pad(each, (1, 0)) for name, each in shifted.items()}
            data["sample_mask"] = torch.ones(len(policy))
            found: Tensor = loss(policy, data, torch.tensor(float(len(policy))), batch.mask.sum().float())[0]
            return found

        cases[f"nemo_rl_{name}"] = {**peer.source(path, "ClippedPGLossFn"), **graded(compute)}
    estimator = peer.load(paths["advantage_estimator"], ["RawRewardAdvantageEstimator"]).RawRewardAdvantageEstimator(
        {"normalize_advantages": True}, None
    )
    found = []
    for number in range(BATCHES):
        batch = peer_batch(number)
        advantages, _ = estimator.compute_advantage(None, batch.rewards, batch.mask)
        found.append([_short(each) for each in batch.trained(batch.flat(advantages))])
    source = peer.source(paths["advantage_estimator"], "RawRewardAdvantageEstimator")
    return {**cases, "nemo_rl_raw_reward": {**source, "advantages": found}}


def trl_cases() -> dict[str, Any]:
    import trl

    kinds: dict[str, dict[str, Any]] = {
        "sapo": {"loss_type": "sapo"},
        "vespo": {"loss_type": "vespo"},
        "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2},
        "off_policy_mask": {"off_policy_mask_threshold": 0.1},
        "high_entropy": {"top_entropy_quantile": 0.4},
        "entropy_bonus": {"entropy_coef": 0.3},
    }
    cases = {}
    for name, options in kinds.items():
        config = trl.GRPOConfig(output_dir="unused", bf16=False, report_to=[], **options)

        def compute(batch: PeerBatch, policy: Tensor, config: Any = config, name: str = name) -> Tensor:
            # The entropies move with the policy, so that a bonus has a gradient.
            entropies = batch.entropies * (1 + policy)
            old = batch.generation if name in ("vespo", "off_policy_mask") else batch.old
            inputs = {
                "prompt_ids": torch.zeros(len(policy), 1, dtype=torch.long),
                "prompt_mask": torch.ones(len(policy), 1, dtype=torch.long),
                "completion_ids": torch.zeros(policy.shape, dtype=torch.long),
                "completion_mask": batch.mask,
                "advantages": batch.advantages,
                "old_per_token_logps": old,
                "num_items_in_batch": batch.mask.sum(),
            }
            found: Tensor = trl.GRPOTrainer._compute_loss(_trainer(trl, config, policy, entropies), None, inputs)
            return found

        source = {
            "repository": "huggingface/trl",
            "commit": f"release {importlib.metadata.version('trl')}",
            "path": "trl/trainer/grpo_trainer.py",
            "function": "GRPOTrainer._compute_loss",
        }
        cases[f"trl_{name}"] = {**source, **graded(compute)}
    return cases


def _trainer(trl: Any, config: Any, policy: Tensor, entropies: Tensor) -> Any:
    """What ``_compute_loss`` reads of a trainer."""
    owner = trl.GRPOTrainer
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, entropies, None),
        _entropy_bonus_enabled=config.entropy_coef != 0,
        use_adaptive_entropy=False,
        entropy_coef=config.entropy_coef,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **_: x,
        ),
        args=config,
        aux_loss_enabled=False,
        beta=config.beta,
        current_gradient_accumulation_steps=1,
        epsilon_high=config.epsilon_high if config.epsilon_high is not None else config.epsilon,
        epsilon_low=config.epsilon,
        model=SimpleNamespace(training=False),
        use_vllm=False,
        get_off_policy_mask=owner.get_off_policy_mask,
        get_gamma_weights=owner.get_gamma_weights,
    )
    for name in ("importance_sampling_level", "loss_type", "off_policy_mask_threshold", "top_entropy_quantile"):
        setattr(trainer, name, getattr(config, name))
    trainer.vllm_importance_sampling_correction = config.vllm_importance_sampling_correction
    trainer.get_high_entropy_mask = owner.get_high_entropy_mask.__get__(trainer)
    return trainer


def main(folder: Path) -> None:
    cases: dict[str, Any] = trl_cases()
    readers = {
        "verl": [verl_cases, verl_advantages],
        "skyrl": [skyrl_cases],
        "prime_rl": [prime_rl_cases],
        "areal": [areal_cases],
        "nemo_rl": [nemo_rl_cases],
    }
    for name, read in readers.items():
        for cases_of in read:
            cases |= cases_of(Peer(folder, name))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case, separators=(',', ':'))}" for name, case in cases.items())
    RECORD.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
