"""JSON bodies as clients of versions 0.25 to 0.38 send them. An unknown field is an error: it might mean something."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from nemorl.contracts import AdamStep
from nemorl.errors import DataError
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

SHORTEST_TTL_S, LONGEST_TTL_S = 3600, 10 * 366 * 86_400


class Body(BaseModel):
    """Any of them."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    type: str | None = None


B = TypeVar("B", bound=Body)


def body_of(kind: type[B], raw: bytes) -> B:
    """Read a body.

    Raises:
        DataError: It is no JSON, a field is missing, wrong or unknown; names all of them.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors()]
        raise DataError(
            "; ".join(problems)[:2000], fix="use a client of the versions that docs/tinker.md names"
        ) from None


class Lora(BaseModel):
    """The adapter of ``create_model``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(ge=1, le=4096)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(BaseModel):
    """The optimizer of ``create_model``."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = "adamw"

    def require_adam(self) -> None:
        """Refuse any other.

        Raises:
            DataError: It is another.
        """
        if self.type != "adamw":
            raise DataError(f"the optimizer {self.type} is not served", fix="leave `optimizer` out: it is AdamW")


class CreateModel(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class LoadWeights(Body):
    """Into a new model (``session_id``, ``model_seq_id``), or into one that is there (``model_id``, ``seq_id``)."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerChoice | None = None
    weights_access_token: str | None = None


class AdamParams(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    learning_rate: float = 1e-4
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    model_id: str
    seq_id: int
    adam_params: AdamParams | None = Field(default=None, validation_alias=AliasChoices("adam_params", "optim_params"))
    optimizer_params: dict[str, Any] | None = None

    def adam(self) -> AdamStep:
        """The step.

        Raises:
            DataError: It is another optimizer's.
        """
        if self.optimizer_params is not None or self.adam_params is None:
            kind = (self.optimizer_params or {}).get("type", "unknown")
            raise DataError(f"a step of the optimizer {kind} is not served", fix="pass AdamParams to optim_step")
        given = self.adam_params
        clip = given.grad_clip_norm if given.grad_clip_norm > 0 else None
        return AdamStep(given.learning_rate, (given.beta1, given.beta2), given.eps, given.weight_decay, clip)


class Saved(Body):
    """What all requests that save have."""

    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = Field(default=None, ge=SHORTEST_TTL_S, le=LONGEST_TTL_S)
    user_metadata: dict[str, str] | None = None


class SaveWeights(Saved):
    overwrite: bool = False


class SaveForSampler(Saved):
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class SaveExternal(Saved):
    age_encryption_recipients: list[str] | None = None


class CreateSession(Body):
    tags: list[str] = Field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class CreateSampling(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
