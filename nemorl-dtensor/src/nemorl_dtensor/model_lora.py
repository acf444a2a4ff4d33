"""Low-rank adapters (arXiv:2106.09685) on a Hugging Face model: of linear layers by peft, of experts by
``expert_adapters``.

# O = outputs, I = inputs of a linear layer, R = rank of the adapters, E = experts of a stack

The base weights stay frozen and in place, so the frozen reference policy is the same model with adapters off, and the
policy as a plain model is base + adapter, layer by layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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

from nemorl_dtensor import expert_adapters
from nemorl_dtensor.adapter_targets import all_linear, expert_names, head_name
from nemorl_dtensor.expert_adapters import CHILD, StackAdapter
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
        asked = all_linear(model, beside_text) if named == "all-linear" else list(named)
        stacks = expert_names(asked)
        targets = [name for name in asked if name not in stacks] + ([head_name(model)] if lora.head else [])
        settings: Any = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
        self._settings: Any = PeftConfig(**settings, target_modules=targets or None, task_type="CAUSAL_LM")
        self._peft: Any = None
        with boundary("peft, adding LoRA adapters,"), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            if targets:
                self._peft = get_peft_model(model, self._settings)  # type: ignore[arg-type]
            else:
                model.requires_grad_(False)
            self._stacks = expert_adapters.add_adapters(model, stacks, lora.rank) if stacks else {}
            for adapter in self._stacks.values():
                expert_adapters.draw(adapter.lora_A, lora.rank)
                adapter.scaling = lora.alpha / lora.rank
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
        self._shape = AdapterShape(lora.rank, lora.alpha, seed, frozenset(map(self._kind, self._all)))
        if not all(_is_linear(layer) for layer in self._layers.values()):
            raise BackendError(
                "peft reads these names as experts of a mixture, or its routers: experts are adapted by the names of "
                "their stacks, and routers are not",
                fix="set policy.lora.target_modules: all-linear (of a mixture: attention, and what all tokens pass), "
                "or name experts as experts.gate_up_proj and experts.down_proj",
            )
        for layer in self._layers.values():
            _compute_in_the_models_precision(layer)
        self._dropouts = [
            dropout
            for layer in self._layers.values()
            for dropout in layer.lora_dropout.values()  # type: ignore[union-attr,operator]
        ]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it the model is the reference policy."""
        for stack in self._stacks.values():
            stack.is_on = False
        try:
            with nullcontext() if self._peft is None else self._peft.disable_adapter():
                yield
        finally:
            for stack in self._stacks.values():
                stack.is_on = True

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
        for stack in self._stacks.values():
            stack.scaling = shape.alpha / shape.rank

    @property
    def _all(self) -> list[str]:
        """Names of what is adapted: layers, and the adapters of stacks."""
        return [*self._layers, *self._stacks]

    def drawn(self, shape: AdapterShape) -> dict[str, Tensor]:
        """Whole factors of a new one, by parameter name: A as peft draws it and zeros in the ranks beyond; B zero.

        Rows of zeros stay zeros: their gradient is a product with columns of zeros.

        Raises:
            UsageError: It is larger than what is in place.
        """
        own = AdapterShape(self._settings.r, modules=frozenset(map(self._kind, self._all)))
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
            if not factor.startswith("A") or self._kind(layer) not in shape.modules:
                continue
            if layer in self._stacks:
                expert_adapters.draw(found[name], shape.rank, generator)
            else:
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
        files = expert_adapters.file_modules(self._model)
        own = {self._file_name(name, files): (name, p) for name, p in self._own_parameters()}
        shapes = {
            name: tuple(self._in_file(key, self._trimmed(key, p.detach())).shape) for name, (key, p) in own.items()
        }
        if {name: tuple(tensor.shape) for name, tensor in saved.items()} != shapes:
            raise CheckpointError(
                f"{folder} has adapters of other layers or of another rank than {self._shape.rank} on "
                f"{', '.join(sorted(self._shape.modules))}",
                fix="load them into an adapter of the shape that was saved",
            )
        found = {name: torch.zeros(p.shape) for name, p in self._model.named_parameters() if ".lora_" in name}
        for name, tensor in saved.items():
            key = own[name][0]
            self._trimmed(key, found[key]).copy_(self._in_memory(key, tensor))
        return found

    def _kind(self, layer: str) -> AdaptedModules:
        if layer in self._layers and self._layers[layer] is self._head:
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
        return factor[..., : self._shape.rank, :] if ".lora_A" in name else factor[..., : self._shape.rank]

    def _file_name(self, name: str, files: Mapping[str, str]) -> str:
        """A parameter's name in peft's files, of those of the modules of stacks."""
        layer, _, factor = name.rpartition(".lora_")
        plain = f"{files[layer]}.lora_{factor}.weight" if layer in files else name.replace(f".{ADAPTER}.", ".")
        return PEFT_PREFIX + plain

    def _in_file(self, name: str, factor: Tensor) -> Tensor:
        """A whole factor in the form that peft's files have."""
        return expert_adapters.to_file(factor, is_first=".lora_A" in name) if factor.ndim == 3 else factor

    def _in_memory(self, name: str, matrix: Tensor) -> Tensor:
        """What a file has of a factor, in the form of the parameter."""
        layer = name.rpartition(".lora_")[0]
        if layer not in self._stacks:
            return matrix
        return expert_adapters.from_file(matrix, len(self._stacks[layer].lora_A), is_first=".lora_A" in name)

    def published(self) -> Iterator[Mapping[str, Tensor]]:
        """Buckets of whole factors under the names of peft's files. Collective where the model is sharded."""
        files = expert_adapters.file_modules(self._model)
        own = ((name, self._trimmed(name, whole(p.detach()))) for name, p in self._own_parameters())
        named = ((self._file_name(name, files), self._in_file(name, tensor)) for name, tensor in own)
        yield from in_buckets(({name: tensor}, tensor.nbytes) for name, tensor in named)

    def save(self, folder: Path, tensors: Mapping[str, Tensor], base: str) -> None:
        """Write the folder that ``peft.PeftModel.from_pretrained`` loads.

        Args:
            folder: Created if needed.
            tensors: Of :meth:`published`, on the CPU.
            base: Hugging Face name or folder of the model that they adapt.
        """
        settings = copy.deepcopy(self._settings)
        settings.base_model_name_or_path, settings.inference_mode = base, True
        settings.r, settings.lora_alpha = self._shape.rank, self._shape.alpha
        adapted = sorted(name for name in self._all if self._kind(name) in self._shape.modules)
        settings.target_modules = [name for name in adapted if name in self._layers] or None
        stacks = [name.replace(f".{CHILD}.", ".") for name in adapted if name in self._stacks]
        settings.target_parameters = stacks or None
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
        stack = self._stacks.get(_adapter_name(name))
        if stack is not None:
            return self._with_stack_delta(name, stack, tensor)
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

    @torch.no_grad()
    def _with_stack_delta(self, name: str, stack: StackAdapter, weights: Tensor) -> Tensor:
        """weights: [E, O, I], or [E, I, O] where stacks are transposed."""
        is_transposed = vars(self._model.get_submodule(name.rpartition(".")[0])).get("is_transposed", False)
        places = zip(offsets(weights), local(weights).shape, strict=True)
        experts, *sides = (slice(first, first + size) for first, size in places)
        inputs, outputs = sides if is_transposed else reversed(sides)
        a_ERI, b_EOR = whole(stack.lora_A.detach()), whole(stack.lora_B.detach())
        delta = expert_adapters.delta(
            a_ERI[experts, :, inputs].float(), b_EOR[experts, outputs].float(), stack.scaling, transposed=is_transposed
        )
        base = local(weights)
        return like(weights, (base.float() + delta).to(base.dtype).contiguous())


def _adapter_name(stack: str) -> str:
    """Of the adapter's module, of the name of a stack of experts."""
    owner, _, leaf = stack.rpartition(".")
    return f"{owner}.{CHILD}.{leaf}"


def _low_rank(layer: Any, states: Tensor) -> LowRank | None:
    if layer.disable_adapters:
        return None
    low: Tensor = layer.lora_A[ADAPTER](layer.lora_dropout[ADAPTER](states)) * layer.scaling[ADAPTER]
    return low, layer.lora_B[ADAPTER].weight


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
