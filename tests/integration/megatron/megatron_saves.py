"""Checkpoints as NeMo RL's Megatron workers leave them, written by megatron-core's own layers and ``save``.

The weights are put into ``GPTModel`` by hand, and nothing of nemorl names or writes them. NeMo RL builds its layers
with Transformer Engine, which names the norm before a mixture otherwise: ``Case.engine`` gives that name to the layers
that need no CUDA, and adds a tensor of an optimizer.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import nemorl_megatron.cpu_shim  # noqa: F401  megatron-core on the CPU
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from nemorl.resources.worker import WorkerContext
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad, silu
from transformers import AutoConfig

PADDED_TO = 32
"""Entries of the vocabulary are a multiple of this."""
PROBE = ((5, 6, 7, 8, 9, 11, 12, 4), (13, 14, 3, 5, 5, 6, 19, 2))


@dataclass(frozen=True)
class Case:
    """One way to save a model."""

    name: str
    model: str
    world_size: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Parallel sizes, by the names of ``initialize_model_parallel`` without ``_model_parallel_size``."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Of ``sharded_state_dict``."""
    engine: bool = False
    """Names are those that there are with Transformer Engine; and a tensor of an optimizer is kept."""
    uniform: bool = True
    """``moe_layer_freq`` is a number, so that layers are stacked where they may be."""
    folder: str = ""
    """To save into"""


def write(context: WorkerContext, case: Case) -> Tensor | None:
    """Save a model of transformers; [B, S, V] what megatron-core computes with it, where one rank has all of it."""
    store = {} if context.world_size > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    place = {"init_method": f"tcp://{context.master_address}:{context.master_port}", "rank": context.rank}
    dist.init_process_group("gloo", **(store or {**place, "world_size": context.world_size}))
    sizes = {f"{name}_model_parallel_size": size for name, size in case.sizes.items()}
    parallel_state.initialize_model_parallel(**sizes, expert_tensor_parallel_size=1, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = AutoConfig.from_pretrained(case.model)
    model = _build(config, case)
    with torch.no_grad():
        _fill(model, config, load_file(Path(case.model) / "model.safetensors"))
        logits = _logits(model, config.vocab_size) if case.world_size == 1 else None
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={**case.metadata, "dp_cp_group": group})
    if case.engine:
        _as_engine(state, config, context.rank)
    folder = Path(case.folder)
    if context.rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    with _processes():
        dist_checkpointing.save({"model": state, "iteration": 5, "args": {"seed": 1}}, str(folder))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return logits


@contextmanager
def _processes() -> Iterator[None]:
    """megatron-core writes in processes of its own, which those of ``spawned`` may not start. It would have one more
    for a queue, which is for saves in the background."""
    here: Any = multiprocessing.current_process()
    was = here._config.get("daemon")
    here._config["daemon"] = False
    filesystem_async._results_queue = Queue()
    try:
        yield
    finally:
        here._config["daemon"] = was
        filesystem_async._results_queue = None


def _build(config: Any, case: Case) -> GPTModel:
    vars(moe_utils).setdefault("te_general_gemm", None)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    heads = {name: case.sizes.get(name, 1) for name in ("tensor", "pipeline", "expert")}
    fields: dict[str, Any] = {f"{name}_model_parallel_size": size for name, size in heads.items()}
    if experts:
        fields |= _mixture(config, experts, uniform=case.uniform)
    made = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm="qwen3" in config.model_type or bool(getattr(config, "use_qk_norm", False)),
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False)),
        gated_linear_unit=True,
        activation_func=silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **fields,
    )
    return GPTModel(
        made,
        get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization="RMSNorm"),
        -(-config.vocab_size // PADDED_TO) * PADDED_TO,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=config.rope_parameters.get("partial_rotary_factor", 1.0),
        rotary_base=config.rope_parameters["rope_theta"],
    ).eval()


