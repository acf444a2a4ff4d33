"""Log-probs of the tokens of prompts, by the code that scores what is trained on (``model_head``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.rows import default_microbatch_tokens, plan_microbatches, to_rows
from nemorl_tensors.engines.steps import PLACE, with_places

from nemorl_dtensor.model_head import Scorer


@torch.inference_mode()
def prompt_logprobs(scorer: Scorer, prompts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
    """float32 nats of ``softmax(logits)`` for every token of each prompt, 0.0 for its first.

    Args:
        scorer: The model.
        prompts: Token ids, not empty.
    """
    device = scorer.weight.device
    masks = [[False, *[True] * (len(prompt) - 1)] for prompt in prompts]
    batch = with_places(TokenBatch.from_sequences(prompts, masks))
    found = torch.zeros(batch.num_tokens)
    for members in plan_microbatches(batch, default_microbatch_tokens(device.type)):
        part = batch.select(members).to(device)
        rows = to_rows(part, packed=False)
        if rows.targets.numel():
            found[part[PLACE][rows.targets].cpu()] = scorer.score(rows, 1.0).cpu()
    return [tuple(piece.tolist()) for piece in torch.split(found, batch.lengths.tolist())]
