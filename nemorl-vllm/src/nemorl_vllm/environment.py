"""vLLM in a process that it shares: what must be set before its import, and what it must leave as it was.

An engine of one device runs inside the worker's process, perhaps beside a trainer. vLLM expects a process to itself: it
seeds every random generator and replaces functions of torch. Here that is undone, and its failures become advice.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from nemorl.contracts.memory import DeviceMemoryError
from nemorl.errors import BackendError, NemorlError

REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process: weights are handed over, not sent
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the sampler is that of runner 1, the only one that CPU and CUDA share
}
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # INFO is a page per engine, WARNING half of one
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a NUMA node per worker is what vLLM wants, and rarely there
}
"""Variables that a user's own environment overrides."""

UNREADABLE = "failed to be inspected"
"""Of a model whose code in vLLM cannot be imported."""
OUT_OF_MEMORY = ("KV cache", "kv cache", "cache blocks", "memory utilization", "out of memory", "Free memory")
"""Parts of the messages with which vLLM reports that memory does not suffice."""


def import_vllm() -> None:
    """Make ``import vllm`` safe and quiet from here on, and have it read its variables anew.

    Once an engine has started in a process, vLLM remembers all of them as they were: the ranks of a later one would
    each take themselves for the only one, and hold the whole model.

    Raises:
        BackendError: vLLM is not installed, or cannot be imported.
    """
    os.environ.update(REQUIRED)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    enable_amx()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about names that vLLM looks through
            import vllm  # noqa: F401
            from vllm.envs import disable_envs_cache
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise BackendError(
                "vLLM is not installed in this environment",
                fix='pip install "nemorl-vllm[cuda]", or "nemorl-vllm[cpu]" on a machine without a GPU',
            ) from error
        raise _explained(error, "be imported") from error
    except Exception as error:
        raise _explained(error, "be imported") from error
    disable_envs_cache()


def enable_amx() -> None:
    """Ask the kernel for the CPU's matrix unit. Without this, small bfloat16 products in vLLM die of SIGILL."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


@contextmanager
def process_state_kept(device: str) -> Iterator[None]:
    """Random generators, thread count and log levels are as before once the block ends; its failures are explained."""
    import numpy

    numbers, arrays = random.getstate(), numpy.random.get_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    levels = {name: logging.getLogger(name).level for name in ("", "transformers", "torch")}
    devices = [torch.device(device).index or 0] if device.startswith("cuda") else []
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    except NemorlError:
        raise
    except Exception as error:
        raise _explained(error, "start") from error
    finally:
        random.setstate(numbers)
        numpy.random.set_state(arrays)
        torch.set_num_threads = set_threads  # vLLM's CPU worker puts one here that does nothing
        torch.set_num_threads(threads)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def undecorated_transformers(*, compiles: bool) -> Iterator[None]:
    """Within it vLLM leaves the classes of transformers as they are.

    Of architectures that vLLM has no code of its own for (OLMo 2, SmolLM3, GPT-NeoX, …) it runs transformers' own, and
    prepares the class for compilation: no such model can be built or called after that, least of all the trainer's. An
    engine that does not compile needs nothing of it.

    Args:
        compiles: The engine compiles its model.

    Raises:
        BackendError: vLLM wants to prepare a class and compiles.
    """
    from vllm.model_executor.models.transformers.base import Base

    decorate = Base._decorate_for_torch_compile

    def refuse_or_skip(model: Base) -> None:
        if compiles:
            name = model._pre_trained_model_classes.decoder.__name__
            raise BackendError(
                f"vLLM would compile transformers' own class {name}, which others in this process use",
                fix="set generation.backend.enforce_eager: true, or generation.backend: hf",
            )

    Base._decorate_for_torch_compile = refuse_or_skip
    try:
        yield
    finally:
        Base._decorate_for_torch_compile = decorate


@contextmanager
def kernels_replaced_once() -> Iterator[None]:
    """Within it vLLM replaces its kernels by those of a CPU, unless an earlier engine of this process has done so.

    It looks for them in all modules, and ends with an AttributeError at those of llvmlite, which numba imports: whoever
    used that before, or an engine that guesses by n-grams (vLLM 0.32, ``triton_utils.dispatcher``).
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    if dispatcher._registry:
        nothing = staticmethod(lambda: None)
        with patch.object(type(current_platform), "register_triton_kernel_overrides", nothing):
            yield
        return
    replace_in_all = dispatcher._rebind_kernels

    def replace_elsewhere(kernels: Any) -> None:
        others = {name: module for name, module in sys.modules.items() if not name.startswith(("llvmlite", "numba"))}
        with patch.object(dispatcher, "sys", SimpleNamespace(modules=others)):
            replace_in_all(kernels)

    with patch.object(dispatcher, "_rebind_kernels", replace_elsewhere):
        yield


def _explained(error: Exception, verb: str) -> BackendError:
    """The error that says what to do about an exception of vLLM."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 10:
        chain.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(chain)
    reason = " ".join(str(error).split())[:600]
    if UNREADABLE in text and find_spec("torchvision") is None:
        fix = f"vLLM's code for this model imports torchvision: install the one built for torch {torch.__version__}"
    elif "torchvision" in text or "torchaudio" in text:
        fix = "torchvision or torchaudio were built for another torch: pip uninstall torchvision torchaudio torchcodec"
    elif any(part in text for part in OUT_OF_MEMORY):
        return DeviceMemoryError(
            f"vLLM could not {verb}: {type(error).__name__}: {reason}",
            fix="memory does not suffice: set generation.backend.kv_cache_gib (or gpu_memory_utilization), lower "
            "policy.max_sequence_tokens, or free memory that others hold",
        )
    elif isinstance(error, TypeError) and "EngineArgs" in text:
        fix = "generation.backend.engine_args names an argument that this vLLM does not have"
    else:
        fix = "the traceback below names the cause; VLLM_LOGGING_LEVEL=INFO in the environment shows vLLM's own report"
    return BackendError(f"vLLM could not {verb}: {type(error).__name__}: {reason}", fix=fix)
