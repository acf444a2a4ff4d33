"""verl's options, all of them: each is mapped, inert by name, different or refused; none is lost without a word."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from nemorl.config import load_config
from nemorl_compat.migration import Migration
from nemorl_compat.peers.reading import Given
from nemorl_compat.peers.tables import table
from nemorl_compat.peers.translation import translate

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BASE = {
    f"{MODEL}.path": "org/model",
    "algorithm.adv_estimator": "grpo",
    f"{ROLLOUT}.n": 5,
    f"{ROLLOUT}.name": "vllm",
    "data.train_files": "a.parquet",
    "data.val_files": "b.parquet",
}
FSDP = {
    **BASE,
    "algorithm.filter_groups.enable": True,
    "algorithm.rollout_correction.rollout_is": "token",
    "reward.reward_manager.name": "dapo",
    "reward.reward_kwargs.overlong_buffer_cfg.enable": True,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.optim.lr_scheduler_type": "cosine",
    f"{ROLLOUT}.val_kwargs.do_sample": True,
    f"{MODEL}.lora_rank": 8,
    "trainer.total_training_steps": 100,
    "trainer.save_freq": 5,
}
MEGATRON = {
    **BASE,
    "model_engine": "megatron",
    f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
    f"{ACTOR}.megatron.pipeline_model_parallel_size": 2,
    f"{ACTOR}.optim.lr_decay_style": "cosine",
    f"{ACTOR}.optim.min_lr": 1e-7,
    f"{MODEL}.lora.rank": 8,
    "trainer.total_training_steps": 100,
}
OPTIONS = table("verl").options
INERT = (
    "critic.",
    "actor_rollout_ref.ref.",
    "reward.reward_model.rollout.",
    "distillation.teacher_models.",
    "transfer_queue.",
    "global_profiler.",
    f"{ROLLOUT}.prometheus.",
    f"{MODEL}.tiled_mlp.",
)
"""Sections of what is not here, is configured as the policy, only writes down, or only saves memory."""
TRIALS: Mapping[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (7, 2, 4096),
    float: (0.37, 0.5),
    str: ("x/y", "fp8", "float16", "gspo", "k2", "seq-mean-token-mean", "cosine", "rloo", "constant", "sequence"),
    list: ([0.5, 0.6], ["model"], ["tensorboard"], ["q_proj"]),
    dict: ({"a": 1},),
    type(None): (7, 0.37, True, "x/y", ["a"], "token"),
}


def translated(base: Mapping[str, Any], **changes: Any) -> Migration:
    return translate(Given("verl", {**base, **changes}))


@cache
def plain(name: str) -> tuple[Any, Any]:
    return said(translated({"FSDP": FSDP, "MEGATRON": MEGATRON, "BASE": BASE}[name]))


def said(found: Migration) -> tuple[Any, Any]:
    """The new config, and what the report says other than that a key is mapped."""
    return found.config, sorted((c.key, c.outcome.text) for c in found.changes if c.outcome.kind != "mapped")


def others(key: str) -> list[Any]:
    """Values of the option that are not its default."""
    kinds = {type(default) for default in OPTIONS[key]}
    trials = [trial for kind in kinds for trial in TRIALS[kind]]
    return [t for t in trials if not any(t == d and isinstance(t, bool) == isinstance(d, bool) for d in OPTIONS[key])]


def kind_of(key: str, value: Any) -> tuple[str, str]:
    found = translated(BASE, **{key: value})
    return next((c.outcome.kind, c.outcome.text) for c in found.changes if c.key == key)


def test_every_option_has_a_place_and_none_is_called_the_same_when_it_is_not() -> None:
    changed = {key: others(key)[0] for key in OPTIONS if key not in BASE}
    found = translated({**BASE, **changed})
    kinds = {change.key: change.outcome for change in found.changes}
    assert len(OPTIONS) > 1200
    assert [key for key in changed if kinds[key].kind == "unknown"] == []
    assert [key for key in changed if kinds[key].kind == "neutral" and kinds[key].text == "same"] == []


@pytest.mark.full
def test_every_mapped_option_changes_the_new_config_or_what_is_said() -> None:
    """A row's ``to`` is a promise; each mapped option is changed once, under FSDP and under Megatron."""
    entries = {key: table("verl").find(key) for key in OPTIONS}
    mapped = [key for key, entry in entries.items() if entry is not None and "to" in entry.row]

    def shows(key: str) -> bool:
        for name, base in (("FSDP", FSDP), ("MEGATRON", MEGATRON), ("BASE", BASE)):
            for trial in others(key):
                try:
                    if said(translated(base, **{key: trial})) != plain(name):
                        return True
                except (ValueError, TypeError):
                    continue  # no value for this key
        return False

    assert len(mapped) > 80
    assert [key for key in mapped if not shows(key)] == []


