"""The backend ``hf`` against the plain forward pass and ``generate`` of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.errors import BackendError, PluginNotFoundError
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_dtensor import HFGenerationConfig
from nemorl_dtensor.decode import RecomputingDecoder, build_decoder
from nemorl_dtensor.decode_llama import FAMILY, LlamaDecoder
from nemorl_dtensor.generation import HFGeneration
from nemorl_dtensor.model import load_model
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors.engines.shared_prompts import MIN_SHARED_TOKENS
from recorded_messages import Raises
from torch import Tensor

Folder = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
GEMMA3 = {**SIZES, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
STATES = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
MAMBA2 = {**STATES, "num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2, "chunk_size": 8}
# Left to itself it divides the weights of every second layer at its first forward pass.
RWKV = {**SIZES, "attention_hidden_size": 32, "num_hidden_layers": 3, "rescale_every": 1}
ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    *((name, SIZES) for name in FAMILY),
    ("llama", {**SIZES, "tie_word_embeddings": False, "attention_bias": True}),
    ("qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}),
    ("gpt2", GPT2),
    ("gemma3_text", GEMMA3),
    ("mamba", STATES),
    ("mamba2", MAMBA2),
    ("rwkv", RWKV),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Tiny model folders, one per set of arguments."""
    made: dict[str, Path] = {}

    def make(architecture: str = "qwen2", **sizes: Any) -> Path:
        key = f"{architecture} {sizes}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            write_tiny_model(made[key], architecture=architecture, **sizes)
        return made[key]

    return make


def _policy(folder: Path, **options: Any) -> PolicyConfig:
    return PolicyConfig(model_name=str(folder), init="random", **{"max_sequence_tokens": 128, **options})


def _model(policy: PolicyConfig, spread: float = 4.0) -> Any:
    """Random weights, spread out so that next-token distributions are far from uniform."""
    model = load_model(policy)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(spread)
    return model


def _handle(model: Any, version: int = 1) -> WeightHandle:
    def export() -> Iterator[Mapping[str, Tensor]]:
        for name, parameter in model.named_parameters():
            yield {name: parameter}

    return in_process_handle(export, version)


def _engine(model: Any, policy: PolicyConfig, *, end_ids: frozenset[int] | None = None, **options: Any) -> HFGeneration:
    """``end_ids`` overrides the model's, so that lengths are known."""
    engine = HFGeneration(GenerationConfig(), policy, WorkerContext(), _handle(model), HFGenerationConfig(**options))
    if end_ids is not None:
        object.__setattr__(engine._limits, "end_ids", end_ids)
    return engine


def _prompts(count: int, shortest: int = 1, longest: int = 14) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randrange(8, 80) for _ in range(rng.randint(shortest, longest))) for _ in range(count)]


def _expected_logprobs(model: Any, prompt: tuple[int, ...], completion: Completion, temperature: float) -> Tensor:
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


@pytest.mark.parametrize(("architecture", "sizes"), ARCHITECTURES)
def test_greedy_tokens_equal_transformers_generate(folder: Folder, architecture: str, sizes: dict[str, Any]) -> None:
    policy = _policy(folder(architecture, **sizes))
    model = _model(policy)
    prompts = _prompts(5)
    engine = _engine(model, policy, end_ids=frozenset())
    completions = engine.generate([GenerationRequest(prompt, GREEDY, (0, 1)) for prompt in prompts])
    for prompt, (first, second) in zip(prompts, completions, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :]
        assert first.token_ids == tuple(expected.tolist())
        assert first.token_ids == second.token_ids
        assert first.finish_reason == "length"


@pytest.mark.parametrize(("architecture", "sizes"), ARCHITECTURES)
def test_logprobs_equal_a_full_forward_pass(folder: Folder, architecture: str, sizes: dict[str, Any]) -> None:
    policy = _policy(folder(architecture, **sizes))
    model = _model(policy, spread=2.0 if architecture == "mamba" else 4.0)  # it exponentiates weights
    sampling = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=30)
    prompts = _prompts(6)
    # 5 rows at once: rows leave, others join, prompts of different lengths share the cache.
    engine = _engine(model, policy, end_ids=frozenset(range(8, 20)), max_batch_rows=5)
    results = engine.generate([GenerationRequest(prompt, sampling, (3, 4, 5)) for prompt in prompts])
    for prompt, completions in zip(prompts, results, strict=True):
        for completion in completions:
            expected = _expected_logprobs(model, prompt, completion, 0.7)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_logprobs_of_groups_whose_prompt_is_kept_once(folder: Folder, precision: str) -> None:
    policy = _policy(folder("qwen3", **SIZES), precision=precision)
    model = _model(policy, spread=4.0 if precision == "float32" else 2.0)
    prompts = _prompts(6, shortest=5, longest=45)
    assert min(map(len, prompts)) < MIN_SHARED_TOKENS < max(map(len, prompts))
    # 5 rows at once: groups of 3 are split, and rows of one prompt are joined by those of another.
    engine = _engine(model, policy, end_ids=frozenset(range(8, 20)), max_batch_rows=5)
    results = engine.generate([GenerationRequest(p, SamplingParams(max_new_tokens=30), (3, 4, 5)) for p in prompts])
    for prompt, completions in zip(prompts, results, strict=True):
        for completion in completions:
            expected = _expected_logprobs(model, prompt, completion, 1.0)
            close = 1e-4 if precision == "float32" else 0.1
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=close, rtol=0)


