"""The models of a run, and what trains and samples them: the same fields for every backend.

What a run is besides is in ``config.run``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from nemorl.base.packages.standard_plugins import DEFAULT_PLUGINS
from nemorl.base.text.naming import FileName, Interpreter, ModelName, Options
from nemorl.base.text.reading import expanded, is_file, shown
from nemorl.config.base import RESUMABLE, Config, Variants
from nemorl.config.component import Component, missing_modules
from nemorl.contracts import Head
from nemorl.errors import ConfigIssue
from nemorl.plugins import registry
from nemorl.plugins.kinds import GenerationBackendConfig, PluginConfig, TrainingBackendConfig
from nemorl.types import SamplingParams
from nemorl.weights import Form

# Workers build these, perhaps in another environment: whether their modules are there is checked apart.
TRAINING_BACKEND = Component("training_backends", DEFAULT_PLUGINS["training_backends"], built_here=False)
PASSTHROUGH, TEMPLATE_SUFFIX = "passthrough", ".jinja"
"""Of ``chat_template``: the contents alone, and the end of a file's name."""
GENERATION_BACKEND = Component("generation_backends", DEFAULT_PLUGINS["generation_backends"], built_here=False)


class OptimizerConfig(Config):
    """AdamW (arXiv:1711.05101).

    >>> OptimizerConfig(lr=1e-5).lr
    1e-05
    """

    name: Literal["adamw", "muon"] = "adamw"
    """``adamw``, or ``muon`` with options of its own."""
    lr: float = Field(1e-6, gt=0, le=1)
    """Peak learning rate. 1e-6 suits RL on models of 1B and more; tiny models learn at 1e-3."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running mean and of the running square of gradients."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Added to the denominator. Raise it if updates explode on rarely used parameters."""
    weight_decay: float = Field(0.01, ge=0, le=10)
    """Decoupled decay per unit of learning rate; not applied to biases and norms."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if not all(0 <= beta < 1 for beta in self.betas):
            yield ConfigIssue("betas", f"each beta must be in [0, 1), got {self.betas}", "use e.g. [0.9, 0.999]")


class MuonConfig(OptimizerConfig):
    """Muon (arXiv:2502.16982) for the matrices of hidden layers; AdamW for embeddings, output head, norms and biases.

    >>> MuonConfig(lr=1e-5).momentum
    0.95
    """

    name: Literal["muon"] = "muon"
    """Always ``muon``."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of the running mean of gradients, for the matrices."""
    nesterov: bool = True
    """Orthogonalize a step ahead of the running mean, instead of the mean itself."""
    newton_schulz_steps: int = Field(5, ge=1, lt=100)
    """Iterations that orthogonalize."""
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Of an [A, B] matrix's rate: 0.2 sqrt(max(A, B)), so that rates of AdamW fit, or sqrt(max(1, A / B))."""
    adamw_lr: float | None = Field(None, gt=0, le=1)
    """Peak rate of what AdamW updates. Unset: ``lr``."""


AnyOptimizer = Annotated[OptimizerConfig | MuonConfig, Variants(OptimizerConfig, MuonConfig)]


class ScheduleConfig(Config):
    """Learning-rate schedule: linear warm-up, then decay.

    >>> ScheduleConfig(kind="cosine", warmup_steps=10).min_lr_frac
    0.0
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, step by step as in transformers; linear and cosine fall towards ``min_lr_frac``, which
    the step after the last would have."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up. The first of them has rate 0, the first after them the peak rate."""
    warmup_frac: float | None = Field(None, ge=0, lt=1)
    """Instead of ``warmup_steps``: the warm-up as a share of the run's planned optimizer steps, rounded up."""
    min_lr_frac: float = Field(0.0, ge=0, le=1)
    """Floor of the decay, as a fraction of the peak rate."""
    decay_steps: int | None = Field(None, ge=1)
    """Optimizer steps from the start to the floor. Unset: the run's planned number of optimizer steps."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.warmup_frac is not None and self.warmup_steps:
            yield ConfigIssue("warmup_frac", f"warmup_steps = {self.warmup_steps} says it already", "keep one of them")
        if self.kind != "constant" and self.decay_steps is not None and self.decay_steps < self.warmup_steps:
            yield ConfigIssue(
                "decay_steps", f"warmup_steps = {self.warmup_steps} leaves none of them", "raise decay_steps"
            )

    def planned(self, updates: int) -> ScheduleConfig:
        """The schedule of a run of so many optimizer steps, with its lengths in steps.

        >>> ScheduleConfig(kind="cosine", warmup_frac=0.03).planned(250).warmup_steps
        8
        """
        given: dict[str, Any] = {"decay_steps": updates if self.decay_steps is None else self.decay_steps}
        if self.warmup_frac is not None:
            given |= {"warmup_steps": math.ceil(self.warmup_frac * updates), "warmup_frac": None}
        return self.model_copy(update=given)


class TokenizerConfig(Config):
    """The tokenizer of a policy, and how it renders conversations.

    >>> TokenizerConfig(chat_template_kwargs={"enable_thinking": False}).name is None
    True
    """

    name: ModelName | None = None
    """Hugging Face name or local folder. Unset: the model's own."""
    chat_template: FileName | None = None
    """Jinja text, the path of a ``.jinja`` file, or ``passthrough`` (contents only). Unset: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the template is given besides the messages, e.g. ``{enable_thinking: false}``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        text = self.chat_template
        if text is None or text == PASSTHROUGH or "{" in text:
            return
        what = f"no file {shown(text)}" if text.endswith(TEMPLATE_SUFFIX) else f"{shown(text)} is no template"
        if not text.endswith(TEMPLATE_SUFFIX) or not is_file(expanded(text)):
            fix = f"give Jinja text, a {TEMPLATE_SUFFIX} file, or {PASSTHROUGH}; leave it out for the model's own"
            yield ConfigIssue("chat_template", what, fix, here=text.endswith(TEMPLATE_SUFFIX))


class LoraConfig(Config):
    """Low-rank adapters (arXiv:2106.09685): train a small part, freeze the rest.

    >>> LoraConfig(rank=8).rank
    8
    """

    rank: int = Field(16, ge=1)
    """Inner dimension of the adapters."""
    alpha: float = Field(32.0, gt=0, le=1e5)
    """Scale: adapters are multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on adapter inputs. Non-zero makes on-policy ratios differ from 1."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Module name suffixes to adapt, or every linear layer but the output head."""
    head: bool = False
    """Also the output head, where it is not the embedding."""
    base: Literal["full", "nf4"] = "full"
    """``nf4``: frozen linear layers in 4 bits (QLoRA, arXiv:2305.14314), a fourth of their memory in bfloat16."""


