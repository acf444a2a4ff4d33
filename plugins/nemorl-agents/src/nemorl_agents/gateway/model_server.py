"""A model on disk behind a gateway: found, loaded, and served until the block ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nemorl.base.files.owned_folders import scratch_folder
from nemorl.base.text.reading import expanded
from nemorl.config.load import validate
from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.errors import UsageError
from nemorl_rl.agents.contract import EpisodeLimits
from nemorl_rl.agents.policy import Sampler
from nemorl_rl.chat.codec import codec_of
from nemorl_rl.chat.text import TokenizerText
from nemorl_rl.data.tokenizer import Tokenizer, context_tokens
from nemorl_rl.models.exporting import export_model
from nemorl_rl.models.hub_models import require_model
from nemorl_rl.placement.engines import standalone_generation
from nemorl_trust.audit.recording import record
from nemorl_trust.site_check import require_engine

from nemorl_agents.gateway.access import Access
from nemorl_agents.gateway.gateway import Gateway, GatewayOptions, require_address
from nemorl_agents.gateway.serving import MOST_CALLS, ServedPolicy

CALL_S = 3600.0
"""Longest time to one answer."""


@contextmanager
def model_folder(model: str, step: int | None = None) -> Iterator[str]:
    """The model that a name stands for: of a run its exported one, or that of a checkpoint, in a folder for as long.

    Args:
        model: Folder, hub name, or the directory of a run.
        step: Of the run's checkpoint. Unset: the exported model, or the latest checkpoint.

    Raises:
        UsageError: There is no such checkpoint, or no run.
    """
    run = expanded(model)
    if not (run / "config.yaml").is_file():
        if step is not None:
            raise UsageError(f"{model} is no run, which has steps", fix="give a run's directory, or leave --step out")
        yield model
        return
    if step is None and (run / "model" / "config.json").is_file():
        yield str(run / "model")
        return
    with scratch_folder("nemorl-serve-") as scratch:
        export_model(run, scratch / "model", step=step)
        yield str(scratch / "model")


@contextmanager
def served(
    model: str,
    options: GatewayOptions,
    generation: dict[str, object],
    *,
    max_sequence_tokens: int,
    key: str | None = None,
    seed: int = 0,
) -> Iterator[Access]:
    """A model on disk, loaded and served.

    Args:
        model: Folder or hub name.
        options: Of the gateway.
        generation: Fields of ``GenerationConfig``.
        max_sequence_tokens: Longest prompt and answer; the model's own limit if that is smaller.
        key: That clients send. Unset: a new one.
        seed: Seeds all calls.

    Raises:
        UsageError: Nobody can listen at that address.
        ConfigError: There is no such model, or an option of the engine is wrong or missing.
    """
    config = validate(GenerationConfig, generation, source="serve")
    require_engine(model, config.backend)
    require_address(options)  # before minutes of loading
    require_model(model)
    limit = min(max_sequence_tokens, context_tokens(model) or max_sequence_tokens)
    policy_config = PolicyConfig(model_name=model, max_sequence_tokens=limit)
    tokenizer = Tokenizer.of(policy_config)
    codec = codec_of(tokenizer)
    engine = standalone_generation(config, policy_config)
    try:
        sampler = Sampler(engine, config.sampling(), honours_clients=True, text=TokenizerText(tokenizer, codec))
        limits = EpisodeLimits(limit, config.max_new_tokens, MOST_CALLS, CALL_S)
        with Gateway(options) as gateway:
            facts = {"model": model, "address": gateway.address, "encrypted": options.tls_certificate is not None}
            record("serving_started", facts)
            yield gateway.open_at_root(ServedPolicy(sampler, codec, limits, seed=seed), key=key)
    finally:
        engine.shutdown()
