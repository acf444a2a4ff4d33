"""Low-rank adapters (arXiv:2106.09685) on a Hugging Face model, by peft.

# O = outputs, I = inputs of a linear layer, R = rank of the adapters

The base weights stay frozen and in place, so the frozen reference policy is the same model with adapters off, and the
policy as a plain model is base + adapter, layer by layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nemorl.contracts import AdaptedModules, AdapterShape
from nemorl.errors import BackendError, CheckpointError, UsageError, boundary
from nemorl_tensors.engines.buckets import in_buckets
from nemorl_tensors.logprobs import LowRank
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nemorl_dtensor.model_quantized import decoded, packed_layers
from nemorl_dtensor.ranks import like, local, offsets, whole

if TYPE_CHECKING:
    from nemorl.config.models import LoraConfig
    from transformers import PreTrainedModel

ADAPTER = "default"
PEFT_PREFIX = "base_model.model."
"""Of every name in a file of adapters."""


class Adapters:
    """The adapters of one model."""

    def __init__(self, model: PreTrainedModel, lora: LoraConfig, seed: int, *, beside_text: Sequence[str] = ()) -> None:
        """Insert them into ``model``. B starts at zero, so the policy starts at the base model.

        Args:
            model: Plain.
            lora: How many, where.
            seed: Of what is drawn.
            beside_text: Modules that see or hear, which ``all-linear`` leaves as they are.
        """
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model

        named = lora.target_modules
        targets = all_linear(model, beside_text) if named == "all-linear" else list(named)
        settings = PeftConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]
            lora_dropout=lora.dropout,
            target_modules=[*targets, _head_name(model)] if lora.head else targets,
            task_type="CAUSAL_LM",
        )
        with boundary("peft, adding LoRA adapters,"), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self._peft: Any = get_peft_model(model, settings)  # type: ignore[arg-type]
        self._model = model
        self._packed = packed_layers(model) if lora.base == "nf4" else {}
        self._layers = {name: module for name, module in model.named_modules() if _is_adapted(module)}
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._head: Any = next((layer for layer in self._layers.values() if layer is head), None)
        if self._head is not None and not lora.head:
            raise BackendError(
                "policy.lora.target_modules names the output head, which is asked for apart from other layers",
                fix="leave it out of target_modules and set policy.lora.head: true",
            )
        self._shape = AdapterShape(lora.rank, lora.alpha, seed, frozenset(map(self._kind, self._layers)))
        if not all(_is_linear(layer) for layer in self._layers.values()):
            raise BackendError(
                "training backend dtensor adapts linear layers only: transformers keeps experts of a mixture, and its "
                "routers, as parameters of another kind",
                fix="set policy.lora.target_modules: all-linear (of a mixture: attention, and what all tokens pass), "
                "or name other layers",
            )
        for layer in self._layers.values():
            _compute_in_the_models_precision(layer)
        self._dropouts = [
            dropout
            for layer in self._layers.values()
            for dropout in layer.lora_dropout.values()  # type: ignore[union-attr,operator]
        ]

    def disabled(self) -> AbstractContextManager[Any]:
        """Within it the model is the reference policy."""
        context: AbstractContextManager[Any] = self._peft.disable_adapter()
        return context

    def train(self, mode: bool) -> None:
        """Turn the adapters' own dropout on or off."""
        for dropout in self._dropouts:
            dropout.train(mode)

    @property
    def on_head(self) -> Callable[[Tensor], LowRank | None] | None:
        """What they add to the output of the head, of its input: [..., R] and [V, R]. ``None`` where they leave it."""
        return None if self._head is None else partial(_low_rank, self._head)

    @property
    def shape(self) -> AdapterShape:
        """What is scaled and published: other layers and ranks than these have zeros."""
        return self._shape

    @shape.setter
    def shape(self, shape: AdapterShape) -> None:
        self._shape = shape
        for layer in self._layers.values():
            layer.scaling[ADAPTER] = shape.alpha / shape.rank  # type: ignore[index,operator,union-attr]

    def drawn(self, shape: AdapterShape) -> dict[str, Tensor]:
        """Whole factors of a new one, by parameter name: A as peft draws it and zeros in the ranks beyond; B zero.

        Rows of zeros stay zeros: their gradient is a product with columns of zeros.

        Raises:
            UsageError: It is larger than what is in place.
        """
        own = AdapterShape(self._peft.peft_config[ADAPTER].r, modules=frozenset(map(self._kind, self._layers)))
        beyond = sorted(shape.modules - own.modules)
        if shape.rank > own.rank or beyond:
            raise UsageError(
                f"an adapter of rank {shape.rank} on {', '.join(sorted(shape.modules))} does not fit into adapters of "
                f"rank {own.rank} on {', '.join(sorted(own.modules))}",
                fix="ask for less, or build the backend with more: policy.lora.rank, target_modules, head",
            )
        generator = torch.Generator().manual_seed(shape.seed)
        found: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            layer, is_factor, factor = name.rpartition(".lora_")
            if not is_factor:
                continue
            found[name] = torch.zeros(parameter.shape)
            if factor.startswith("A") and self._kind(layer) in shape.modules:
                nn.init.kaiming_uniform_(found[name][: shape.rank], a=math.sqrt(5), generator=generator)
        return found

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Whole factors that :meth:`save` wrote, by parameter name, with zeros for what its shape lacks.

        Raises:
            CheckpointError: They are of another shape than this.
        """
        file = folder / "adapter_model.safetensors"
        if not file.is_file():
            raise CheckpointError(f"{file} is missing", fix="give a folder that adapters were saved in")
        saved = load_file(file)
        own = {PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): (name, p) for name, p in self._own_parameters()}
        shapes = {name: tuple(self._trimmed(key, p.detach()).shape) for name, (key, p) in own.items()}
        if {name: tuple(tensor.shape) for name, tensor in saved.items()} != shapes:
            raise CheckpointError(
                f"{folder} has adapters of other layers or of another rank than {self._shape.rank} on "
                f"{', '.join(sorted(self._shape.modules))}",
                fix="load them into an adapter of the shape that was saved",
            )
        found = {name: torch.zeros(p.shape) for name, p in self._model.named_parameters() if ".lora_" in name}
        for name, tensor in saved.items():
            self._trimmed(own[name][0], found[own[name][0]]).copy_(tensor)
        return found

    def _kind(self, layer: str) -> AdaptedModules:
        if self._layers[layer] is self._head:
            return "head"
        return "attention" if "attn" in layer or "attention" in layer else "mlp"

    def tensors(self) -> dict[str, Tensor]:
        """A copy of the adapters' own parameters, by name."""
        return {name: p.detach().clone() for name, p in self._model.named_parameters() if ".lora_" in name}

    def _own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the layers that its shape names."""
        for name, parameter in self._model.named_parameters():
            layer, is_factor, _ = name.rpartition(".lora_")
            if is_factor and self._kind(layer) in self._shape.modules:
                yield name, parameter

    def _trimmed(self, name: str, factor: Tensor) -> Tensor:
        """Without the zeros beyond its rank."""
        return factor[: self._shape.rank] if ".lora_A." in name else factor[:, : self._shape.rank]

    def published(self) -> Iterator[Mapping[str, Tensor]]:
        """Buckets of whole factors under the names of peft's files. Collective where the model is sharded."""
        own = ((name, self._trimmed(name, whole(p.detach()))) for name, p in self._own_parameters())
        yield from in_buckets(({PEFT_PREFIX + n.replace(f".{ADAPTER}.", "."): t}, t.nbytes) for n, t in own)

    def save(self, folder: Path, tensors: Mapping[str, Tensor], base: str) -> None:
        """Write the folder that ``peft.PeftModel.from_pretrained`` loads.

        Args:
            folder: Created if needed.
            tensors: Of :meth:`published`, on the CPU.
            base: Hugging Face name or folder of the model that they adapt.
        """
        settings = copy.deepcopy(self._peft.peft_config[ADAPTER])
        settings.base_model_name_or_path, settings.inference_mode = base, True
        settings.r, settings.lora_alpha = self._shape.rank, self._shape.alpha
        settings.target_modules = sorted(name for name in self._layers if self._kind(name) in self._shape.modules)
        folder.mkdir(parents=True, exist_ok=True)
        settings.save_pretrained(folder)
        save_file({**tensors}, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    def merged(self, name: str, tensor: Tensor) -> Tensor | None:
        """One tensor of the adapted model as the plain model has it, sharded as it is. Collective where it is.

        Args:
            name: In the adapted model's ``state_dict``.
            tensor: Its value there.

        Returns:
            Base + adapter where there is one; ``None`` for the adapter's own tensors.
        """
        owner, _, leaf = name.rpartition(".base_layer.")
        if not owner and ".lora_" in name:
            return None
        value = decoded(self._packed[name]) if name in self._packed else tensor
        return self._with_delta(owner, value) if owner and leaf == "weight" else value

    def merged_shape(self, name: str, tensor: Tensor) -> tuple[int, ...] | None:
        """That of what :meth:`merged` returns, without computing it. A packed layer's tensor has another one."""
        owner, _, _ = name.rpartition(".base_layer.")
        if not owner and ".lora_" in name:
            return None
        layer: Any = self._packed.get(name)
        return tuple(tensor.shape) if layer is None else (layer.out_features, layer.in_features)

    @torch.no_grad()
    def _with_delta(self, name: str, weight_OI: Tensor) -> Tensor:
        layer: Any = self._layers[name]
        a_RI, b_OR = (whole(part[ADAPTER].weight).float() for part in (layer.lora_A, layer.lora_B))
        base = local(weight_OI)
        (first, first_in), (rows, columns) = offsets(weight_OI), base.shape
        if layer.fan_in_fan_out:  # some architectures (GPT-2) keep weights as [I, O]
            delta = (b_OR[first_in : first_in + columns] @ a_RI[:, first : first + rows]).t()
        else:
            delta = b_OR[first : first + rows] @ a_RI[:, first_in : first_in + columns]
        return like(weight_OI, (base.float() + delta * layer.scaling[ADAPTER]).to(base.dtype))


def _low_rank(layer: Any, states: Tensor) -> LowRank | None:
    if layer.disable_adapters:
        return None
    low: Tensor = layer.lora_A[ADAPTER](layer.lora_dropout[ADAPTER](states)) * layer.scaling[ADAPTER]
    return low, layer.lora_B[ADAPTER].weight


def _head_name(model: PreTrainedModel) -> str:
    """Of the output head.

    Raises:
        BackendError: It has none of its own.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        raise BackendError(
            f"{type(model).__name__} has no output head but its embedding, which adapters of the head would change too",
            fix="set policy.lora.head: false",
        )
    (name,) = [str(name) for name, module in model.named_modules() if module is head]
    return name


class RoundedLinear(nn.Linear):
    """A linear layer whose weight is rounded to its input's precision for the product, as autocast does."""

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.weight.to(states.dtype))


