"""Sampling within a schema: what comes out satisfies it, and log-probs are of what it allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_agents.gateway.gateway import Gateway
from nemorl_rl.agents.contract import ConstraintError, EpisodeLimits
from nemorl_rl.agents.policy import LivePolicy, Sampler
from nemorl_rl.agents.record import sequences
from nemorl_rl.chat.codec import codec_of
from nemorl_rl.chat.conversation import Conversation
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.placement.engines import standalone_generation
from nemorl_testing.models import load_reference, response_logprobs, tiny_model
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from vllm_engines import KV_CACHE_GIB, build_generator

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
PROMPT = (9, 18, 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a token for every byte, so that it can write JSON."""
    found = tmp_path_factory.mktemp("bytes")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({letter: number for number, letter in enumerate([*letters, "<eos>"])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")  # type: ignore[no-untyped-call]
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}|{% endfor %}<think>"
    wrapped.save_pretrained(found)
    config = AutoConfig.from_pretrained(tiny_model())
    config.vocab_size, config.eos_token_id, config.bos_token_id, config.pad_token_id = 257, 256, None, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(found)  # type: ignore[no-untyped-call]
    return found


@pytest.fixture(scope="module")
def generator(folder: Path) -> Iterator[Any]:
    found = build_generator(folder)
    yield found
    found.shutdown()


def test_a_response_satisfies_its_schema_and_others_of_the_batch_are_free(generator: Any, folder: Path) -> None:
    within = SamplingParams(max_new_tokens=200, json_schema=SCHEMA)
    free = SamplingParams(max_new_tokens=8)
    bound, others = generator.generate([GenerationRequest(PROMPT, one, tuple(range(16))) for one in (within, free)])
    tokenizer = Tokenizer.load(str(folder))
    # A random model may write white space, which JSON allows anywhere, until it is cut.
    whole = [completion for completion in bound if completion.finish_reason == "stop"]
    assert len(whole) >= 4
    for completion in whole:
        found = json.loads(tokenizer.decode(completion.token_ids))
        assert set(found) == {"a", "b"}
        assert found["a"] in (1, 2)
        assert isinstance(found["b"], bool)
    model = load_reference(folder)
    for completion in others:
        wanted = response_logprobs(model, PROMPT, completion.token_ids, 1.0)
        assert completion.logprobs == pytest.approx(wanted, abs=1e-4)


def test_logprobs_are_of_what_the_schema_allowed(generator: Any, folder: Path) -> None:
    [group] = generator.generate(
        [GenerationRequest(PROMPT, SamplingParams(max_new_tokens=64, json_schema=SCHEMA), (1, 2))]
    )
    model = load_reference(folder)
    for completion in group:
        whole = response_logprobs(model, PROMPT, completion.token_ids, 1.0)
        # A token that is the only one allowed has log-prob 0, whatever the model thinks of it.
        assert all(own >= free - 1e-4 for own, free in zip(completion.logprobs, whole, strict=True))
        assert sum(abs(own) < 1e-6 for own in completion.logprobs) >= 5
        assert math.fsum(completion.logprobs) > math.fsum(whole) + 5
        torch.testing.assert_close(torch.tensor(completion.logprobs).clamp(max=0), torch.tensor(completion.logprobs))


@pytest.mark.parametrize(
    "schema", ['{"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)"}}}', "{"]
)
def test_a_schema_without_a_grammar_is_refused_alone(generator: Any, schema: str) -> None:
    with pytest.raises(ConstraintError, match=r"vLLM\scannot\ssample\swithin\sthis\sschema"):
        generator.generate([GenerationRequest(PROMPT, SamplingParams(max_new_tokens=8, json_schema=schema), (1,))])
    [[fine]] = generator.generate([GenerationRequest(PROMPT, SamplingParams(max_new_tokens=8), (1,))])
    assert fine.token_ids


def test_a_client_of_openai_gets_json_that_trains_nothing(folder: Path) -> None:
    options = {"backend": {"name": "vllm", "kv_cache_gib": KV_CACHE_GIB}, "max_new_tokens": 200}
    generation = GenerationConfig.model_validate(options)
    engine = standalone_generation(generation, PolicyConfig(model_name=str(folder), max_sequence_tokens=250))
    codec = codec_of(Tokenizer.load(str(folder)))
    limits = EpisodeLimits(max_sequence_tokens=250, max_new_tokens=200, max_calls=99, timeout_s=60.0)
    sampler = Sampler(engine, generation.sampling(), honours_clients=False)
    policy = LivePolicy(sampler, Conversation(codec, 5), episode_id="episode", limits=limits, seed=5)
    form: Any = {"type": "json_schema", "json_schema": {"name": "pair", "schema": json.loads(SCHEMA)}}
    found = []
    try:
        with Gateway() as gateway:
            access = gateway.open(policy)
            client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key)
            ask: Any = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
            for _ in range(12):
                answer = client.chat.completions.create(**ask, response_format=form)
                told = answer.choices[0]
                found += [json.loads(told.message.content or "")] if told.finish_reason == "stop" else []
            worse = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)"}}}
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": worse}}
            with pytest.raises(openai.BadRequestError, match="response_format:"):
                client.chat.completions.create(**ask, response_format=form)
            assert gateway.close(access).failure is None
    finally:
        engine.shutdown()
    assert found
    assert all(set(one) == {"a", "b"} for one in found)
    assert all(not any(part.response_mask) for part in sequences(policy.calls))
