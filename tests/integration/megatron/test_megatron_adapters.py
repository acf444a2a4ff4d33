"""LoRA over megatron-core trains what LoRA over dtensor trains, however the model is spread, and peft reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

import spread_cases
from layouts import CP, EP, HEADS, LOW, MIXTURE, PADDED, PLAIN, PP, RECOMPUTED, SHARED, TP, VPP, WHOLE
from megatron_adapters import SAVED_AFTER, Case, Found, batch_of, policy_of, run, train, write_adapters
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor import DTensorConfig
from nemorl_testing.models import load_reference, plain_logprobs, tiny_model
from spread_cases import gap, run_spread
from tiers import in_full
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

LOGPROBS, ADAPTERS = 5e-6, 1e-5
"""Largest allowed differences: log-probs in nats, and adapters after one step."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "deep": {"num_hidden_layers": 4},
    "llama": {"architecture": "llama", "tie_word_embeddings": False},
    "gemma2": {"architecture": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16},
    "moe": {**MIXTURE, "decoder_sparse_step": 2},
}
SDPA = {"attention": "sdpa"}
ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
SOME = {"target_modules": ["q_proj", "v_proj", "mlp.down_proj"]}
CASES: dict[str, Case] = {
    "one": Case("qwen2", options=SDPA, saves="one"),
    "one, some layers": Case("qwen2", lora=SOME, saves="one, some layers"),
    "one moe": Case("moe", lora=ATTENTION),
    "one, shared": Case("qwen2", options=SHARED, shared=True),
    "dp2": Case("qwen2", 2, saves="dp2"),
    "tp2": Case("qwen2", 2, TP, SDPA, saves="tp2"),
    "tp2, whole sequences": Case("qwen2", 2, TP, WHOLE | SDPA, saves="tp2, whole sequences"),
    "pp2": Case("qwen2", 2, {}, PP | SDPA, saves="pp2"),
    "ep2": Case("moe", 2, {}, EP, ATTENTION, saves="ep2"),
    "one bfloat16": Case("qwen2", policy=LOW, saves="one bfloat16"),
    **in_full(
        {
            "one llama": Case("llama", saves="one llama"),
            "cp2": Case("qwen2", 2, {}, CP),
            "tp2, shared": Case("qwen2", 2, TP, SHARED, shared=True),
            "pp2 vpp2": Case("deep", 2, {}, VPP),
            "tp2 bfloat16": Case("qwen2", 2, {**TP, **LOW}),
            "one, padded": Case("qwen2", options=PADDED),
            "one, plain optimizer": Case("qwen2", options=PLAIN),
            "one, recomputed": Case("qwen2", policy=RECOMPUTED),
            "one gemma2": Case("gemma2"),
            "tp2, recomputed": Case("qwen2", 2, {**TP, **RECOMPUTED}),
            "tp2, some layers": Case("qwen2", 2, TP, lora=SOME),
            "tp2 llama": Case("llama", 2, TP),
            "tp2 gemma2": Case("gemma2", 2, TP),
            "pp2, recomputed": Case("qwen2", 2, RECOMPUTED, PP),
            "tp2 ep2": Case("moe", 2, TP, EP, ATTENTION),
        }
    ),
}
RESUMED: dict[str, str] = {name: name for name, case in CASES.items() if case.saves} | {
    "one": "tp2",
    "tp2": "pp2",
    "pp2": "one",
    "dp2": "tp2, whole sequences",
}
"""Case -> whose checkpoint it goes on from, its own where it is not said here."""


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = {name: str(tiny_model(**HEADS, **sizes)) for name, sizes in MODELS.items()}
        self.dtensor: dict[str, Found] = {}
        for name, case in CASES.items():
            self.with_dtensor(name, case)
        self.found = self._run(CASES)
        own = {name: replace(case, saves="", resumes=case.saves) for name, case in CASES.items() if case.saves}
        self.resumed = self._run(own)
        others = {
            name: replace(CASES[name], saves="", resumes=other) for name, other in RESUMED.items() if other != name
        }
        self.elsewhere = self._run(others)

    def placed(self, case: Case) -> Case:
        saves, resumes = (str(self.folder / name) if name else "" for name in (case.saves, case.resumes))
        if saves:
            Path(saves).mkdir(exist_ok=True)
        return replace(case, model=self.models[case.model], start=str(self.start(case)), saves=saves, resumes=resumes)

    def start(self, case: Case) -> Path:
        return self.folder / f"start {case.model} {sorted(case.lora)}.safetensors"

    def with_dtensor(self, name: str, case: Case) -> None:
        """The same in one process with the other backend; the first of a model also writes what all begin with."""
        policy = {key: value for key, value in case.policy.items() if key not in TP}
        alone = replace(case, model=self.models[case.model], policy=policy, options={}, saves="")
        config = DTensorConfig()
        backend: Any = config.build(policy_of(alone, config), WorkerContext(), reference=True)
        names = {n: "base_model.model." + n.replace(".default.", ".") for n in backend._adapters.tensors()}
        draw = torch.Generator().manual_seed(11)
        for parameter_name, parameter in backend._model.named_parameters():
            if parameter_name in names:  # B too: the policy is not the base model from the start
                parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.05)
        if not self.start(case).exists():
            write_adapters(self.start(case), {names[n]: t for n, t in backend._adapters.tensors().items()})
        batch = batch_of(case)
        self.dtensor[name] = run(backend, batch, [*range(len(batch))], alone)
        backend.shutdown()

    def _run(self, cases: dict[str, Case]) -> dict[str, list[Found]]:
        return run_spread(train, {name: self.placed(case) for name, case in cases.items()})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(tmp_path_factory.mktemp("adapters"))


