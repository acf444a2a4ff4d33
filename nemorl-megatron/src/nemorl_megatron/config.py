"""Options of the two backends of this package, readable where torch and megatron-core are absent.

``MegatronConfig`` is the training backend ``megatron``, ``MegatronGenerationConfig`` the generation backend of the same
name. Tensor parallelism, precision, optimizer and batching are ``policy`` settings, the same for every backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from nemorl.config import RESUMABLE, GenerationConfig, PolicyConfig, TrainingOptions
from nemorl.contracts import GenerationCapability, TrainingCapability
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import GenerationBackendConfig
from nemorl_rl.models.divisions import tensor_parallel_problems
from nemorl_rl.models.rank_backend import RankBackendConfig
from nemorl_rl.planning.memory.describing import EnginePlan, PlansEngine, TrainingPlan
from pydantic import Field

from nemorl_megatron.model_checks import model_problems
from nemorl_megatron.mtp_config import MTP_METRICS, MtpConfig, mtp_problems
from nemorl_megatron.stages import Split

if TYPE_CHECKING:
    from nemorl.contracts import GenerationBackend, Head, TrainingBackend
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import WeightHandle

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""transformers' names of the rotary scalings that ``rope`` computes."""
AttentionName = Literal["auto", "sdpa", "transformer_engine"]
LayoutName = Literal["auto", "padded", "packed", "shared"]


