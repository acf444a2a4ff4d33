"""Tiny mixtures for tests of routing, and their forward pass by hand with a fixed choice of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, Prompt, Sample, Samples, Score
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.training import DTensorBackend
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch
from nemorl_tensors.batch import ROUTES
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, **ROUTED, "num_experts": 8, "head_dim": 8, "norm_topk_prob": True},
    "mixtral": {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2},
    # Experts in four groups, of which two are chosen from; the first of three layers has none.
    "deepseek_v3": {**SIZES, **ROUTED, **LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1}
    | {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
    | {"qk_nope_head_dim": 8, "v_head_dim": 8, "routed_scaling_factor": 2.5},
}
GLM = {**SIZES, **ROUTED, "num_hidden_layers": 3, "first_k_dense_replace": 1, "head_dim": 8, "use_qk_norm": True} | {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
}
MEGATRON_MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": MIXTURES["qwen3_moe"],
    "mixtral": MIXTURES["mixtral"],
    "glm4_moe": GLM,  # sigmoids, a bias for the choice, a scaling factor; the first of three layers has no experts
}
LAYERS, EXPERTS, CHOSEN = 2, 8, 2
"""Of each of them: layers with experts, and experts per layer and token."""


def mixture(folder: Path, architecture: str, **changes: Any) -> Path:
    """A model folder whose float32 weights are numbers of bfloat16, spread so that log-probs are far from uniform."""
    sizes = {**MIXTURES, **MEGATRON_MIXTURES}[architecture]
    return spread_out(folder, architecture, **{**sizes, **changes})


def spread_out(folder: Path, architecture: str, **sizes: Any) -> Path:
    """The same of any architecture."""
    write_tiny_model(folder, architecture=architecture, **sizes)
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            spread = noise * 0.2 if parameter.ndim > 1 else parameter + noise * 0.05
            parameter.copy_(spread.bfloat16().float())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def trainer(folder: Path, *, replay: bool = True, reference: bool = False, **options: Any) -> DTensorBackend:
    """A backend whose update shows the gradient: g / (|g| + 1)."""
    policy = {"optimizer": {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}, "max_grad_norm": None}
    policy |= options.pop("policy", {})
    config = DTensorConfig(router={"replay": replay}, **options)
    head = options.pop("head", "language_model")
    made = PolicyConfig.model_validate({"model_name": str(folder), **policy})
    return DTensorBackend(made, WorkerContext(), config, reference=reference, head=head)


def routed_batch(seed: int = 0, known: float = 1.0) -> TokenBatch:
    """Two groups of responses to a prompt each, and a stranger, every token sent somewhere at random.

    A group's prompt has the same routes in each of its sequences. ``known``: the share of tokens that have any.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return torch.randint(3, 20, (count,), generator=generator)

    def send(count: int) -> Tensor:
        scores = torch.rand(count, LAYERS, EXPERTS, generator=generator)
        lost = torch.rand(count, 1, 1, generator=generator) >= known
        return torch.where(lost, -1, scores.topk(CHOSEN, -1).indices).to(torch.int16)

    ids, masks, routes = [], [], []
    for prompt_tokens, responses in ((9, (4, 2, 5)), (6, (3, 7)), (1, (5,))):
        prompt, prompt_routes = draw(prompt_tokens), send(prompt_tokens)
        for tokens in responses:
            ids.append(torch.cat((prompt, draw(tokens))).tolist())
            masks.append([False] * prompt_tokens + [True] * tokens)
            routes.append(torch.cat((prompt_routes, send(tokens - 1), torch.full((1, LAYERS, CHOSEN), -1))))
    batch = TokenBatch.from_sequences(ids, masks)
    advantages = torch.randn(batch.num_tokens, generator=generator)
    return batch.with_tokens(advantages=advantages, **{ROUTES: torch.cat(routes).to(torch.int16)})


