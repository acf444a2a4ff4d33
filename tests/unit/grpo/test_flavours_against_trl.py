"""GRPO in TRL's flavour against TRL 1.16 itself, where it is installed: its own code, on CPU."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nemorl.config import load_config
from nemorl_grpo.trainer import GRPOTrainer
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_rl.policy_gradient.advantages import group_advantages
from nemorl_tensors import TokenBatch

trl = pytest.importorskip("trl", reason="compares with TRL: pip install trl")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")
MODEL = {"algorithm": "grpo", "model": "org/model"}


@pytest.mark.slow
def test_the_advantages_are_those_that_reach_the_loss_of_a_trl_run(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = write_tiny_model(tmp_path / "model", hidden_size=32, intermediate_size=64)
    seen: list[float] = []

    class Recording(trl.GRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            seen.extend(inputs["advantages"].tolist())
            return super()._compute_loss(model, inputs)

    trainer = Recording(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=4,
            max_steps=1,
            report_to=[],
            bf16=False,
            use_cpu=True,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "1+1="}] * 4),
        reward_funcs=lambda prompts, completions, **_: [1.0, 0.0, 0.0, 0.0],
    )
    trainer.train()
    config: Any = load_config({**MODEL, "advantage": "trl"})
    options = {"normalize_std": config.normalize_std, "leave_one_out": config.leave_one_out}
    ours = group_advantages([1, 0, 0, 0], [0] * 4, epsilon=config.std_epsilon, **options)
    assert sorted(seen) == pytest.approx(sorted(ours), abs=1e-6)  # TRL shuffles them


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("advantages", [(1.4997, -0.4999), (0.0, -0.4999), (1.4997, 0.0)])
def test_the_loss_is_the_one_that_trl_computes(beta: float, advantages: tuple[float, float]) -> None:
    """Two responses of 3 and 1 tokens, one of them off policy; TRL 1.16's own ``_compute_loss`` on our log-probs.

    Responses whose gradient we leave out are those for which TRL's is 0.
    """
    policy = torch.tensor([[-0.5, -1.7, -0.9], [-2.0, 0.0, 0.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -1.0, -1.0], [-1.5, 0.0, 0.0]])
    reference = torch.tensor([[-0.7, -2.0, -1.4], [-1.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantage = torch.tensor(advantages)
    inputs = {
        "prompt_ids": torch.zeros(2, 1, dtype=torch.long),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.zeros(2, 3, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantage,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    theirs = trl.GRPOTrainer._compute_loss(_trl_trainer(policy, beta), None, inputs)
    theirs.backward()

    def flat(padded: torch.Tensor) -> torch.Tensor:
        """[N]: for each response a prompt token, then its answer tokens."""
        return torch.cat([torch.zeros(1), padded[0], torch.zeros(1), padded[1, :1]])

    config: Any = load_config({**MODEL, "num_epochs_per_rollout": 2, "loss": "trl", "kl_penalty": beta})
    batch = TokenBatch.from_sequences([[5, 6, 7, 8], [5, 6]], [[False, True, True, True], [False, True]])
    per_token = torch.repeat_interleave(advantage, batch.lengths)
    batch = batch.with_tokens(
        advantages=per_token,
        old_logprobs=flat(old),
        generation_logprobs=flat(old) - 0.3,  # of an engine that differs: TRL's ratio does not read them
        reference_logprobs=flat(reference),
    )
    logprobs = flat(policy.detach()).requires_grad_()
    trainer = GRPOTrainer(config)
    trainer.setup()
    ours, _ = trainer.loss(logprobs, batch)
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert policy.grad is not None
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, flat(policy.grad))
    has_gradient = trainer.loss.has_gradient(batch)
    assert has_gradient.tolist() == [each != 0 or beta > 0 for each in advantages]
    assert not bool(policy.grad[~has_gradient].any())


def _trl_trainer(policy: torch.Tensor, beta: float) -> Any:
    """What ``_compute_loss`` reads of a trainer, with TRL's defaults and these log-probs."""
    config = trl.GRPOConfig(output_dir="unused", beta=beta, bf16=False, report_to=[])
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=config,
        aux_loss_enabled=False,
        beta=config.beta,
        current_gradient_accumulation_steps=1,
        epsilon_high=config.epsilon_high if config.epsilon_high is not None else config.epsilon,
        epsilon_low=config.epsilon,
        importance_sampling_level=config.importance_sampling_level,
        loss_type=config.loss_type,
        model=SimpleNamespace(training=False),
        off_policy_mask_threshold=config.off_policy_mask_threshold,
        top_entropy_quantile=config.top_entropy_quantile,
        use_vllm=config.use_vllm,
        vllm_importance_sampling_correction=config.vllm_importance_sampling_correction,
    )
