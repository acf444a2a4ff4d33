"""Building a vLLM engine for a policy, and taking it down without harm to others of the same process."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import BackendError
from nemorl_tensors.engines.model_config import read_model_config

from nemorl_vllm.adapters import engine_arguments
from nemorl_vllm.architectures import LATENT_ATTENTION, USE_HF
from nemorl_vllm.config import CPU_KV_CACHE_GIB
from nemorl_vllm.data_parallel import DataParallelEngine, rank_configs
from nemorl_vllm.environment import import_vllm, kernels_replaced_once, process_state_kept, undecorated_transformers
from nemorl_vllm.kept_layers import rounding

if TYPE_CHECKING:
    from nemorl.config.models import LoraConfig, PolicyConfig
    from nemorl.resources.worker import WorkerContext

    from nemorl_vllm.config import VLLMConfig
    from nemorl_vllm.speculative_config import SpeculativeConfig

GIB = 1024**3
CPU_BATCH_TOKENS = 2048
"""Most tokens of one step there, longer prompts apart."""

QUANTIZATION = {None: None, "fp8": "fp8_per_block", "mxfp8": "mxfp8"}
"""vLLM's name of what rounds weights as they are loaded, by ``VLLMConfig.precision``."""
FP8_CAPABILITIES = {"fp8": (8, 9), "mxfp8": (10, 0)}
"""Of the first GPUs that multiply so (Ada and Hopper; Blackwell)."""

WEIGHT_TRANSFER = "nemorl"
"""Our engine of vLLM's weight-transfer interface (``transfer``), which the worker extension registers."""


def build_engine(
    policy: PolicyConfig,
    worker: WorkerContext,
    options: VLLMConfig,
    *,
    max_model_len: int,
    empty: bool,
    further: Mapping[str, Any],
    lora: LoraConfig | None = None,
) -> Any:
    """A ``vllm.v1.engine.llm_engine.LLMEngine`` that runs in the calling thread, whenever ``step()`` is called; or
    several that step together (``DataParallelEngine``).

    Args:
        policy: The model and its precision.
        worker: Device and seed.
        options: The backend's options.
        max_model_len: Most tokens of prompt and response.
        empty: Leave the weights to be loaded later, instead of reading them from disk.
        further: Arguments of ``vllm.EngineArgs`` that the model asks for.
        lora: Make room for an adapter like this.

    Raises:
        BackendError: vLLM cannot start; says why.
    """
    import_vllm()
    _check_device(worker.device)
    for precision in (options.precision, options.cache_precision):
        if precision is not None and worker.device.startswith("cuda"):
            _check_fp8(worker.device, precision)
    with process_state_kept(worker.device), _few_collections():
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        arguments = engine_args(
            policy, worker, options, max_model_len=max_model_len, empty=empty, further=further, lora=lora
        )
        configs = rank_configs(arguments, options.data_parallel_size)
        config = configs[0]
        if worker.device == "cpu":
            _check_cpu(policy.model_name, config.model_config, lora)
        for each in configs:
            set_device(each, worker.device)
        if config.model_config.is_moe:
            _ensure_expert_group()
        elif lora is not None and not lora.head and lora.target_modules != "all-linear":
            # Heads that have room for an adapter fail on log-probs of prompts: it counts sampled tokens alone.
            config.lora_config.target_modules = list(lora.target_modules)
        with kernels_replaced_once(), undecorated_transformers(compiles=not config.model_config.enforce_eager):
            start = partial(
                LLMEngine, executor_class=Executor.get_class(config), log_stats=False, multiprocess_mode=False
            )
            builds = [partial(start, vllm_config=each) for each in configs]
            engine = builds[0]() if len(builds) == 1 else DataParallelEngine(builds)
        engine.collective_rpc("nemorl_install_sampler")
        engine.collective_rpc("nemorl_make_pipeline_buffers")
        if config.parallel_config.nnodes > 1:
            engine.collective_rpc("nemorl_end_with_parent")
    return engine


def _check_cpu(name: str, model: Any, lora: LoraConfig | None) -> None:
    """
    Raises:
        BackendError: vLLM's code for such a model (``vllm.config.ModelConfig``) is for GPUs alone.
    """
    if model.use_mla:
        raise BackendError(f"model {name!r}: {LATENT_ATTENTION}", fix=USE_HF)
    if model.is_moe and lora is not None:
        raise BackendError(
            "vLLM 0.32 on the CPU applies no adapters to mixtures of experts: its code for them is Triton's",
            fix="set rollouts.adapters: merged",
        )


def set_device(config: Any, device: str) -> None:
    """Have an engine's ``vllm.config.VllmConfig`` name the GPU of this process."""
    if device.startswith("cuda:"):
        config.device_config.device = torch.device(device)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Within it, garbage is looked for among what is new only.

    vLLM looks for garbage five times while it starts, each time through all that torch, vLLM and transformers have made
    (a third of a second), and ends by exempting everything from collection. Here that is done once, before.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    except BaseException:
        gc.unfreeze()
        raise


