"""Text in, text out: the shortest way to hear a model (``nemorl generate``)."""

from __future__ import annotations

from collections.abc import Sequence

from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.types import GenerationRequest

from nemorl_rl.data.tokenizer import Tokenizer, context_tokens
from nemorl_rl.models.hub_models import require_model
from nemorl_rl.placement.engines import standalone_generation
from nemorl_rl.rollouts.seeding import derive_seed


def respond(
    model: str,
    prompts: Sequence[str],
    *,
    generation: GenerationConfig,
    chat: bool | None = None,
    samples: int = 1,
    seed: int = 0,
) -> list[tuple[str, list[str]]]:
    """Responses of a model, in prompt order.

    Args:
        model: Hugging Face name or folder.
        prompts: Texts; each becomes one user turn, or is continued as it is.
        generation: Backend, temperature, longest response, …
        chat: Use the chat template. ``None``: if the model has one.
        samples: Responses per prompt.
        seed: Seeds the sampling.
    """
    require_model(model)
    tokenizer = Tokenizer.load(model)
    as_chat = tokenizer.has_chat_template if chat is None else chat
    requests = []
    for number, prompt in enumerate(prompts):
        turns = [{"role": "user", "content": prompt}]
        ids = tokenizer.encode_prompt(turns) if as_chat else tokenizer.encode(prompt)
        seeds = tuple(derive_seed(seed, number, sample) for sample in range(samples))
        requests.append(GenerationRequest(tuple(ids), generation.sampling(), seeds))
    # As long as these need, and no longer: a server may have been started for less than a run's default.
    longest = max((len(request.token_ids) for request in requests), default=1) + generation.max_new_tokens
    limit = max(2, min(longest, context_tokens(model) or longest))
    engine = standalone_generation(generation, PolicyConfig(model_name=model, max_sequence_tokens=limit))
    try:
        completions = engine.generate(requests)
    finally:
        engine.shutdown()
    texts = [[tokenizer.decode(completion.token_ids) for completion in group] for group in completions]
    return list(zip(prompts, texts, strict=True))