def test_the_family_is_decoded_by_hand_and_others_by_transformers(folder: Folder) -> None:
    for architecture in FAMILY:
        assert isinstance(build_decoder(load_model(_policy(folder(architecture, **SIZES))), 128), LlamaDecoder)
    sliding = {**SIZES, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    for architecture, sizes in (("gpt2", GPT2), ("qwen2", sliding)):
        model = load_model(_policy(folder(architecture, **sizes)))
        assert not isinstance(build_decoder(model, 128), LlamaDecoder)
    assert isinstance(build_decoder(load_model(_policy(folder("rwkv", **RWKV))), 128), RecomputingDecoder)


def test_bfloat16_logprobs_are_close_to_a_full_forward_pass(folder: Folder) -> None:
    policy = _policy(folder("qwen2", **SIZES), precision="bfloat16")
    model = _model(policy, spread=2.0)
    prompt = _prompts(1)[0]
    [[completion]] = _engine(model, policy, end_ids=frozenset()).generate([GenerationRequest(prompt, SamplingParams())])
    expected = _expected_logprobs(model, prompt, completion, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
@pytest.mark.slow
def test_samples_do_not_depend_on_batching(folder: Folder, architecture: str) -> None:
    policy = _policy(folder(architecture, **(SIZES if architecture == "qwen2" else GPT2)))
    model = _model(policy)
    end_ids = frozenset(range(8, 14))
    requests = [
        GenerationRequest(prompt, SamplingParams(max_new_tokens=5 + 3 * index), (index, 100 + index))
        for index, prompt in enumerate(_prompts(12))
    ]
    wide = _engine(model, policy, end_ids=end_ids).generate(requests)
    narrow = _engine(model, policy, end_ids=end_ids, max_batch_rows=3).generate(requests)
    tight = _engine(model, policy, end_ids=end_ids, kv_cache_tokens=150).generate(requests)
    alone = [_engine(model, policy, end_ids=end_ids).generate([request])[0] for request in requests]
    tokens = [[completion.token_ids for group in result for completion in group] for result in (wide, narrow, tight)]
    assert tokens[0] == tokens[1] == tokens[2] == [completion.token_ids for group in alone for completion in group]


def test_seeds_decide_the_sample(folder: Folder) -> None:
    policy = _policy(folder(**SIZES))
    engine = _engine(_model(policy, spread=1.0), policy, end_ids=frozenset())
    [group] = engine.generate([GenerationRequest((9, 10), SamplingParams(max_new_tokens=20), (1, 2, 1))])
    assert group[0] == group[2]
    assert group[0].token_ids != group[1].token_ids


def test_a_response_ends_with_its_stop_token(folder: Folder) -> None:
    policy = _policy(folder(**SIZES))
    engine = _engine(_model(policy, spread=1.0), policy, end_ids=frozenset({8, 9, 10}))
    sampling = SamplingParams(max_new_tokens=100, stop_token_ids=(11, 12))
    [group] = engine.generate([GenerationRequest((20, 21), sampling, tuple(range(20)))])
    ends = {8, 9, 10, 11, 12}
    for completion in group:
        assert ends.isdisjoint(completion.token_ids[:-1])
        assert (completion.token_ids[-1] in ends) == (completion.finish_reason == "stop")
        assert len(completion.token_ids) == len(completion.logprobs)
    assert {completion.token_ids[-1] for completion in group} & {11, 12}


def test_the_models_own_end_tokens_are_known(folder: Folder) -> None:
    policy = _policy(folder(**SIZES))
    engine = _engine(load_model(policy), policy)
    assert engine._limits.end_ids == Tokenizer.load(policy.model_name).stop_token_ids


def test_a_stop_string_across_tokens_ends_the_response_and_stays(folder: Folder) -> None:
    policy = _policy(folder(**SIZES))
    model, tokenizer = _model(policy, spread=1.0), Tokenizer.load(policy.model_name)
    engine = _engine(model, policy, end_ids=frozenset())
    [[free]] = engine.generate([GenerationRequest((20, 21), SamplingParams(max_new_tokens=40), (5,))])
    stop = tokenizer.decode(free.token_ids[10:13])
    sampling = SamplingParams(max_new_tokens=40, stop_strings=("never there", stop))
    [[stopped]] = engine.generate([GenerationRequest((20, 21), sampling, (5,))])
    assert stopped.finish_reason == "stop"
    assert tokenizer.decode(stopped.token_ids).endswith(stop)
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) <= 13


def test_a_sequence_never_exceeds_its_limit(folder: Folder) -> None:
    policy = _policy(folder(**SIZES), max_sequence_tokens=16)
    engine = _engine(_model(policy), policy, end_ids=frozenset())
    prompts = [(9,) * size for size in (1, 10, 15)]
    results = engine.generate([GenerationRequest(prompt, SamplingParams(max_new_tokens=8)) for prompt in prompts])
    assert [len(group[0].token_ids) for group in results] == [8, 6, 1]
    assert {group[0].finish_reason for group in results} == {"length"}


def test_a_group_is_prefilled_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = _policy(folder(**SIZES))
    engine = _engine(_model(policy), policy)
    prefilled: list[tuple[int, ...]] = []
    plain = LlamaDecoder._prefill

    def spy(self: LlamaDecoder, prompts: list[tuple[int, ...]]) -> Any:
        prefilled.extend(prompts)
        return plain(self, prompts)

    monkeypatch.setattr(LlamaDecoder, "_prefill", spy)
    prompts = [(9, 10, 11), (12, 13), (9, 10, 11)]
    engine.generate([GenerationRequest(prompt, GREEDY, (0, 1, 2, 3)) for prompt in prompts])
    assert sorted(prefilled) == [(9, 10, 11), (12, 13)]


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_weights_are_shared_with_the_trainer(folder: Folder, architecture: str) -> None:
    policy = _policy(folder(architecture, **(SIZES if architecture == "qwen2" else GPT2)))
    model = _model(policy)
    engine = _engine(model, policy, end_ids=frozenset())
    generating = dict(engine._versions.newest.model._model.named_parameters())
    for name, parameter in model.named_parameters():
        assert generating[name].data_ptr() == parameter.data_ptr()
    request = GenerationRequest((9, 10, 11), GREEDY)
    [[before]] = engine.generate([request])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    engine.update_weights(_handle(model, 2), 2)
    [[after]] = engine.generate([request])
    assert (before.weight_version, after.weight_version) == (1, 2)
    expected = _expected_logprobs(model, (9, 10, 11), after, 1.0)
    torch.testing.assert_close(torch.tensor(after.logprobs), expected, atol=1e-4, rtol=0)
    assert before.logprobs != after.logprobs


def test_new_tensors_replace_the_previous_ones(folder: Folder) -> None:
    policy = _policy(folder(**SIZES))
    engine, other = _engine(_model(policy), policy), _model(policy, spread=3.0)
    engine.update_weights(_handle(other, 5), 5)
    [[completion]] = engine.generate([GenerationRequest((9, 10), GREEDY)])
    expected = _expected_logprobs(other, (9, 10), completion, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_without_a_handle_the_model_is_loaded(folder: Folder) -> None:
    policy = _policy(folder(**SIZES))
    engine = HFGeneration(GenerationConfig(), policy, WorkerContext(), None, HFGenerationConfig())
    [[completion]] = engine.generate([GenerationRequest((9, 10), GREEDY)])
    expected = _expected_logprobs(load_model(policy), (9, 10), completion, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    assert completion.weight_version == 0


def test_mistakes_are_explained(folder: Folder, raises: Raises) -> None:
    policy = _policy(folder(**SIZES))
    engine = _engine(_model(policy), policy)
    cases = [
        (GenerationRequest((), GREEDY), 1),
        (GenerationRequest((9,) * 128, GREEDY), 128),
        (GenerationRequest((9, 4000), GREEDY), 4000),
        (GenerationRequest((9,), SamplingParams(max_new_tokens=0)), 0),
    ]
    for request, fact in cases:
        with raises(BackendError, fact):
            engine.generate([GenerationRequest((9,), GREEDY), request])
    with raises(PluginNotFoundError, "disk"):
        engine.update_weights(WeightHandle("disk", 1, None), 1)
    with raises(BackendError):
        _engine(torch.nn.Module(), policy)
    with raises(BackendError, "model.norm.weight", 3):
        engine.update_weights(in_process_handle(lambda: iter([{"model.norm.weight": torch.ones(3)}]), 2), 2)
    with raises(BackendError):
        engine.update_weights(in_process_handle(lambda: iter([{"nonsense.weight": torch.ones(3)}]), 2), 2)


def test_diverged_weights_are_reported_and_the_engine_survives(folder: Folder, raises: Raises) -> None:
    policy = _policy(folder(**SIZES))
    model = _model(policy)
    engine = _engine(model, policy)
    norm = model.model.norm.weight
    with torch.no_grad():
        norm.fill_(float("nan"))
    with raises(BackendError):
        engine.generate([GenerationRequest((9, 10), SamplingParams())])
    with torch.no_grad():
        norm.fill_(1.0)
    assert len(engine.generate([GenerationRequest((9, 10), SamplingParams(), (1, 2))])[0]) == 2


def test_no_requests_and_no_seeds_are_fine(folder: Folder, raises: Raises) -> None:
    policy = _policy(folder(**SIZES))
    engine = _engine(_model(policy), policy)
    assert engine.generate([]) == []
    assert engine.generate([GenerationRequest((9,), GREEDY, ())]) == [[]]
    engine.shutdown()
    engine.shutdown()
    with raises(BackendError):
        engine.generate([])
