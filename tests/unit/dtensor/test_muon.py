"""Muon: a step worked by hand, torch's own optimizers on a plain model, and which weights it updates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import nemorl
import pytest
import torch
from nemorl.config import PolicyConfig, ScheduleConfig
from nemorl.config.models import MuonConfig, OptimizerConfig
from nemorl.errors import ConfigError
from nemorl_dtensor.optim import Optimizer
from nemorl_dtensor.sharding import hidden_matrices
from nemorl_tensors import TokenBatch
from torch import nn
from transformers import AutoModelForCausalLM

from .conftest import Build, plain_logprobs

SCHEDULE = ScheduleConfig(decay_steps=10)


def newton_schulz(value: float) -> float:
    """Keller Jordan's quintic iteration on one singular value, five times."""
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    return value


def test_a_step_on_a_diagonal_matrix_by_hand() -> None:
    # The gradient diag(3, 4) has norm 5, so the iteration begins at the singular values 0.6 and 0.8. The momentum at
    # the first step is a multiple of the gradient, which the norm takes out again. The step is 0.2 sqrt(2) lr of the
    # result; before it, the weight loses lr * weight_decay of itself.
    weight, bias = nn.Parameter(torch.tensor([[1.0, 0.0], [0.0, 2.0]])), nn.Parameter(torch.ones(2))
    settings = MuonConfig(lr=0.1, weight_decay=0.5)
    optimizer = Optimizer({"w": weight, "b": bias}, settings, SCHEDULE, None, matrices={"w"})
    weight.grad, bias.grad = torch.diag(torch.tensor([3.0, 4.0])), torch.tensor([7.0, -7.0])
    result = optimizer.step()
    assert (result.lr, result.grad_norm) == (0.1, pytest.approx(math.sqrt(9 + 16 + 2 * 49)))
    wanted = [old * 0.95 - 0.1 * 0.2 * math.sqrt(2) * newton_schulz(s) for old, s in ((1.0, 0.6), (2.0, 0.8))]
    # The iteration runs in bfloat16, of 8 bits; the steps are about 0.02 long.
    torch.testing.assert_close(weight.detach(), torch.diag(torch.tensor(wanted)), atol=1e-3, rtol=0)
    # AdamW's first step is lr * sign(gradient), and biases do not decay.
    torch.testing.assert_close(bias.detach(), torch.tensor([0.9, 1.1]))
    assert optimizer.tensors().keys() == {"w.momentum_buffer", "b.exp_avg", "b.exp_avg_sq", "b.step"}


@pytest.mark.parametrize(
    ("options", "factor"),
    [({"scale": "original"}, math.sqrt(4 / 2)), ({"scale": "match_rms_adamw"}, 0.2 * math.sqrt(4))],
)
def test_the_rate_follows_the_shape_of_the_matrix(options: dict[str, Any], factor: float) -> None:
    # A gradient [4, 2] of one singular value 1: u v^T with u and v of length 1.
    u, v = torch.full((4, 1), 0.5), torch.tensor([[1.0, 0.0]])
    weight = nn.Parameter(torch.zeros(4, 2))
    settings = MuonConfig(lr=0.1, weight_decay=0.0, **options)
    optimizer = Optimizer({"w": weight}, settings, SCHEDULE, None, matrices={"w"})
    weight.grad = u @ v
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -0.1 * factor * newton_schulz(1.0) * (u @ v), atol=3e-4, rtol=1e-2)


def test_several_steps_equal_torchs_own_optimizers_on_a_plain_model(
    pretrained: Path, build: Build, batch: TokenBatch, weighted_nll: Any
) -> None:
    backend = build(optimizer={"name": "muon", "lr": 1e-2, "weight_decay": 0.1, "adamw_lr": 3e-3, "nesterov": False})
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    model.get_input_embeddings().padding_idx = None  # the padding token is among those trained on
    hidden = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    rest = [p for name, p in model.named_parameters() if not (".layers." in name and p.ndim == 2)]
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, nesterov=False, adjust_lr_fn="match_rms_adamw")
    decays = [{"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1}]
    decays += [{"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(decays, lr=3e-3)
    for _ in range(3):
        metrics = backend.train_step(batch, weighted_nll)
        loss, _ = weighted_nll(with_gradient(model, batch), batch)
        loss.backward()
        muon.step()
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()
        assert metrics["loss"].value == pytest.approx(loss.item(), rel=1e-3)
        assert metrics["lr"].value == 1e-2
    torch.testing.assert_close(backend.get_logprobs(batch), plain_logprobs(model, batch), atol=2e-3, rtol=1e-3)


def with_gradient(model: Any, batch: TokenBatch) -> torch.Tensor:
    """``plain_logprobs``, with gradient."""
    found = []
    for ids in torch.split(batch.token_ids, batch.lengths.tolist()):
        scored = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1).gather(1, ids[1:, None])
        found.append(torch.cat([torch.zeros(1), scored.squeeze(1)]))
    return torch.where(batch.mask, torch.cat(found), 0.0)


def test_embeddings_head_norms_and_biases_are_adamws(pretrained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    found = {name.split(".", 3)[-1] for name in hidden_matrices(model)}
    projections = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    assert found == {*projections, *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down"))}


def test_a_config_chooses_by_name_and_dumps_to_the_same(tmp_path: Path) -> None:
    for written in ("muon", {"name": "muon"}, MuonConfig()):
        assert PolicyConfig(optimizer=written).optimizer == MuonConfig()
    assert type(PolicyConfig(optimizer={"lr": 1e-3}).optimizer) is OptimizerConfig
    policy = PolicyConfig(optimizer={"name": "muon", "momentum": 0.9, "scale": "original"})
    assert PolicyConfig(**policy.model_dump(mode="json")).optimizer == policy.optimizer


@pytest.mark.parametrize(
    ("policy", "path", "fix"),
    [
        ({"optimizer": {"name": "muon", "momentun": 0.9}}, "policy.optimizer.momentun", "momentum"),
        ({"optimizer": {"name": "adamw", "momentum": 0.9}}, "policy.optimizer.momentum", "betas"),
        ({"optimizer": "muuon"}, "policy.optimizer.name", "muon"),
        ({"optimizer": 3}, "policy.optimizer", "mapping"),
        ({"optimizer": "muon", "lora": {"rank": 4}}, "policy.optimizer.name", "adamw"),
        ({"optimizer": "muon", "backend": "megatron"}, "policy.optimizer.name", "adamw"),
    ],
)
def test_what_cannot_be_is_refused_when_the_config_loads(policy: dict[str, Any], path: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        nemorl.load_config({"algorithm": "sft", "model": "org/model", "policy": policy})
    problems = {problem.path: problem.fix for problem in refused.value.problems}
    assert fix in (problems[path] or "")
