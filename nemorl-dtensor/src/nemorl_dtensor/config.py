"""Options of the two backends of this package, readable where torch is absent.

``DTensorConfig`` is the training backend ``dtensor``, ``HFGenerationConfig`` the generation backend ``hf``. Both
serve any causal language model of the transformers library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from nemorl.config import RESUMABLE, GenerationConfig, PolicyConfig, TrainingOptions
from nemorl.contracts import GenerationCapability, TrainingCapability
from nemorl.errors import ConfigIssue
from nemorl.plugins.kinds import GenerationBackendConfig
from nemorl_rl.models.divisions import known_geometry, tensor_parallel_problems
from nemorl_rl.models.rank_backend import Offload, RankBackendConfig
from nemorl_rl.planning.memory.describing import EnginePlan, PlansEngine, TrainingPlan
from pydantic import Field

from nemorl_dtensor.mixtures import mixture_problems

if TYPE_CHECKING:
    from nemorl.contracts import GenerationBackend, Head, TrainingBackend
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import WeightHandle

AttentionName = Literal["auto", "sdpa", "eager", "flash_attention_2"]
Method = Literal["ulysses", "ring"]
ContextMethod = Literal["auto", "ulysses", "ring"]


def method_of(asked: ContextMethod, heads: int, ways: int) -> Method:
    """How ranks share sequences: by heads where these divide over as many ways, else by a ring, unless one is named.

    >>> method_of("auto", 6, 2), method_of("auto", 6, 4)
    ('ulysses', 'ring')
    """
    if asked != "auto":
        return asked
    return "ring" if heads % ways else "ulysses"


class DTensorOffload(Offload):
    """Parts of a model that lie in the host's memory while the device does not work with them."""

    parameters: bool = False
    """Weights, their gradients and the optimizer's state (FSDP2's CPU offload). Layers come to the device while they
    compute, gradients leave it after each microbatch, and the optimizer steps on the host. Also in one process, which
    then shards over itself alone."""
    activations: bool = False
    """What decoder layers keep for the backward pass. It leaves while the next layer computes, and is fetched when it
    is needed. Results stay the same, bit for bit."""