class MediaConfig(Config):
    """Images and sounds, for models that see or hear.

    >>> MediaConfig(processor={"max_pixels": 200704}).train
    ('connector',)
    """

    processor: Options = Field(default_factory=dict)
    """Values in place of those of the model's ``preprocessor_config.json``, e.g. ``max_pixels``."""
    train: tuple[Literal["connector", "tower"], ...] = ("connector",)
    """What is trained beside the language model, where all weights are: the tower that sees, and what connects them."""


class TrainingOptions(Config):
    """The model that learns, and how: what a training backend is built of, the same for each.

    >>> isinstance(PolicyConfig(model_name="org/model"), TrainingOptions)
    True
    """

    model_name: ModelName = ""
    """Hugging Face name or local folder. Usually written as the run's top-level ``model``."""
    init: Literal["pretrained", "random"] = "pretrained"
    """``random`` builds the architecture from ``config.json`` with seeded random weights (tiny models, tests)."""
    hf_config_overrides: Options = Field(default_factory=dict)
    """Values in place of those of the model's ``config.json``, e.g. of ``rope_scaling`` or ``text_config``."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Another tokenizer or chat template than the model's own."""
    media: MediaConfig = MediaConfig()
    """Of models that see or hear."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Compute and storage type of the weights; optimizer state and log-probs are always float32."""
    tensor_parallel_size: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Ranks that share each layer. Raise it when one device cannot hold the model."""
    optimizer: AnyOptimizer = OptimizerConfig()
    """AdamW settings, or ``{name: muon, …}``."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Global gradient norm is clipped to this; ``null`` clips nothing."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights. Unset: full fine-tuning."""
    activation_checkpointing: Annotated[bool, RESUMABLE] = False
    """Recompute layer activations in the backward pass: about 30 % slower, far less memory."""
    microbatch_tokens: Annotated[int | None, RESUMABLE] = Field(None, ge=1)
    """Padded tokens per forward/backward. Unset: 1,536 on a CPU; on a GPU 16,384, or as many fewer as its memory has
    room for by the count of ``nemorl plan``, where that knows the devices. It does not change results."""
    max_sequence_tokens: int = Field(4096, ge=2)
    """Longest prompt plus response that is trained or generated."""


class PolicyConfig(TrainingOptions):
    """The model that learns, how, and with which backend.

    >>> PolicyConfig(model_name="org/model", optimizer={"lr": 1e-5}).optimizer.lr
    1e-05
    """

    backend: Annotated[TrainingBackendConfig, TRAINING_BACKEND] = Field(
        default=TRAINING_BACKEND.default,
        validate_default=True,  # type: ignore[assignment]
    )
    """Training backend: a name, or a mapping with ``name`` and the backend's own options."""
    python: Annotated[Interpreter | None, RESUMABLE] = None
    """Interpreter of the training workers, when their packages live in another virtual environment (Ray launcher)."""

    @property
    def interpreter(self) -> Path | None:
        """The Python of its workers, where that is another one than this process's."""
        return self.python or self.backend.interpreter

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from interpreter_problems("training_backends", self.backend, self.python)
        yield from model_problems("model_name", self.model_name)
        if self.optimizer.name not in {"adamw", *self.backend.supports}:
            yield ConfigIssue("optimizer.name", f"the training backend has no {self.optimizer.name}", "use adamw")
        yield from self._lora_problems(self.lora) if self.lora is not None else ()

    def _lora_problems(self, lora: LoraConfig) -> Iterator[ConfigIssue]:
        able = self.backend.supports
        if "lora" not in able:
            yield ConfigIssue("lora", "the training backend has no LoRA", "remove lora or choose another backend")
        elif self.tensor_parallel_size > 1 and "tensor_parallel_lora" not in able:
            message = "the chosen training backend has no LoRA with tensor parallelism"
            yield ConfigIssue("lora", message, "set tensor_parallel_size: 1")
        elif lora.base not in {"full", *able}:
            yield ConfigIssue("lora.base", f"the training backend has no {lora.base} weights", "use base: full")
        elif lora.head and "adapted_head" not in able:
            yield ConfigIssue("lora.head", "the training backend adapts no output head", "set head: false")
        if self.init == "random":
            yield ConfigIssue("lora", "adapters on random weights cannot learn", "use init: pretrained, or remove lora")


