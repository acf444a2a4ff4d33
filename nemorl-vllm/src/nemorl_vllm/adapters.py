"""LoRA adapters that come apart from the model, applied by vLLM's own LoRA.

Requests that name no version share one adapter, which every update replaces. Its id stays the same, so that sequences
in progress go on with the new one. Where several versions are held (option ``snapshots``), each of them is an adapter
of its own besides. They are handed over as a folder of peft in the machine's memory, which each process of the engine
reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nemorl.base.files.atomic import replace_text
from nemorl.base.files.owned_folders import mark
from nemorl.errors import BackendError
from nemorl_rl.serving.snapshots import version_error
from nemorl_tensors.engines.buckets import CountedBuckets
from safetensors.torch import save_file

from nemorl_vllm.config import ADAPTER_RANKS, adapter_room

if TYPE_CHECKING:
    from nemorl.config.models import LoraConfig
    from nemorl.weights import WeightHandle
    from nemorl_media.family import Family

NEWEST = 1
"""vLLM's id of the adapter that every update replaces. That of version v is v + 2."""
MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""


def engine_arguments(lora: LoraConfig, slots: int) -> dict[str, Any]:
    """Arguments of an engine that has room for so many adapters.

    Raises:
        BackendError: The rank is beyond what vLLM knows.
    """
    room = adapter_room(lora.rank)
    if room is None:
        raise BackendError(
            f"policy.lora.rank is {lora.rank}, and vLLM applies adapters of at most {ADAPTER_RANKS[-1]}",
            fix="set rollouts.adapters: merged",
        )
    return {"enable_lora": True, "max_loras": slots, "max_lora_rank": room}


class Adapters:
    """Those that an engine has, and the folder in which they come."""

    def __init__(self, lora: LoraConfig, snapshots: int, family: Family | None = None) -> None:
        """
        Args:
            lora: Their form.
            snapshots: Most versions that are held.
            family: Of a model that sees or hears.
        """
        self._lora, self._limit = lora, snapshots
        self._unread = () if family is None else (*family.towers, *family.connectors)
        """Parts of the model whose adapters vLLM would leave out without a word."""
        self._held: list[int] = []
        """Versions, the newest at the end."""
        self._place = TemporaryDirectory(prefix="nemorl-adapter-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self._folder = Path(self._place.name)
        mark(self._folder)

    @property
    def versions(self) -> Sequence[int]:
        """Those that are held, the newest at the end."""
        return self._held

    def request(self, version: int | None) -> Any:
        """The ``vllm.lora.request.LoRARequest`` of a request that names a version, or none.

        Raises:
            VersionNotHeldError: The engine does not have it.
        """
        if version is not None and version not in self._held:
            raise version_error(version, self._held)
        return self._lora_request(self._number(version))

    def load(self, engine: Any, version: int) -> int | None:
        """Have the engine read the folder: the newest version from now on.

        Returns:
            The version that was dropped because there is no room for one more.
        """
        left = [held for held in self._held if held != version]
        dropped = left.pop(0) if len(left) == self._limit else None
        # One that does not load is not held: vLLM would look for it in the folder, which has the next one by then.
        self._held = left
        if dropped is not None and self._limit > 1:
            engine.remove_lora(self._number(dropped))
        for number in {self._number(None), self._number(version)}:
            engine.add_lora(self._lora_request(number, replaces=True))
        self._held = [*left, version]
        return dropped

    def _number(self, version: int | None) -> int:
        """vLLM's id of a version's adapter."""
        return NEWEST if version is None or self._limit == 1 else NEWEST + 1 + version

    def _lora_request(self, number: int, *, replaces: bool = False) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"policy-{number}", number, str(self._folder), load_inplace=replaces)

    def write(self, handle: WeightHandle) -> int:
        """Fetch an adapter. vLLM still has the one before.

        Returns:
            Bytes of its tensors.

        Raises:
            WeightsLostError: The trainer is gone.
            BackendError: It adapts the part of the model that sees or hears.
        """
        buckets = CountedBuckets(handle.buckets())
        tensors = {name: tensor.detach() for bucket in buckets for name, tensor in bucket.items()}
        unread = next((name for name in tensors if any(f".{part}." in name for part in self._unread)), None)
        if unread is not None:
            raise BackendError(
                f"an adapter of {unread.partition('.lora_')[0]} came, and vLLM applies adapters to the language model "
                "alone",
                fix="set rollouts.adapters: merged, or policy.lora.target_modules to layers of the language model",
            )
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