class DTensorConfig(RankBackendConfig):
    """Train a Hugging Face model with PyTorch alone."""

    summary: ClassVar[str] = "PyTorch training of any Hugging Face causal language model (FSDP2, tensor parallel, LoRA)"
    requires_modules: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors")
    install_hint: ClassVar[str] = "pip install nemorl-dtensor"
    supports: ClassVar[frozenset[TrainingCapability]] = RankBackendConfig.supports | {
        *("adapted_head", "muon", "nf4", "routes", "shared_base")
    }

    layout: Annotated[Literal["auto", "padded", "packed", "shared"], RESUMABLE] = "auto"
    """How sequences become rows. ``padded``: one row each, of similar length together. ``packed``: all in one row,
    fast only with flash attention. ``shared``: all in one row, tokens that they have in common (the prompt of a group,
    turns before a branch) computed once; it takes full causal attention. ``auto``: packed on CUDA where flash-attn is
    installed, else shared where the model can and that saves more than 1.2 times the tokens, else padded."""
    attn_implementation: Annotated[AttentionName, RESUMABLE] = "auto"
    """Attention kernel of transformers. ``auto``: flash_attention_2 when packed on CUDA, else sdpa where the model
    supports it (on a CPU its causal case is computed by matrix products, in less time), else eager."""
    data_parallel_replicas: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Copies of the sharded model (hybrid sharding), each spread over an equal part of the data-parallel ranks. Raise
    it when nodes are joined by a slow network, e.g. to the number of nodes."""
    expert_parallel_size: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Ranks that the experts of each layer of a mixture are divided over: tokens travel to them, in place of weights.
    The rest of the model is sharded over data-parallel ranks as before, its attention over tensor-parallel ranks too.
    It divides the experts, and the workers of a replica."""
    context_parallel_size: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Ranks that share the tokens of each sequence. Raise it when one sequence does not fit into memory;
    ``microbatch_tokens`` are then those of all of them together."""
    context_parallel_method: Annotated[ContextMethod, RESUMABLE] = "auto"
    """How they attend to each other's tokens. ``ulysses``: tokens are traded for attention heads, which must divide
    over them. ``ring``: keys and values go round. ``auto``: ulysses where the heads divide, else ring."""
    sequence_parallel: Annotated[bool, RESUMABLE] = True
    """With tensor parallelism, also split norms and residuals along the sequence: less memory, same communication."""
    logprob_chunk_tokens: Annotated[int | None, RESUMABLE] = Field(None, ge=1)
    """Positions whose logits exist at one time; the backward pass then computes them again. Unset: as many as fill 128
    MiB, kept for the backward pass if that is all of them. Lower it when the head runs out of memory."""

    offload: Annotated[DTensorOffload, RESUMABLE] = DTensorOffload()
    """Parts that lie in the host's memory while the device does other work, where they do not fit together."""
    shelved_adapters_gib: Annotated[float, RESUMABLE] = Field(1.0, ge=0)
    """Device memory for adapters that share a base and are not in use, in GiB. Beyond it those that were used least
    recently wait in the host's memory."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.context_parallel_size > 1 and self.attn_implementation in ("eager", "flash_attention_2"):
            yield ConfigIssue(
                "attn_implementation",
                f"ranks that share sequences compute attention by torch's sdpa, not by {self.attn_implementation}",
                "set it to auto (on CUDA torch has flash attention of its own), or context_parallel_size: 1",
            )

    def ranks_per_copy(self, policy: PolicyConfig) -> int:
        return policy.tensor_parallel_size * self.context_parallel_size

    def rank_problems(self, policy: PolicyConfig, world_size: int) -> Iterator[ConfigIssue]:
        yield from super().rank_problems(policy, world_size)
        yield from mixture_problems(policy, self, world_size)
        yield from self._context_problems(policy, world_size)
        ways = policy.tensor_parallel_size
        yield from tensor_parallel_problems(policy, ways, "tensor_parallel_size", copies_key_values=False)
        if policy.lora is not None and policy.lora.head and world_size > 1:
            yield ConfigIssue(
                "lora.head",
                f"dtensor adapts the output head of models in one process, and this one has {world_size} workers",
                "set head: false, or use one worker",
            )
        if self.offload.parameters:
            yield from _host_problems(policy)
        if policy.lora is not None and policy.optimizer.name == "muon":
            yield ConfigIssue(
                "optimizer.name",
                "Muon orthogonalizes the steps of whole weight matrices, and LoRA trains factors of them",
                "use adamw, or remove lora",
            )
        if policy.lora is not None and policy.lora.base != "full" and world_size > 1:
            yield ConfigIssue(
                "lora.base",
                f"weights in {policy.lora.base} are whole on one device, and this model has {world_size} workers",
                "set base: full, or train on one device",
            )
        if policy.lora is not None and policy.lora.dropout and policy.tensor_parallel_size > 1:
            yield ConfigIssue(
                "lora.dropout",
                "the ranks that share a layer would each drop other inputs of the same adapter",
                "set dropout: 0, or tensor_parallel_size: 1",
            )

    def _context_problems(self, policy: PolicyConfig, world_size: int) -> Iterator[ConfigIssue]:
        ways, path = self.context_parallel_size, "backend.context_parallel_size"
        if ways == 1:
            return
        if world_size % (ways * policy.tensor_parallel_size * self.data_parallel_replicas):
            yield ConfigIssue(
                path,
                f"{world_size} training processes are no multiple of {ways} context-parallel * "
                f"{policy.tensor_parallel_size} tensor-parallel ranks * {self.data_parallel_replicas} replicas",
                "lower one of them, or raise cluster.gpus_per_node (workers_per_node on the CPU)",
            )
        geometry = known_geometry(policy)
        if geometry is None:
            return
        if geometry.window_layers:
            yield ConfigIssue(
                path,
                f"{geometry.window_layers} layers of this model see {geometry.window} tokens, and ranks of dtensor "
                "share sequences of models that attend to all",
                "set it to 1, or use backend: megatron",
            )
        heads, rest = divmod(geometry.heads, policy.tensor_parallel_size)
        if self.context_parallel_method == "ulysses" and not rest and heads % ways:
            fitting = " or ".join(str(fewer) for fewer in range(1, ways) if heads % fewer == 0)
            yield ConfigIssue(
                path,
                f"{heads} attention heads of a rank do not divide over {ways} ranks",
                f"set it to {fitting}, or context_parallel_method: ring",
            )

    def build(
        self, policy: TrainingOptions, worker: WorkerContext, *, reference: bool, head: Head = "language_model"
    ) -> TrainingBackend:
        from nemorl_dtensor.training import DTensorBackend

        return DTensorBackend(policy, worker, self, reference=reference, head=head)

    def training_plan(self) -> TrainingPlan:
        from nemorl_dtensor.describing import DTensorPlan

        return DTensorPlan(self)


def _host_problems(policy: PolicyConfig) -> Iterator[ConfigIssue]:
    """What parameters in the host's memory do not go with."""
    if policy.optimizer.name == "muon":
        yield ConfigIssue(
            "optimizer.name",
            "Muon gathers whole matrices on the device, and backend.offload.parameters has the optimizer on the host",
            "use adamw, or offload: {optimizer: true}",
        )
    if policy.lora is not None and (policy.lora.head or policy.lora.base != "full"):
        key = "head" if policy.lora.head else "base"
        yield ConfigIssue(
            f"lora.{key}",
            "backend.offload.parameters shards the model, if only over one process, and an adapted head or a quantized "
            "base is whole",
            "set head: false and base: full, or offload: {parameters: false}",
        )