def model_problems(path: str, model_name: str) -> Iterator[ConfigIssue]:
    """Problems of a model given under the key ``path``, as far as the disk tells."""
    folder = expanded(model_name)
    looks_local = model_name.startswith(("/", "./", "../", "~")) or model_name.count("/") > 1
    if looks_local and not folder.is_dir():
        fix = "give an existing model folder or a hub name"
        yield ConfigIssue(path, f"no folder {shown(model_name)}", fix, here=True)
    elif model_name and folder.is_dir() and not (folder / "config.json").is_file():
        yield ConfigIssue(path, f"{shown(model_name)} has no config.json", "give a Hugging Face model folder")


class GenerationConfig(Config):
    """The engine that samples, and how.

    >>> GenerationConfig(max_new_tokens=64).sampling(temperature=0.0).max_new_tokens
    64
    """

    backend: Annotated[GenerationBackendConfig, GENERATION_BACKEND] = Field(
        default=GENERATION_BACKEND.default,
        validate_default=True,  # type: ignore[assignment]
    )
    """Generation backend: a name, or a mapping with ``name`` and the backend's own options."""
    python: Annotated[Interpreter | None, RESUMABLE] = None
    """Interpreter of the engines, when their packages live in another virtual environment (Ray launcher)."""
    temperature: float = Field(1.0, ge=0, le=100)
    """Sampling temperature; 0 is greedy. Training computes log-probs at the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the sampler and the trained distribution differ."""
    top_k: int | None = Field(None, ge=1)
    """Sample among the k most likely tokens. Unset: all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens less likely than this fraction of the most likely one."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest response in tokens."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response (kept in it)."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end a response, besides the model's own end-of-sequence tokens."""

    @property
    def interpreter(self) -> Path | None:
        """The Python of its workers, where that is another one than this process's."""
        return self.python or self.backend.interpreter

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from interpreter_problems("generation_backends", self.backend, self.python)

    def sampling(self, **changes: Any) -> SamplingParams:
        """These settings as request parameters, with changes (``sampling(temperature=0.0)``)."""
        settings: dict[str, Any] = {n: value for n, value in self if n in SamplingParams.__dataclass_fields__}
        return SamplingParams(**{**settings, **changes})


def interpreter_problems(kind: str, backend: PluginConfig, python: Path | None) -> Iterator[ConfigIssue]:
    """The backend's modules must be where it is built: here, or in the environment of ``python``."""
    if python is not None:
        if not python.is_file():
            fix = "give the bin/python of an environment"
            yield ConfigIssue("python", f"no interpreter {str(python)!r}", fix, here=True)
        return  # what it has installed is asked when the run starts
    problem = missing_modules(kind, registry().name_of(kind, type(backend)), type(backend))
    if problem is not None:
        yield replace(problem, path="backend")


@dataclass(frozen=True)
class Placement:
    """Where the parts of a run go and how weights travel between them, as ``RunConfig.place`` decides it. The defaults
    are those of a run that has one model and samples nothing."""

    is_attached: bool = False
    """The engine is built in the trainer's processes, over its weights"""
    shares_weights: bool = False
    """The engine runs on the trainer's own weights, in its memory"""
    transport: str | None = None
    """Id of what carries weights to the engine; ``None`` where the backends have no way in common"""
    copies_on_device: bool = False
    """The transport first copies what a rank sends within the rank's device"""
    form: Form = "model"
    """Contents of a sync of weights"""
    adapter_obstacle: str = ""
    """Why adapters do not travel apart from the model although they should; empty if they do, or need not"""
    spreads_weights: bool = False
    """Each rank of the trainer sends its own part of the weights, and nobody gathers them"""
    takes_turns: bool | None = False
    """Models leave the devices' memory while others work; ``None``: if they do not all fit at once"""


@dataclass(frozen=True)
class AuxiliaryModel:
    """Another model of a run, built by the policy's kind of backend: a critic that learns, a teacher that does not."""

    policy: PolicyConfig
    """Model, backend, optimizer and batching"""
    head: Head = "language_model"
    learns: bool = False
    """Whether checkpoints hold it"""
    extra_updates: int = 0
    """Optimizer steps planned for it beyond the policy's, e.g. while a critic learns alone"""
