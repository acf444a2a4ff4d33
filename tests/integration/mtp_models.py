"""Tiny models with MTP layers, and what those compute worked by hand (DeepSeek-V3, arXiv:2412.19437, section 2.2).

# L = layers of the model, D = depths, T = tokens of a sequence that the model is fed, H = hidden size
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch
from safetensors.torch import load_file, save_file
from torch import Tensor

NEW = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
BIAS = "e_score_correction_bias"
SIZES: dict[str, Any] = {
    "architecture": "glm4_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 8,
    "use_qk_norm": True,
    "attention_bias": True,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class StepByHand:
    """A loss and its gradients."""

    metrics: dict[str, tuple[float, float]]
    """Total and weight"""
    gradients: dict[str, Tensor]
    """By stored name"""


def write_mtp_model(folder: Path, layers: int, depths: int, *, seed: int = 7, gain: float = 4, **sizes: int) -> Path:
    """A tiny GLM-4.5 with MTP layers: one of so many layers more, of which the last are these."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_tiny_model(folder, **{**SIZES, **sizes}, num_hidden_layers=layers + depths)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(gain) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(BIAS):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    tensors, hidden = load_file(folder / "model.safetensors"), SIZES["hidden_size"]
    for depth in range(depths):
        prefix = f"model.layers.{layers + depth}."
        for name in NEW:
            norm = 1 + 0.1 * torch.randn(hidden)
            tensors[prefix + name] = 0.2 * torch.randn(hidden, 2 * hidden) if "proj" in name else norm
        tensors |= {prefix + copy: tensors[name].clone() for copy, name in COPIES.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    stored |= {"num_hidden_layers": layers, "num_nextn_predict_layers": depths}
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


class ByHand:
    """Eq. 21 to 25 of DeepSeek-V3 (arXiv:2412.19437), sequence by sequence."""

    def __init__(self, folder: Path, *, first_embedding: bool = True) -> None:
        """
        Args:
            folder: Of the model.
            first_embedding: The layers see the embedding that goes with a sequence's first state; else zeros.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        self.layers, self.stored = config.num_hidden_layers, config.num_nextn_predict_layers
        self.eps, self.first_embedding = config.rms_norm_eps, first_embedding
        config.num_hidden_layers += self.stored  # transformers has no MTP: the layers inside are ones like the last
        config._attn_implementation = "eager"
        self.model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        tensors = load_file(folder / "model.safetensors")
        self.own = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items() if name.endswith(NEW)}
        self.own = {name: tensor for name, tensor in self.own.items() if "model.layers" in name}

    def norm(self, states: Tensor, weight: Tensor) -> Tensor:
        return weight * states / (states.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def states(self, ids: Tensor, depths: int, detach: bool) -> list[Tensor]:
        """[T - k, H] of depth k = 0 ... D, before the output head and after the norms before it."""
        decoder = self.model.model
        length = len(ids)
        places = torch.arange(length)[None]
        hidden = decoder.embed_tokens(ids[None])
        angles = decoder.rotary_emb(hidden, places)
        causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
        for layer in decoder.layers[: self.layers]:
            hidden = layer(hidden, attention_mask=causal, position_ids=places, position_embeddings=angles)
        found = [decoder.norm(hidden)[0]]
        state = found[0].detach() if detach else found[0]
        for depth in range(1, depths + 1):
            index = self.layers + (depth - 1) % self.stored
            own = {name: self.own[f"model.layers.{index}.{name}"] for name in NEW}
            count = length - depth
            if count <= 0:
                break
            embedded = decoder.embed_tokens(ids[depth:])
            embedded = embedded.detach() if detach else embedded
            if not self.first_embedding:
                embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
            joined = torch.cat(
                [self.norm(embedded, own["enorm.weight"]), self.norm(state[:count], own["hnorm.weight"])], -1
            )
            state = decoder.layers[index](
                (joined @ own["eh_proj.weight"].T)[None],
                attention_mask=causal[:, :, :count, :count],
                position_ids=places[:, :count],
                position_embeddings=tuple(part[:, :count] for part in angles),
            )[0]
            found.append(self.norm(state, own["shared_head.norm.weight"]))
        return found

    def step(self, batch: TokenBatch, depths: int, *, detach: bool, factor: float) -> StepByHand:
        head = self.model.lm_head.weight
        policy, ahead = torch.zeros(()), torch.zeros(())
        nats = accepted = 0.0
        count = start = 0
        for length in batch.lengths.tolist():
            ids, mask, weights = (
                of[start : start + length] for of in (batch.token_ids, batch.mask, batch.loss_weights)
            )
            start += length
            scored = [place for place in range(1, length) if mask[place]]
            if not scored:
                continue
            found = self.states(ids[: scored[-1]], depths, detach)
            said = [
                torch.log_softmax(states @ (head.detach() if detach and depth else head).T / batch.temperature, -1)
                for depth, states in enumerate(found)
            ]
            for place in scored:
                policy = policy - weights[place] * said[0][place - 1, ids[place]]
                for depth in range(1, depths + 1):
                    before = place - 1 - depth  # the token whose state of this depth predicts ``place``
                    if before < 0:
                        continue
                    logprob = said[depth][before, ids[place]]
                    ahead = ahead - weights[place] * logprob
                    nats -= float(logprob.detach())
                    accepted += min(1.0, float((logprob - said[0][place - 1, ids[place]]).detach().exp()))
                    count += 1
        (policy + factor / depths * ahead).backward()  # eq. 25
        gradients = self._gradients()
        metrics = {
            "loss": (float(policy.detach()), 1.0),
            "mtp_loss": (nats, count),
            "mtp_acceptance": (accepted, count),
        }
        return StepByHand(metrics, gradients)

    def _gradients(self) -> dict[str, Tensor]:
        """By stored name."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        folder = Path(self.model.config.name_or_path) / "gradients"
        self.model.save_pretrained(folder)
        found = load_file(folder / "model.safetensors")
        return found | {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in self.own.items()
        }