@contextmanager
def fixed_choice(model: Any, routes: Tensor) -> Iterator[None]:
    """Within it, one sequence of ``model`` takes ``routes`` [T, L, K], by a forward pass of experts written by hand.

    The output of a token is the sum over its experts of weight * down(silu(gate x) * up x), and its shared expert.
    """
    blocks = [each for each in model.modules() if hasattr(each, "experts") and hasattr(each, "gate")]
    weigh = WEIGHTS[model.config.model_type]

    def run(block: Any, choice_TK: Tensor) -> Callable[[Tensor], Tensor]:
        def forward(hidden: Tensor) -> Tensor:
            x_TD = hidden[0]
            logits_TE = x_TD.float() @ block.gate.weight.float().T
            weight_TK = weigh(model.config, logits_TE, choice_TK)
            rows = []
            for x, choice, weights in zip(x_TD, choice_TK.tolist(), weight_TK, strict=True):
                total = torch.zeros_like(x)
                for expert, weight in zip(choice, weights, strict=True):
                    gate, up = (block.experts.gate_up_proj[expert] @ x).chunk(2)
                    total = total + weight * (block.experts.down_proj[expert] @ (silu(gate) * up))
                rows.append(total)
            shared = getattr(block, "shared_experts", None)
            return torch.stack(rows)[None] + (shared(hidden) if shared is not None else 0.0)

        return forward

    with ExitStack() as stack:
        for layer, block in enumerate(blocks):
            stack.enter_context(patch.object(block, "forward", run(block, routes[: len(routes), layer].long())))
        yield


def _softmax_normed(config: Any, logits: Tensor, choice: Tensor) -> Tensor:
    chosen = torch.softmax(logits, -1).gather(1, choice)
    is_normed = config.to_dict().get("norm_topk_prob", True)
    return chosen / chosen.sum(-1, keepdim=True) if is_normed else chosen


def _sigmoid_normed(config: Any, logits: Tensor, choice: Tensor) -> Tensor:
    chosen = torch.sigmoid(logits).gather(1, choice)
    return config.routed_scaling_factor * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "qwen3_moe": _softmax_normed,
    "mixtral": _softmax_normed,
    "deepseek_v3": _sigmoid_normed,
    "glm4_moe": _sigmoid_normed,
}
"""Of the chosen experts, by the papers' formulas: softmax or sigmoid of scores, divided by the sum of the chosen."""


def own_routes(model: Any, ids: list[int]) -> Tensor:
    """[T, L, K] experts that a plain forward pass of transformers chooses, the last token's as well."""
    routers = [each.gate for each in model.modules() if hasattr(each, "experts") and hasattr(each, "gate")]
    found: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _module, _inputs, output: found.append(output[2])) for router in routers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


def by_hand(model: Any, batch: TokenBatch) -> Tensor:
    """[N] log-probs of the batch under its routes, one sequence at a time, with gradient."""
    found = []
    lengths = batch.lengths.tolist()
    for ids, routes in zip(batch.token_ids.split(lengths), batch[ROUTES].split(lengths), strict=True):
        fed = ids[:-1]
        with fixed_choice(model, routes[:-1]):
            logits = model(input_ids=fed[None], use_cache=False).logits[0].float()
        scored = torch.log_softmax(logits, -1).gather(1, ids[1:, None]).squeeze(1)
        found.append(torch.cat((torch.zeros(1), scored)))
    return torch.where(batch.mask, torch.cat(found), 0.0)


def exported(backend: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in backend.export_weights() for name, tensor in bucket.items()}


def samples_of(requests: list[GenerationRequest], answers: list[list[Completion]]) -> Samples:
    def sample(number: int, prompt: tuple[int, ...], one: Completion) -> Sample:
        blank, said = (0.0,) * len(prompt), len(one.token_ids)
        mask = (False,) * len(prompt) + (True,) * said
        ids, logprobs = (*prompt, *one.token_ids), (*blank, *one.logprobs)
        return Sample(Prompt(number, "", prompt), ids, mask, logprobs, Score(0.0), "", "length", routes=one.routes)

    pairs = enumerate(zip(requests, answers, strict=True))
    return Samples([sample(number, request.token_ids, one) for number, (request, found) in pairs for one in found])


def in_memory(name: str) -> str:
    """Mixtral's published name of its block is that of the paper."""
    return name.replace("block_sparse_moe", "mlp")
