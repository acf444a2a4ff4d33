"""The step of distillation from oneself: the policy responds, reads its responses behind privileged prompts, updates.

# N = tokens of all sequences concatenated, K = likeliest tokens of the teacher
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from nemorl.errors import ConfigIssue, DataError, UsageError
from nemorl.metrics import Mean, Metrics
from nemorl.resources.policies import TrainingPolicy
from nemorl.types import Row, Sample, Samples
from nemorl_rl.audit.dead_inputs import reached, require_reached
from nemorl_tensors import KL_ESTIMATORS, TokenBatch, masked_mean
from torch import Tensor

from nemorl_distillation.contexts import given_text, placeholders, privileged_prompt
from nemorl_distillation.privileged import PrivilegedBatch, behind_prompts
from nemorl_distillation.self_config import INITIAL, ColumnContextConfig, SelfTaughtConfig
from nemorl_distillation.told_inputs import FIX as TOLD_FIX
from nemorl_distillation.told_inputs import kind_of, told_swaps
from nemorl_distillation.trainer import TaughtTrainer
from nemorl_distillation.vocabulary import model_ids

S = TypeVar("S", bound=SelfTaughtConfig)
C = TypeVar("C", bound=ColumnContextConfig)


class SelfTaughtTrainer(TaughtTrainer[S]):
    """Base of the algorithms whose teacher is the policy, told more. One defines ``contexts``."""

    told: Metrics
    """How many responses of this step the teacher read"""
    unproven: set[str]
    """Placeholders of ``teacher_prompt`` of which nobody knows yet that the teacher reads what stands there"""

    def setup(self) -> None:
        self.loss = self.config.build_loss()
        self.told = {}
        self.unproven = {*placeholders(self.config.teacher_prompt)} & self.config.tells
        if self.config.compare == "topk":
            token_ids = model_ids(self.config.policy.model_name)
            if self.config.topk > token_ids:
                raise UsageError(
                    f"topk is {self.config.topk}, the policy has {token_ids} tokens to choose from",
                    fix=f"set topk to {token_ids} or less",
                )

    def contexts(self, samples: Samples) -> list[Mapping[str, str] | None]:
        """Of each response what the teacher's prompt says beside the task, by placeholder; None: there is nothing."""
        raise NotImplementedError(f"{type(self).__name__} must define contexts()")

    def preflight(self) -> Iterator[ConfigIssue]:
        yield from super().preflight()
        if self.environment.drives_policy:
            what = f"{self.environment.owner} writes prompts of its own, before which nothing can be put"
            yield ConfigIssue("environment", what, "use one that answers responses, or an algorithm with rewards")

    def ask_teachers(self, samples: Samples, batch: TokenBatch) -> TokenBatch:
        """The batch with the fields that the loss requires; responses that nobody reads train nothing."""
        if self.unproven:
            self.require_told(samples, batch)
        behind = self.privileged(samples, batch)
        batch = behind.taught(batch)
        if self.config.compare == "sampled":
            logprobs = torch.zeros(batch.num_tokens)
            logprobs[behind.own] = self._read(behind.batch)[behind.theirs]
            return batch.with_tokens(teacher_logprobs=logprobs)
        ids_NK = torch.zeros(batch.num_tokens, self.config.topk, dtype=torch.int64)
        logprobs_NK = torch.full(ids_NK.shape, -torch.inf)
        if len(behind.batch):
            ids, logprobs = self._teacher.get_topk_logprobs(behind.batch, self.config.topk)
            ids_NK[behind.own], logprobs_NK[behind.own] = ids[behind.theirs], logprobs[behind.theirs]
        return batch.with_tokens(candidate_ids=ids_NK, teacher_logprobs=logprobs_NK)

    def reverse_kl(self, samples: Samples, batch: TokenBatch) -> float:
        """Over the responses that the teacher reads."""
        behind = self.privileged(samples, batch)
        student, teacher = self.run.policy.get_logprobs(batch)[behind.own], self._read(behind.batch)[behind.theirs]
        return masked_mean(KL_ESTIMATORS["k3"](student, teacher), batch.mask[behind.own]).value

    def privileged(self, samples: Samples, batch: TokenBatch) -> PrivilegedBatch:
        """The responses as the teacher reads them."""
        prompts = [
            None if told is None else self._prompt_of(sample, told)
            for sample, told in zip(samples, self.contexts(samples), strict=True)
        ]
        limit = self.config.policy.max_sequence_tokens
        behind = behind_prompts(batch, [len(sample.prompt.token_ids) for sample in samples], prompts, limit)
        read, asked = int(behind.is_read.sum()), sum(prompt is not None for prompt in prompts)
        self.told = {"taught_frac": Mean(read, len(samples)), "no_room_frac": Mean(asked - read, len(samples))}
        return behind

    def require_told(self, samples: Samples, batch: TokenBatch) -> None:
        """Before anything is learnt of a text: the teacher says something else where it reads another's.

        Raises:
            BackendError: it does not.
        """
        found = reached(
            told_swaps(
                batch,
                [len(sample.prompt.token_ids) for sample in samples],
                self.contexts(samples),
                lambda index, told: self._prompt_of(samples[index], told),
                sorted(self.unproven),
                self.config.policy.max_sequence_tokens,
            ),
            self._read,
        )
        require_reached(found, TOLD_FIX)
        self.unproven -= {name for name in self.unproven if kind_of(name) in found}

    def _prompt_of(self, sample: Sample, told: Mapping[str, str]) -> list[int]:
        return privileged_prompt(sample.prompt, self.config.teacher_prompt, told, self.tokenizer)

    def describe(self, samples: Samples) -> Metrics:
        return {**super().describe(samples), **self.told}

    @property
    def _teacher(self) -> TrainingPolicy:
        return self.run.auxiliary_models.get(INITIAL, self.run.policy)

    def _read(self, batch: TokenBatch) -> Tensor:
        """[tokens of ``batch``] float32 nats that the teacher gives to each."""
        if not len(batch):
            return torch.zeros(0)
        return self._teacher.get_logprobs(batch, "reference" if self.config.needs_reference else "policy")


class ColumnContextTrainer(SelfTaughtTrainer[C]):
    """The privileged text is in a column of the data."""

    def contexts(self, samples: Samples) -> list[Mapping[str, str] | None]:
        (name,), column = self.config.tells, self.config.context_column
        return [{name: given_text(sample.prompt.row, column)} for sample in samples]

    def row_problems(self, rows: Sequence[Row]) -> Iterator[ConfigIssue]:
        yield from super().row_problems(rows)
        try:
            for row in rows:
                given_text(row, self.config.context_column)
        except DataError as error:
            yield ConfigIssue("data", error.message, error.fix)