def test_every_switch_is_mapped_or_refused_where_something_hangs_on_it() -> None:
    switches = [key for key in OPTIONS if key.endswith((".enable", ".enabled")) and False in OPTIONS[key]]
    judged = {key: kind_of(key, True)[0] for key in switches if not key.startswith(INERT) and ".profiler." not in key}
    assert len(judged) > 12
    assert {key: kind for key, kind in judged.items() if kind not in ("mapped", "missing")} == {}


@pytest.mark.slow
def test_a_key_that_verl_has_not_is_refused_in_every_section() -> None:
    sections = {key.rpartition(".")[0] for key in OPTIONS if "." in key}
    changed = {f"{section}.no_such_option": 1 for section in sections}
    kinds = {c.key: c.outcome.kind for c in translated(BASE, **changed).changes}
    lost = [key for key in changed if kinds[key] not in ("unknown", "missing")]
    # A section whose names are anybody's is open; what it holds is passed on, or says nothing.
    assert {key.rpartition(".")[0] for key in lost} <= {
        "actor_rollout_ref.actor.checkpoint.mbridge_config",
        "actor_rollout_ref.ref.megatron.override_transformer_config",
        *(key for key in sections if ".turbo_config" in key or key.startswith("distillation.teacher_models")),
    }


def test_verls_own_defaults_say_nothing() -> None:
    """What Hydra writes of a run has every option: it is translated as the few that the run gave."""
    full = {key: defaults[0] for key, defaults in OPTIONS.items() if key not in BASE}
    ours = {"algorithm.adv_estimator", "actor_rollout_ref.model.path", "data.train_files", "data.val_files"}
    found = translated({**full, **BASE, f"{ACTOR}.rollout_n": BASE[f"{ROLLOUT}.n"]})
    assert {c.key for c in found.of("missing", "unknown")} - ours == set()
    whole, bare = dict(found.config), dict(translated(BASE).config)
    whole.pop("run_dir")  # verl's is given by name in the whole config
    assert whole == bare


REFUSED = [
    ("reward.reward_model.enable", True),
    ("data.image_key", "images"),
    ("trainer.v1.trainer_mode", "separate_async"),
    (f"{ROLLOUT}.agent.default_agent_loop", "tool_agent"),
    (f"{MODEL}.mtp.enable", True),
    ("reward.custom_reward_function.path", "reward.py"),
    ("custom_reward_function.path", "reward.py"),
    (f"{ACTOR}.fsdp_config.dtype", "float16"),
    (f"{ROLLOUT}.dtype", "float16"),
    (f"{MODEL}.lora.rank", 32),
    (f"{ROLLOUT}.tensor_model_parallel_size", 16),
    (f"{ROLLOUT}.tensor_model_parallel_size", 32),
    ("model_engine", "veomni"),
    (f"{ACTOR}.strategy", "torchtitan"),
    (f"{ROLLOUT}.logprobs_mode", "raw_logits"),
]


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_what_is_not_here_is_refused_by_its_name(key: str, value: Any) -> None:
    assert kind_of(key, value)[0] == "missing"