class MegatronConfig(RankBackendConfig):
    """Train a Hugging Face model with megatron-core, spread over many devices in several ways at once."""

    supports: ClassVar[frozenset[TrainingCapability]] = RankBackendConfig.supports | {"routes"}
    summary: ClassVar[str] = "megatron-core training: tensor, pipeline, context and expert parallelism"
    requires_modules: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors", "megatron.core")
    install_hint: ClassVar[str] = "pip install nemorl-megatron"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {**RankBackendConfig.metrics, **MTP_METRICS}

    pipeline_parallel_size: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Stages that the layers are divided into, each on ranks of its own. Raise it when tensor parallelism would have
    to leave the node."""
    virtual_pipeline_parallel_size: Annotated[int | None, RESUMABLE] = Field(None, ge=2)
    """Parts of each stage, visited in turn: shorter idle times between stages for more communication. Unset: one.
    Needs a pipeline, and layers that divide by stages times parts."""
    layers_in_first_stage: Annotated[int | None, RESUMABLE] = Field(None, ge=1)
    """Layers of the first stage, where layers do not divide evenly or the embedding leaves room for fewer. Unset: as
    many as the stages between have."""
    layers_in_last_stage: Annotated[int | None, RESUMABLE] = Field(None, ge=1)
    """Layers of the last stage, which also has the output head. Unset: as many as the stages between have."""
    embedding_counts_as_layer: Annotated[bool, RESUMABLE] = False
    """The first stage has one layer less, for the embedding; layers and embedding together divide evenly."""
    head_counts_as_layer: Annotated[bool, RESUMABLE] = False
    """The last stage has one layer less, for the output head."""
    context_parallel_size: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Ranks that share the tokens of each sequence. Raise it when one sequence does not fit into memory."""
    expert_parallel_size: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Ranks that the experts of each mixture-of-experts layer are divided over; taken from the data-parallel ranks."""
    expert_tensor_parallel_size: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Ranks that share one expert. 1 is fastest unless a single expert does not fit on a device."""
    sequence_parallel: Annotated[bool, RESUMABLE] = True
    """With tensor parallelism, also split norms and residuals along the sequence: less memory, same communication.
    Mixtures of experts need it under tensor parallelism."""
    distributed_optimizer: Annotated[bool, RESUMABLE] = True
    """Divide optimizer state and master weights over the data-parallel ranks instead of copying them to each."""
    freeze_moe_router: bool = False
    """Do not train the routers of mixtures of experts: tokens keep going to the experts that they went to."""
    layout: Annotated[LayoutName, RESUMABLE] = "auto"
    """How sequences become rows. ``padded``: one row each, of similar length together. ``packed``: all of a microbatch
    in one row. ``shared``: also compute tokens that they have in common (the prompt of a group, turns before a branch)
    once; it takes full causal attention, and neither context parallelism nor parts of stages. ``auto``: shared where
    that saves more than 1.2 times the tokens, else packed, else padded, as the model, once it is built, computes the
    same states so."""
    attention: Annotated[AttentionName, RESUMABLE] = "auto"
    """Attention kernel. ``sdpa``: PyTorch's. ``auto``: Transformer Engine's on CUDA where it is installed and computes
    what the model asks for, else PyTorch's."""

    mtp: MtpConfig | None = None
    """Train the MTP layers of the model's files, which predict tokens further ahead, for speculative decoding
    (``generation.backend.speculative`` of vLLM). Unset: they are neither read nor exported. Log-probs of the policy
    are the same with them and without."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.virtual_pipeline_parallel_size is not None and self.pipeline_parallel_size == 1:
            yield ConfigIssue(
                "virtual_pipeline_parallel_size",
                "there is no pipeline whose stages could be divided",
                "raise pipeline_parallel_size, or remove virtual_pipeline_parallel_size",
            )
        yield from self._split_problems()

    def _split_problems(self) -> Iterator[ConfigIssue]:
        sizes = [name for name in ("layers_in_first_stage", "layers_in_last_stage") if getattr(self, name) is not None]
        counted = [name for name in ("embedding_counts_as_layer", "head_counts_as_layer") if getattr(self, name)]
        if self.pipeline_parallel_size == 1:
            for name in (*sizes, *counted):
                fix = f"raise pipeline_parallel_size, or remove {name}"
                yield ConfigIssue(name, "there is no pipeline whose layers could be divided", fix)
        elif sizes and counted:
            yield ConfigIssue(counted[0], f"{sizes[0]} says already how many layers an end has", "keep one of them")

    @property
    def split(self) -> Split:
        """How layers are divided over the stages."""
        return Split(
            self.layers_in_first_stage,
            self.layers_in_last_stage,
            self.embedding_counts_as_layer,
            self.head_counts_as_layer,
        )

    def ranks_per_copy(self, policy: PolicyConfig) -> int:
        return policy.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    def data_shards(self, policy: PolicyConfig, world_size: int) -> tuple[int, ...]:
        # Ranks are numbered tensor, context, data, pipeline: a stage is a run of neighbours, a copy is not.
        stage = world_size // self.pipeline_parallel_size
        width = policy.tensor_parallel_size * self.context_parallel_size
        return tuple(rank % stage // width for rank in range(world_size))

    def rank_problems(self, policy: PolicyConfig, world_size: int) -> Iterator[ConfigIssue]:
        yield from super().rank_problems(policy, world_size)
        if policy.lora is not None and self.router.bias_update_rate:
            yield ConfigIssue(
                "backend.router.bias_update_rate",
                "with adapters the base stays as it is, and the bias that chooses experts is a part of it",
                "set it to 0, or remove lora",
            )
        yield from rope_problems(policy, "hf_config_overrides")
        yield from tensor_parallel_problems(policy, policy.tensor_parallel_size, "tensor_parallel_size")
        whole_sequences = policy.tensor_parallel_size > 1 and not self.sequence_parallel
        if policy.lora is not None and policy.lora.dropout > 0 and whole_sequences:
            yield ConfigIssue(
                "lora.dropout",
                "tensor-parallel ranks that all have whole sequences would each drop other inputs of the same adapters",
                "set it to 0, or backend.sequence_parallel: true",
            )
        together = self.expert_parallel_size * self.expert_tensor_parallel_size * self.pipeline_parallel_size
        if world_size % together:
            yield ConfigIssue(
                "backend.expert_parallel_size",
                f"{self.expert_parallel_size} expert-parallel * {self.expert_tensor_parallel_size} "
                f"expert-tensor-parallel * {self.pipeline_parallel_size} pipeline-parallel ranks do not divide "
                f"{world_size} training processes",
                "lower it, or raise cluster.gpus_per_node (workers_per_node on the CPU)",
            )
        yield from model_problems(policy, self)
        yield from mtp_problems(policy, self)

    def build(
        self, policy: TrainingOptions, worker: WorkerContext, *, reference: bool, head: Head = "language_model"
    ) -> TrainingBackend:
        with _quietly():
            from nemorl_megatron.training import MegatronBackend

            return MegatronBackend(policy, worker, self, reference=reference, head=head)

    def training_plan(self) -> TrainingPlan:
        from nemorl_megatron.describing import MegatronPlan

        return MegatronPlan(self)


class MegatronGenerationConfig(GenerationBackendConfig, PlansEngine):
    """Generate with a megatron-core model: one of its own in one process, or the trainer's where both live together."""

    summary: ClassVar[str] = "Embedded generation with the megatron-core model"
    requires_modules: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors", "megatron.core")
    install_hint: ClassVar[str] = "pip install nemorl-megatron"
    supports: ClassVar[frozenset[GenerationCapability]] = frozenset(
        {"activations", "any_transport", "prompt_logprobs", "receipts", "sleep", "submit"}
    )
    weight_transports: ClassVar[tuple[str, ...]] = ("in_process", "shared_memory", "object_store")
    colocates_with: ClassVar[str | None] = "megatron"

    max_batch_rows: Annotated[int, RESUMABLE] = Field(256, ge=1)
    """Most samples decoded at once; the rest wait for a place. Lower it when memory is short."""
    kv_cache_tokens: Annotated[int, RESUMABLE] = Field(262144, ge=1)
    """Most token positions held at once, over all samples, room for their longest response included. Each takes
    4 * layers * key-value heads * head size bytes in bfloat16 (28 KiB for a 1.5B Qwen2), twice that in float32; over a
    trainer's model each rank holds its layers' and its heads' part of that. With ``engine: rows`` conversations that
    wait for their next turn may hold as many besides."""

    engine: Annotated[Literal["rows", "megatron_core"], RESUMABLE] = "rows"
    """Attention to the tokens so far, and their cache. ``rows``: PyTorch's attention over the kernel's cache, on any
    device. ``megatron_core``: flash-attention over the paged cache of megatron-core's inference engine, on CUDA only:
    rows take memory as they grow, joining and leaving copies nothing. Tested with stand-ins for its kernels, never run
    on CUDA."""

    def policy_problems(self, policy: PolicyConfig, *, device: str, is_attached: bool) -> Iterator[ConfigIssue]:
        yield from rope_problems(policy, "policy.hf_config_overrides")
        on_cuda = device.startswith("cuda")
        if self.engine == "megatron_core" and not has_flash_attention(device):
            yield ConfigIssue(
                "generation.backend.engine",
                "megatron-core's inference engine computes attention with flash-attention on CUDA: "
                + ("it is not installed here" if on_cuda else "the cluster has none"),
                "set engine: rows",
            )
        host = policy.backend
        if not (is_attached and isinstance(host, MegatronConfig)):
            return
        if host.context_parallel_size > 1:
            yield ConfigIssue(
                "policy.backend.context_parallel_size",
                "its ranks see parts of a sequence, and generation in the trainer's processes has whole ones",
                "set it to 1, or choose another generation.backend",
            )
        has_other_kernel = on_cuda and find_spec("transformer_engine") is not None
        if host.attention == "transformer_engine" or (host.attention == "auto" and has_other_kernel):
            yield ConfigIssue(
                "policy.backend.attention",
                "generation in the trainer's processes decodes with PyTorch's attention, and the trainer's model would "
                "have Transformer Engine's",
                "set it to sdpa, or choose another generation.backend",
            )

    def build(
        self, generation: GenerationConfig, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None
    ) -> GenerationBackend:
        with _quietly():
            from nemorl_megatron.alone import AloneGeneration

            return AloneGeneration(policy, worker, weights, self)

    def build_in(
        self, trainer: TrainingBackend, generation: GenerationConfig, policy: PolicyConfig, worker: WorkerContext
    ) -> GenerationBackend:
        from nemorl_megatron.training import MegatronBackend

        assert isinstance(trainer, MegatronBackend), "the kernel builds it where ``colocates_with`` trains"
        return trainer.generator(self)

    def engine_plan(self) -> EnginePlan:
        from nemorl_rl.planning.memory.engines import RowsPlan

        return RowsPlan(self.max_batch_rows, self.kv_cache_tokens, layer_start_s=4e-4, step_start_s=3e-3)


def rope_problems(policy: PolicyConfig, path: str) -> Iterator[ConfigIssue]:
    """Rotary scaling that the policy's overrides ask for and that is not computed here."""
    for key in ("rope_scaling", "rope_parameters"):
        asked = policy.hf_config_overrides.get(key)
        kind = asked.get("rope_type", asked.get("type", "default")) if isinstance(asked, Mapping) else "default"
        if kind not in ROPE_TYPES:
            yield ConfigIssue(
                f"{path}.{key}",
                f"backend megatron computes rotary scaling of type {', '.join(ROPE_TYPES)}, not {kind!r}",
                "train with policy.backend: dtensor and generate with hf or vllm",
            )


def has_flash_attention(device: str) -> bool:
    """Whether its kernels are there for a torch device. Looks for the package, imports nothing."""
    return device.startswith("cuda") and find_spec("flash_attn") is not None


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what megatron-core says of optional libraries, whenever it is imported and a model is built."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
        yield
