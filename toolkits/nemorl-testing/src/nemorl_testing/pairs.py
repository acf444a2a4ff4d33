"""The pair check: what the generator says about its own samples is what the trainer computes for them."""

from __future__ import annotations

from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import in_process_handle
from nemorl_tensors import TokenBatch

from nemorl_testing.backends import build_generator, build_trainer, expect_close, require_in_process
from nemorl_testing.batches import WeightedNLL
from nemorl_testing.generation_backends import PROMPTS
from nemorl_testing.kit import Subject, expect


def check_generator_speaks_for_the_trained_policy(subject: Subject) -> None:
    """After train_step and update_weights, the generator's log-probs are the trainer's. (DESIGN 7.8)"""
    require_in_process(subject)
    trainer = build_trainer(subject)
    generator = build_generator(subject, in_process_handle(trainer.export_weights, 0))
    params = SamplingParams(temperature=0.8, max_new_tokens=10)
    requests = [GenerationRequest(ids, params, (1, 2)) for ids in PROMPTS]
    for version in range(3):
        ids, masks, sampled = [], [], []
        for request, completions in zip(requests, generator.generate(requests), strict=True):
            for completion in completions:
                expect(completion.weight_version == version, f"version {completion.weight_version}, not {version}")
                blank, said = len(request.token_ids), len(completion.token_ids)
                ids.append([*request.token_ids, *completion.token_ids])
                masks.append([False] * blank + [True] * said)
                sampled += [0.0] * blank + list(completion.logprobs)
        batch = TokenBatch.from_sequences(ids, masks, temperature=params.temperature)
        batch = batch.with_tokens(advantages=batch.loss_weights.new_tensor(sampled))
        found = trainer.get_logprobs(batch)
        what = f"the trainer's log-prob of a token sampled from version {version}"
        expect_close(found, batch["advantages"], subject.settings.tolerance, what)
        trainer.train_step(batch, WeightedNLL())
        moved = float((trainer.get_logprobs(batch) - found).abs().max())
        expect(moved > 10 * subject.settings.tolerance, f"a step moved log-probs by {moved}: this proves nothing")
        generator.update_weights(in_process_handle(trainer.export_weights, version + 1), version + 1)
