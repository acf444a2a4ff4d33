"""LoRA adapters that come apart from the model: vLLM's own LoRA, with one adapter that every update replaces.

The adapter is handed over as a folder of peft in the machine's memory, which each process of the engine reads. Its id
stays the same, so that sequences in progress go on with the new one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError
from nemorl_base.files import replace_text
from nemorl_base.left_overs import mark
from nemorl_tensors.engines.buckets import CountedBuckets
from safetensors.torch import save_file

if TYPE_CHECKING:
    from nemorl.config.models import LoraConfig
    from nemorl.weights import WeightHandle

NAME, NUMBER = "policy", 1
"""vLLM's name and id of the adapter."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can make room for."""
MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""


def engine_arguments(lora: LoraConfig) -> dict[str, Any]:
    """Arguments of an engine that has room for one adapter.

    Raises:
        BackendError: The rank is beyond what vLLM knows.
    """
    room = next((rank for rank in RANKS if rank >= lora.rank), None)
    if room is None:
        raise BackendError(
            f"policy.lora.rank is {lora.rank}, and vLLM applies adapters of at most {RANKS[-1]}",
            fix="set rollouts.adapters: merged",
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


class AdapterFolder:
    """The adapter on its way into an engine."""

    def __init__(self, lora: LoraConfig) -> None:
        self._lora = lora
        self._place = TemporaryDirectory(prefix="nemorl-adapter-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self._folder = Path(self._place.name)
        mark(self._folder)

    def request(self, *, replaces: bool = False) -> Any:
        """A ``vllm.lora.request.LoRARequest``: of generation, or to load what the folder holds now."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(NAME, NUMBER, str(self._folder), load_inplace=replaces)

    def write(self, handle: WeightHandle) -> int:
        """Fetch an adapter. vLLM still has the one before.

        Returns:
            Bytes of its tensors.

        Raises:
            WeightsLostError: The trainer is gone.
        """
        buckets = CountedBuckets(handle.buckets())
        tensors = {name: tensor.detach() for bucket in buckets for name, tensor in bucket.items()}
        modules = {name.rsplit(".", 3)[-3] for name in tensors}
        settings: dict[str, Any] = {"peft_type": "LORA", "r": self._lora.rank, "lora_alpha": self._lora.alpha}
        settings["target_modules"] = sorted(modules)
        replace_text(self._folder / "adapter_config.json", json.dumps(settings))
        # A file of its own: vLLM may have the one before mapped into its memory.
        draft = self._folder / "draft"
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, draft)
        draft.replace(self._folder / "adapter_model.safetensors")
        return buckets.nbytes

    def close(self) -> None:
        """Remove the folder. Calling it twice is harmless."""
        self._place.cleanup()