MAPPED = [
    (BASE, "data.train_max_samples", 100, ("data", "max_rows"), 100),
    (BASE, f"{ACTOR}.optim.clip_grad", 0.1, ("policy", "max_grad_norm"), 0.1),
    (BASE, f"{MODEL}.tokenizer_path", "org/t", ("policy", "tokenizer", "name"), "org/t"),
    (BASE, f"{MODEL}.lora_rank", 32, ("policy", "lora", "rank"), 32),
    (BASE, f"{ROLLOUT}.tensor_model_parallel_size", 8, ("generation", "backend", "tensor_parallel_size"), 8),
    (BASE, f"{ROLLOUT}.quantization", "fp8", ("generation", "backend", "precision"), "fp8"),
    (BASE, f"{ACTOR}.ulysses_sequence_parallel_size", 4, ("policy", "backend", "context_parallel_size"), 4),
    (MEGATRON, f"{MODEL}.lora.rank", 32, ("policy", "lora", "rank"), 32),
    (MEGATRON, f"{ACTOR}.megatron.pipeline_model_parallel_size", 4, ("policy", "backend", "pipeline_parallel_size"), 4),
    # min_lr 1e-7 of a rate of 1e-6
    (MEGATRON, f"{ACTOR}.optim.lr_decay_style", "linear", ("policy", "schedule", "min_lr_frac"), 0.1),
]


@pytest.mark.parametrize(("base", "key", "value", "path", "expected"), MAPPED)
def test_where_an_option_lives_here(
    base: Mapping[str, Any], key: str, value: Any, path: tuple[str, ...], expected: Any
) -> None:
    found: Any = translated(base, **{key: value}).config
    for part in path:
        found = found[part]
    assert found == pytest.approx(expected)


def test_a_penalty_on_length_has_verls_numbers_wherever_it_is_written() -> None:
    for manager, place in (
        ("reward_model.reward_manager", "reward_model.reward_kwargs"),
        ("reward.reward_manager.name", "reward.reward_kwargs"),
    ):
        cfg = f"{place}.overlong_buffer_cfg"
        given = {manager: "dapo", f"{cfg}.enable": True, f"{cfg}.len": 64, f"{place}.max_resp_len": 400}
        penalty = {"max_response_tokens": 400, "buffer_tokens": 64, "penalty": 1.0}
        assert translated(BASE, **given).config["overlong_penalty"] == penalty