class HFGenerationConfig(GenerationBackendConfig, PlansEngine):
    """Generate with the Hugging Face model itself: no server, no second copy of the weights."""

    summary: ClassVar[str] = "Embedded generation with the Hugging Face model (the default, no server)"
    requires_modules: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors")
    install_hint: ClassVar[str] = "pip install nemorl-dtensor"
    supports: ClassVar[frozenset[GenerationCapability]] = frozenset(
        {
            "activations",
            "any_transport",
            "filtered_logprobs",
            "media",
            "prompt_logprobs",
            "receipts",
            "routes",
            "shared_weights",
            "sleep",
            "snapshots",
            "submit",
        }
    )
    weight_transports: ClassVar[tuple[str, ...]] = ("in_process", "shared_memory", "object_store")

    max_batch_rows: Annotated[int, RESUMABLE] = Field(256, ge=1)
    """Most samples decoded at once; the rest wait for a place. Lower it when memory is short."""
    kv_cache_tokens: Annotated[int, RESUMABLE] = Field(262144, ge=1)
    """Most token positions held at once, over all samples, room for their longest response included. Each takes
    4 * layers * key-value heads * head size bytes in bfloat16 (28 KiB for a 1.5B Qwen2), twice that in float32.
    Conversations that wait for their next turn may hold as many besides; a Llama-like model keeps them."""
    snapshots: Annotated[int, RESUMABLE] = Field(1, ge=1, le=100)
    """Most versions of the weights held at once: the newest, and those before it for requests that name one
    (``GenerationRequest.version``). Each takes the memory of the model, and may have as many rows and tokens in its
    cache as the options above allow. Above 1 the weights are copies, also in the trainer's process."""

    def build(
        self, generation: GenerationConfig, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None
    ) -> GenerationBackend:
        from nemorl_dtensor.generation import HFGeneration

        return HFGeneration(generation, policy, worker, weights, self)

    def engine_plan(self) -> EnginePlan:
        from nemorl_rl.planning.memory.engines import RowsPlan

        return RowsPlan(self.max_batch_rows, self.kv_cache_tokens, layer_start_s=3e-4, step_start_s=2e-3)