def engine_args(
    policy: PolicyConfig,
    worker: WorkerContext,
    options: VLLMConfig,
    *,
    max_model_len: int,
    empty: bool,
    further: Mapping[str, Any] = MappingProxyType({}),
    lora: LoraConfig | None = None,
) -> Any:
    """The settings of the engine, as ``vllm.EngineArgs``."""
    from vllm import EngineArgs
    from vllm.config import WeightTransferConfig

    on_cpu = worker.device == "cpu"
    kv_cache_gib = options.kv_cache_gib or (CPU_KV_CACHE_GIB if on_cpu else None)
    further = {**further}
    if on_cpu:
        # After the first part of a prompt vLLM takes back the random number it drew for it, which generators of the CPU
        # cannot do. So a prompt is computed whole there, whatever its length.
        further |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(CPU_BATCH_TOKENS, max_model_len)}
    if lora is not None:
        further |= engine_arguments(lora, options.adapter_slots)
    further |= rounding(QUANTIZATION[options.precision], options.kept_layers, policy)
    return EngineArgs(
        model=policy.model_name,
        tokenizer=policy.tokenizer.name,
        hf_overrides=partial(_overridden, policy) if policy.hf_config_overrides else {},
        dtype=policy.precision,
        speculative_config=None if options.speculative is None else _speculation(options.speculative),
        seed=worker.seed % 2**32,
        max_model_len=max_model_len,
        load_format="dummy" if empty else "auto",
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        enable_expert_parallel=options.expert_parallel,
        distributed_executor_backend="mp" if options.devices_per_replica > 1 else "uni",
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_dtype=options.cache_precision or "auto",
        kv_cache_memory_bytes=None if kv_cache_gib is None else int(kv_cache_gib * GIB),
        enforce_eager=on_cpu if options.enforce_eager is None else options.enforce_eager,
        max_num_seqs=options.max_num_seqs,
        enable_sleep_mode=worker.leaves_memory and not on_cpu,
        enable_prefix_caching=options.prefix_caching,
        async_scheduling=False,
        worker_extension_cls="nemorl_vllm.worker.WorkerExtension",
        weight_transfer_config=WeightTransferConfig(backend=WEIGHT_TRANSFER),
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **{**further, **options.engine_args},
    )


def _speculation(options: SpeculativeConfig) -> dict[str, Any]:
    """vLLM's settings of what guesses."""
    if not options.has_weights:
        return options.model_dump(exclude={"model", "keep_fresh"})
    return {
        **options.model_dump(include={"method", "model", "num_speculative_tokens"}, exclude_none=True),
        "draft_sample_method": "probabilistic",  # the likeliest token alone is a poor guess at temperature 1
    }


def _overridden(policy: PolicyConfig, _stored: Any) -> Any:
    """The config that the trainer's model has too, in place of the stored one: vLLM's own way with a mapping would lose
    the ``rope_theta`` beside a new ``rope_scaling``."""
    return read_model_config(policy)


def begin_observation(engine: Any) -> None:
    """Have the worker record what the model computes.

    Raises:
        BackendError: The engine computes in a way that cannot be recorded.
    """
    config = engine.vllm_config
    problem, fix = None, ""
    if not config.model_config.enforce_eager:
        problem, fix = "compiles its model", "set generation.backend.enforce_eager: true"
    elif config.parallel_config.world_size_across_dp > 1:
        problem, fix = "has its model on several devices", "set tensor_parallel_size of generation.backend to 1"
    elif config.speculative_config is not None:
        problem, fix = "also computes tokens that it rejects", "remove generation.backend.speculative"
    if problem is not None:
        raise BackendError(f"the activations of this engine cannot be recorded: vLLM {problem}", fix=fix)
    engine.reset_prefix_cache()
    engine.collective_rpc("nemorl_observe")


def close_engine(engine: Any) -> None:
    """Stop the engine's workers and let go of its memory.

    vLLM's own shutdown also destroys the process groups of the whole process, on which other engines in it depend.
    """
    if isinstance(engine, DataParallelEngine):
        engine.close(close_engine)
        return
    client = engine.engine_core
    client._finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    engine.renderer.shutdown()
    gc.unfreeze()  # the engine had everything that existed at its start exempted from collection


def _ensure_expert_group() -> None:
    """Give this process the group that mixtures ask for.

    vLLM makes all groups of a process with its first engine there, this one only if that engine is of a mixture.
    """
    from vllm.distributed import parallel_state as vllm_groups

    if vllm_groups.model_parallel_is_initialized() and vllm_groups._EP is None:
        world = vllm_groups.get_world_group()
        backend = torch.distributed.get_backend(world.device_group)
        vllm_groups._EP = vllm_groups.init_model_parallel_group(
            [world.ranks], world.local_rank, backend, group_name="ep"
        )


def _check_fp8(device: str, precision: str) -> None:
    capability, first = torch.cuda.get_device_capability(device), FP8_CAPABILITIES[precision]
    if capability < first:
        raise BackendError(
            f"{torch.cuda.get_device_name(device)} does not multiply in {precision} (compute capability "
            f"{capability[0]}.{capability[1]}, it begins at {first[0]}.{first[1]})",
            fix="remove generation.backend.precision, or use newer GPUs",
        )


def _check_device(device: str) -> None:
    from vllm.platforms import current_platform

    built_for, wanted = current_platform.device_type, device.partition(":")[0]
    if built_for != wanted:
        extra = {"cpu": "cpu", "cuda": "cuda"}.get(wanted, wanted)
        raise BackendError(
            f"the vLLM installed here runs on {built_for or 'no device of this machine'}, this worker on {device}",
            fix=f'pip install "nemorl-vllm[{extra}]" in an environment of its own, or set cluster.device',
        )