def test_cispo_has_bounds_of_a_tokens_weight_and_averages_over_tokens() -> None:
    # verl: clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high).detach() * advantage * log_prob
    said = {f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 0.4, f"{ACTOR}.clip_ratio_high": 2.0}
    made = translate(Given("verl", {**BASE, **said})).config
    assert (made["algorithm"], made["ratio_floor"], made["ratio_cap"]) == ("cispo", 0.6, 3.0)
    other = translate(Given("verl", {**BASE, **said, f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"}))
    assert other.features == ["cispo with the average seq-mean-token-sum"]


@pytest.mark.parametrize(("theirs", "ours"), [("fp32", "float32"), ("fp64", "float64")])
def test_megatrons_routers_keep_their_precision(theirs: str, ours: str) -> None:
    key = f"{ACTOR}.megatron.override_transformer_config.moe_router_dtype"
    made = translate(Given("verl", {**MEGATRON, key: theirs}))
    assert made.config["policy"]["backend"]["router"]["dtype"] == ours
    assert translate(Given("verl", {**MEGATRON, key: "bf16"})).features == ["a router in bf16"]


def test_the_seed_of_the_rows_seeds_the_run() -> None:
    assert translate(Given("verl", {**BASE, "data.seed": 7})).config["seed"] == 7


MODE = f"{ACTOR}.policy_loss.loss_mode"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({MODE: "sapo", f"{ACTOR}.tau_neg": 1.2}, {"algorithm": "sapo", "tau_positive": 1.0, "tau_negative": 1.2}),
        ({MODE: "geo_mean", f"{ACTOR}.clip_ratio_high": 0.4}, {"algorithm": "gmpo", "clip_low": 0.2, "clip_high": 0.4}),
        (
            {MODE: "dppo_kl", f"{ACTOR}.clip_ratio_low": 0.05, f"{ACTOR}.clip_ratio_c": 20.0},
            {"algorithm": "dppo", "divergence": "kl", "divergence_low": 0.05, "divergence_high": 0.2, "ratio_cap": 20},
        ),
        ({MODE: "dppo_tv"}, {"algorithm": "dppo", "divergence": "tv", "ratio_cap": 3.0}),
        (
            {
                MODE: "clip_cov",
                f"{ACTOR}.policy_loss.clip_cov_ub": 4.0,
                f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
            },
            {"algorithm": "clip_cov", "cov_fraction": 2e-4, "cov_low": 1.0, "cov_high": 4.0, "dual_clip": None},
        ),
        (
            {MODE: "kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio": 0.002, f"{ACTOR}.policy_loss.ppo_kl_coef": 1.0},
            {"algorithm": "kl_cov", "cov_fraction": 0.002, "cov_penalty": 1.0},
        ),
        ({MODE: "dro", f"{ACTOR}.policy_loss.dro_beta": 0.3}, {"algorithm": "dro", "drift_penalty": 0.3}),
        ({MODE: "gspo", f"{ACTOR}.clip_ratio_low": 3e-4}, {"algorithm": "gspo", "clip_low": 3e-4}),
        ({"algorithm.adv_estimator": "grpo_vectorized"}, {"algorithm": "grpo", "leave_one_out": False}),
        ({"algorithm.adv_estimator": "rloo_vectorized"}, {"algorithm": "rloo"}),
        ({"algorithm.adv_estimator": "optimal_token_baseline"}, {"algorithm": "optimal_token_baseline"}),
        # One update per step: no ratio is 1 either.
        ({MODE: "gpg", "data.train_batch_size": 256, f"{ACTOR}.ppo_mini_batch_size": 256}, {"algorithm": "grpo"}),
    ],
    ids=lambda value: str(value.get(MODE, value.get("algorithm.adv_estimator", ""))) if isinstance(value, dict) else "",
)
def test_losses_and_estimators_of_verl_are_algorithms_by_name(said: dict[str, Any], expected: dict[str, Any]) -> None:
    made = translate(Given("verl", {**BASE, **said}))
    assert made.features == []
    config: Any = load_config(made.config, for_cluster=True)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("said", "feature"),
    [
        ({MODE: "gpg", f"{ACTOR}.ppo_epochs": 2}, "a policy gradient without a ratio for several updates per step"),
        ({MODE: "bypass_mode"}, "the loss bypass_mode: one of vanilla, gspo, cispo, sapo"),
        ({MODE: "sapo", "algorithm.adv_estimator": "rloo"}, "the loss sapo with rloo"),
        ({MODE: "dppo_tv", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}, "dppo_tv with the average"),
        ({MODE: "dro"}, "dro without a positive dro_beta"),
        ({"algorithm.adv_estimator": "remax"}, "the advantage remax (`algorithm: rloo`"),
        ({"algorithm.adv_estimator": "gdpo"}, "the advantage gdpo (`algorithm: gdpo`"),
        ({"algorithm.adv_estimator": "mine"}, "the advantage mine: one of grpo"),
    ],
)
def test_what_verl_knows_and_nemorl_does_not_is_refused_with_what_comes_close(
    said: dict[str, Any], feature: str
) -> None:
    (found,) = translate(Given("verl", {**BASE, **said})).features
    assert found.startswith(feature)


def test_dppo_is_not_corrected_for_the_sampler_twice() -> None:
    said = {MODE: "dppo_tv", "algorithm.rollout_correction.rollout_is": "token"}
    made = translate(Given("verl", {**BASE, **said}))
    assert made.config.get("importance_correction") is None
    assert "algorithm.rollout_correction.rollout_is" in {change.key for change in made.changes}