def together(case: Case, found: list[Found], name: str) -> Tensor:
    """[N] values of the whole batch, from those of its shards."""
    return spread_cases.together(found, name, batch_of(case).lengths)


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    assert one.keys() == other.keys()
    return max((gap(one[name], other[name]), name) for name in one)


EXACT = [name for name, case in CASES.items() if "precision" not in case.policy]


@pytest.mark.parametrize("name", EXACT)
def test_log_probs_and_those_of_the_reference_are_dtensors(name: str, runs: Runs) -> None:
    case, found, expected = CASES[name], runs.found[name], runs.dtensor[name]
    assert gap(together(case, found, "before"), expected.before) < LOGPROBS
    assert gap(together(case, found, "reference"), expected.reference) < LOGPROBS
    assert gap(expected.before, expected.reference) > 1e-2, "the adapters do nothing: this proves nothing"
    assert gap(expected.after, expected.before) > 1e-3


@pytest.mark.parametrize("name", EXACT)
def test_one_step_makes_of_the_adapters_what_dtensor_makes(name: str, runs: Runs) -> None:
    found, expected = runs.found[name], runs.dtensor[name]
    assert worst(found[0].first, expected.first)[0] < ADAPTERS
    assert not any(part.adapters or part.weights for part in found[1:])


@pytest.mark.parametrize("name", EXACT)
def test_four_steps_are_those_of_dtensor(name: str, runs: Runs) -> None:
    case, found, expected = CASES[name], runs.found[name], runs.dtensor[name]
    shards = {tuple(part.sequences): part.losses for part in found}
    losses = torch.tensor([*shards.values()]).sum(0)
    assert gap(losses, torch.tensor(expected.losses)) < 1e-4
    for part in found:
        torch.testing.assert_close(part.grad_norms, expected.grad_norms, rtol=1e-4, atol=1e-4)
    assert gap(together(case, found, "after"), expected.after) < 1e-4
    if case.model != "moe":  # transformers keeps all experts of a layer in one tensor
        assert worst(found[0].weights, expected.weights)[0] < 1e-4


@pytest.mark.parametrize("name", ["one bfloat16", *in_full(["tp2 bfloat16"])])
def test_bfloat16_is_as_close_to_float32_as_that_of_dtensor(name: str, runs: Runs) -> None:
    case, exact, rounded = CASES[name], runs.dtensor["one"], runs.dtensor[name]
    after = together(case, runs.found[name], "after")
    found, expected = (float((logprobs - exact.after).abs().mean()) for logprobs in (after, rounded.after))
    assert found < 1.5 * expected
    assert all(tensor.dtype is torch.float32 for tensor in runs.found[name][0].adapters.values())


@pytest.mark.parametrize("name", ["one, shared", *in_full(["tp2, shared"])])
def test_shared_rows_work_with_adapters(name: str, runs: Runs) -> None:
    assert runs.found[name][0].tree_ratio > 1.5


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.saves])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str, runs: Runs) -> None:
    for straight, resumed in zip(runs.found[name], runs.resumed[name], strict=True):
        assert resumed.losses == straight.losses[SAVED_AFTER:]
        assert resumed.grad_norms == straight.grad_norms[SAVED_AFTER:]
        assert torch.equal(resumed.after, straight.after)
        assert all(torch.equal(tensor, straight.adapters[key]) for key, tensor in resumed.adapters.items())


@pytest.mark.parametrize("name", [name for name, other in RESUMED.items() if other != name])
def test_a_checkpoint_continues_in_another_layout(name: str, runs: Runs) -> None:
    case, straight, resumed = CASES[name], runs.found[RESUMED[name]], runs.elsewhere[name]
    source = CASES[RESUMED[name]]
    assert gap(together(case, resumed, "after"), together(source, straight, "after")) < 1e-5


def test_a_checkpoint_has_the_adapters_alone(runs: Runs) -> None:
    size = sum(path.stat().st_size for path in (runs.folder / "one").glob("state-*"))
    factors = sum(tensor.numel() for tensor in runs.found["one"][0].adapters.values())
    assert size < 3 * 4 * factors * 1.2, "a master and two moments of 4 bytes for each element"


@pytest.mark.parametrize(
    "name", ["one", "one, some layers", *in_full(["one llama"]), "dp2", "tp2", "tp2, whole sequences", "pp2"]
)
def test_peft_reads_the_adapters_and_finds_the_same_log_probs(name: str, runs: Runs) -> None:
    from peft import PeftModel

    case = CASES[name]
    base = load_reference(runs.models[case.model])
    model = PeftModel.from_pretrained(base, str(runs.folder / case.saves / "adapters")).eval()
    batch = batch_of(case)
    after = together(case, runs.found[name], "after")
    assert gap(plain_logprobs(model, batch).detach(), after) < 1e-5
    merged = load_reference(runs.folder / case.saves / "merged")
    assert gap(plain_logprobs(merged, batch).detach(), after) < 1e-5
    with model.disable_adapter():
        assert gap(plain_logprobs(model, batch).detach(), together(case, runs.found[name], "reference")) < 1e-5


@pytest.mark.parametrize("name", ["tp2", "tp2, whole sequences", "pp2"])
def test_an_engine_over_the_trainers_weights_speaks_with_the_adapters(name: str, runs: Runs) -> None:
    (alone,) = runs.found["one"][0].spoken
    for part in runs.found[name]:
        (spoken,) = part.spoken
        assert [one.token_ids for one in spoken] == [one.token_ids for one in alone]
        for one, other in zip(spoken, alone, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
