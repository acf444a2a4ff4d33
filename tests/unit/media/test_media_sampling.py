"""What a model that sees samples with the backend `hf` is what it is trained on; training moves what is asked for."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.errors import BackendError
from nemorl.media import media_runs
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, Prompt, SamplingParams
from nemorl_dtensor.config import DTensorConfig, HFGenerationConfig
from nemorl_dtensor.generation import HFGeneration
from nemorl_dtensor.training import DTensorBackend
from nemorl_media.blanks import blank_image
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.rollouts.prompts import to_prompt
from nemorl_sft.loss import NLLLoss
from nemorl_tensors import TokenBatch
from nemorl_testing.seeing import drawing, tiny_sight
from recorded_messages import Raises

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "idefics3", "llava", "gemma3"]
SAMPLED = SamplingParams(max_new_tokens=6, prompt_logprobs=True, ignore_eos=True)


def policy(family: str, **fields: Any) -> PolicyConfig:
    return PolicyConfig(model_name=str(tiny_sight(family)), max_sequence_tokens=512, **fields)


def trainer(family: str, layout: str = "auto", **fields: Any) -> DTensorBackend:
    config = DTensorConfig(layout=layout)
    return DTensorBackend(policy(family, **fields), WorkerContext(), config, reference=False, head="language_model")


@cache
def prompts(family: str) -> tuple[Prompt, ...]:
    """Two of equal words about other images of one size, one of two images, one of none, one of another size."""
    tokenizer = Tokenizer.of(policy(family))
    rows: list[dict[str, Any]] = [
        {"prompt": "what?", "image": drawing(1).data},
        {"prompt": "what?", "image": drawing(2).data},
        {"prompt": "and?", "images": [drawing(1).data, drawing(3, 40, 100).data]},
        {"prompt": [{"role": "user", "content": "what?"}]},
        {"prompt": "what?", "image": drawing(4, 120, 120).data},
    ]
    return tuple(to_prompt(row, number, tokenizer) for number, row in enumerate(rows))


def batch(asked: tuple[Prompt, ...], answers: list[tuple[int, ...]]) -> TokenBatch:
    pairs = list(zip(asked, answers, strict=True))
    return TokenBatch.from_sequences(
        [[*prompt.token_ids, *answer] for prompt, answer in pairs],
        [[False] * len(prompt.token_ids) + [True] * len(answer) for prompt, answer in pairs],
        media=[item for prompt in asked for item in prompt.media],
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probs_are_those_of_training(family: str) -> None:
    asked, engine = (
        prompts(family),
        HFGeneration(GenerationConfig(), policy(family), WorkerContext(), None, HFGenerationConfig()),
    )
    requests = [GenerationRequest(one.token_ids, SAMPLED, (1, 2), media=one.media) for one in asked]
    found = engine.generate(requests)
    engine.shutdown()
    both = tuple(one for one in asked for _ in range(2))
    answers = [completion for group in found for completion in group]
    seen = batch(both, [completion.token_ids for completion in answers])
    scored = trainer(family).get_logprobs(seen)
    sampled = torch.tensor([lp for completion in answers for lp in completion.logprobs])
    assert torch.allclose(scored[seen.mask], sampled, atol=1e-5)
    # The same words about another image: other log-probs of the prompt behind it.
    ends = [next(media_runs(one.token_ids))[1] for one in asked[:2]]
    [one, other] = [found[number][0].prompt_logprobs[ends[number] :] for number in (0, 1)]
    assert len(one) == len(other)
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-2


def test_a_request_must_bring_what_it_shows_and_a_response_ends_where_it_would_show_something(raises: Raises) -> None:
    engine = HFGeneration(GenerationConfig(), policy("qwen2_5_vl"), WorkerContext(), None, HFGenerationConfig())
    one = prompts("qwen2_5_vl")[0]
    with raises(BackendError):
        engine.generate([GenerationRequest(one.token_ids, SAMPLED)])
    likely = SamplingParams(max_new_tokens=400, temperature=5.0, ignore_eos=True)
    found = engine.generate([GenerationRequest(one.token_ids, likely, tuple(range(16)), media=one.media)])
    engine.shutdown()
    placeholder = Tokenizer.of(policy("qwen2_5_vl")).inner.convert_tokens_to_ids("<|image_pad|>")
    ended = [completion for completion in found[0] if completion.finish_reason == "stop"]
    assert ended
    assert all(completion.token_ids[-1] == placeholder for completion in ended)
    assert all(placeholder not in completion.token_ids[:-1] for completion in found[0])


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_another_image_changes_loss_and_gradient(layout: str) -> None:
    asked = prompts("qwen2_5_vl")
    norms = []
    for swapped in (False, True):
        backend = trainer("qwen2_5_vl", layout)
        order = (asked[1], asked[0], *asked[2:]) if swapped else asked
        metrics = backend.train_step(batch(order, [(40 + n, 41, 42 + n) for n in range(5)]), NLLLoss())
        norms.append(float(metrics["grad_norm"].value))  # type: ignore[union-attr]
    assert abs(norms[0] - norms[1]) > 1e-4 * norms[0]


def changed(before: dict[str, torch.Tensor], backend: DTensorBackend) -> set[str]:
    """Parts of the model whose tensors are others now."""
    moved = (name for name, tensor in backend._model.state_dict().items() if not torch.equal(before[name], tensor))
    return {"merger" if "merger" in name else "tower" if "visual" in name else "text" for name in moved}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"text", "merger"}),
        ({"media": {"train": ("connector", "tower")}}, {"text", "merger", "tower"}),
        ({"media": {"train": ()}}, {"text"}),
        ({"lora": {"rank": 2}}, {"text"}),
    ],
)
def test_the_tower_stays_as_it_is_unless_it_is_named(fields: dict[str, Any], expected: set[str]) -> None:
    backend = trainer("qwen2_5_vl", optimizer={"lr": 1e-2}, **fields)
    before = {name: tensor.clone() for name, tensor in backend._model.state_dict().items()}
    for _ in range(2):  # the first step of adapters moves one of their factors alone
        backend.train_step(batch(prompts("qwen2_5_vl"), [(40, 41)] * 5), NLLLoss())
    assert changed(before, backend) == expected


def test_a_backend_of_text_alone_refuses_a_batch_with_images(raises: Raises) -> None:
    from nemorl_testing.models import tiny_model

    text = PolicyConfig(model_name=str(tiny_model()))
    backend = DTensorBackend(text, WorkerContext(), DTensorConfig(), reference=False, head="language_model")
    item = blank_image()
    shown = TokenBatch.from_sequences([[5, *item.token_ids(2), 6]], [[False] * 3 + [True]], media=[item])
    with raises(BackendError):
        backend.get_logprobs(shown)