def _compute_in_the_models_precision(layer: Any) -> None:
    """Let float32 adapters of a bfloat16 model multiply in bfloat16.

    peft would widen the layer's input to float32 instead: every activation twice, and products that tensor cores do
    not take. The parameters, their gradients and the optimizer's updates stay float32.
    """
    layer.cast_input_dtype_enabled = False
    for factors in (layer.lora_A, layer.lora_B):
        factors[ADAPTER].__class__ = RoundedLinear


def all_linear(model: PreTrainedModel, beside_text: Sequence[str] = ()) -> list[str]:
    """Names of the linear layers that every token passes: not the output head, nothing in ``beside_text``, and of a
    mixture neither experts nor what chooses them.

    peft's own ``all-linear`` takes experts and routers in, and reads some families' dense and shared layers as experts,
    since they were called alike in transformers 4: those it cannot adapt, here or where the folder is loaded.
    """
    from peft import LoraConfig as PeftConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    found = {
        name: name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and not _chooses(name)
        if not any(name.startswith(f"{part}.") for part in beside_text)
    }
    read = PeftConfig(target_modules=sorted(set(found.values())))
    convert_peft_config_for_transformers(read, model, None)
    assert read.target_modules is not None, "it was given"
    return [name for name, leaf in found.items() if leaf in read.target_modules]


def _chooses(name: str) -> bool:
    """The layer is a router, or a gate that weighs what others computed."""
    return name.endswith("gate") or "router" in name.split(".")


def plain_name(name: str) -> str:
    """The Hugging Face name of a base model's tensor, given its name in the adapted model."""
    return name.replace(".base_layer.", ".")


def _is_adapted(module: nn.Module) -> bool:
    from peft.tuners.lora import LoraLayer

    return isinstance(module, LoraLayer)


def _is_linear(layer: Any) -> bool:
    """``Linear`` of peft, or of a base in 4 bits."""
    from peft.tuners.lora import Linear

    return isinstance(layer, Linear) or isinstance(layer.base_layer, nn.Linear)