def _mixture(config: Any, experts: int, *, uniform: bool) -> dict[str, Any]:
    dense = getattr(config, "first_k_dense_replace", 0)
    found = {
        "num_moe_experts": experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
        "moe_layer_freq": 1 if uniform else [int(layer >= dense) for layer in range(config.num_hidden_layers)],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_tensor_parallel_size": 1,
    }
    if dense:
        found |= {
            "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        }
    return found


def _fill(model: GPTModel, config: Any, stored: Mapping[str, Tensor]) -> None:
    """By hand: this rank's part of each tensor that is stored."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    vocabulary = -(-config.vocab_size // PADDED_TO) * PADDED_TO

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(ranks)[rank]

    def table(name: str) -> Tensor:
        return rows(pad(stored[name], (0, 0, 0, vocabulary - config.vocab_size)))

    if model.pre_process:
        model.embedding.word_embeddings.weight.copy_(table("model.embed_tokens.weight"))
    if model.post_process:
        model.decoder.final_layernorm.weight.copy_(stored["model.norm.weight"])
        if not config.tie_word_embeddings:
            model.output_layer.weight.copy_(table("lm_head.weight"))
    for layer in model.decoder.layers:
        name = f"model.layers.{layer.layer_number - 1}."
        layer.input_layernorm.weight.copy_(stored[name + "input_layernorm.weight"])
        layer.pre_mlp_layernorm.weight.copy_(stored[name + "post_attention_layernorm.weight"])
        attention = layer.self_attention
        for kind in ("weight", "bias") if f"{name}self_attn.q_proj.bias" in stored else ("weight",):
            parts = [stored[f"{name}self_attn.{which}_proj.{kind}"] for which in "qkv"]
            by_group = [part.unflatten(0, (config.num_key_value_heads, -1)) for part in parts]
            getattr(attention.linear_qkv, kind).copy_(rows(torch.cat(by_group, 1)).flatten(0, 1))
        attention.linear_proj.weight.copy_(stored[name + "self_attn.o_proj.weight"].chunk(ranks, 1)[rank])
        if f"{name}self_attn.q_norm.weight" in stored:
            attention.q_layernorm.weight.copy_(stored[name + "self_attn.q_norm.weight"])
            attention.k_layernorm.weight.copy_(stored[name + "self_attn.k_norm.weight"])
        _fill_feed_forward(layer.mlp, name, stored, ranks, rank)


def _fill_feed_forward(mlp: Any, name: str, stored: Mapping[str, Tensor], ranks: int, rank: int) -> None:
    def fill(block: Any, gate: str, up: str, down: str, ways: int, which: int) -> None:
        halves = [stored[part].chunk(ways)[which] for part in (gate, up)]
        block.linear_fc1.weight.copy_(torch.cat(halves))
        block.linear_fc2.weight.copy_(stored[down].chunk(ways, 1)[which])

    def plain(prefix: str) -> list[str]:
        return [f"{prefix}.{matrix}_proj.weight" for matrix in ("gate", "up", "down")]

    if not hasattr(mlp, "router"):
        fill(mlp, *plain(f"{name}mlp"), ranks, rank)
        return
    block = "block_sparse_moe" if f"{name}block_sparse_moe.gate.weight" in stored else "mlp"
    mlp.router.weight.copy_(stored[f"{name}{block}.gate.weight"])
    if mlp.router.expert_bias is not None:
        mlp.router.expert_bias.copy_(stored[f"{name}mlp.gate.e_score_correction_bias"])
    if mlp.use_shared_expert:
        fill(mlp.shared_experts, *plain(f"{name}mlp.shared_experts"), ranks, rank)
    for number, expert in zip(mlp.local_expert_indices, mlp.experts.local_experts, strict=True):
        prefix = f"{name}{block}.experts.{number}"
        names = [f"{prefix}.{matrix}.weight" for matrix in ("w1", "w3", "w2")] if block != "mlp" else plain(prefix)
        fill(expert, *names, 1, 0)


def _logits(model: GPTModel, vocabulary: int) -> Tensor:
    ids = torch.tensor(PROBE)
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
    found: Tensor = model(ids, torch.arange(ids.shape[1]).expand_as(ids), mask)
    return found[..., :vocabulary]


def _as_engine(state: dict[str, Any], config: Any, rank: int) -> None:
    """Names that there are with Transformer Engine, and a tensor of an optimizer."""
    mixtures = {key.rpartition("mlp.router")[0] for key in (part.key for part in state.values()) if "mlp.router" in key}
    for part in state.values():
        layer, norm, _ = part.key.rpartition("mlp.linear_fc1.layer_norm_weight")
        if norm and layer in mixtures:  # megatron-core's own map of names takes a mixture for a dense layer
            part.key = f"{layer}pre_mlp_layernorm.weight"
    if rank == 0:
        moment = torch.zeros(4, config.hidden_size)
        state["moment"] = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.decoder.layers.0.weight", moment)
