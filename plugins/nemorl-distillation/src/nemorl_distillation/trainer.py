"""The step of distillation: the student responds, teachers read, the student updates.

``TaughtTrainer`` is the step, whoever teaches. ``ModelTaughtTrainer`` has teachers that are models of their own, and
two algorithms, which differ in what they ask teachers and in the loss they make of it.

# N = tokens of all sequences concatenated, S = teachers per token, K = likeliest tokens of one
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

import torch
from nemorl.errors import ConfigIssue, DataError, UsageError
from nemorl.metrics import Metrics
from nemorl.resources.policies import TrainingPolicy
from nemorl.types import Row, Samples
from nemorl_rl.environments import Unscored
from nemorl_rl.environments.sources import as_environment
from nemorl_rl.rollouts.engine import RolloutPlan, rollout_metrics
from nemorl_rl.rollouts.prompts import to_prompts
from nemorl_rl.rollouts.seeding import derive_seed
from nemorl_rl.trainer import RolloutTrainer
from nemorl_tensors import TokenBatch

from nemorl_distillation.config import DistillationConfig, OPDConfig, TaughtConfig, TeacherConfig, TeacherModels
from nemorl_distillation.loss import TopKDistillationLoss
from nemorl_distillation.other_tokens import OtherTokens
from nemorl_distillation.reverse_kl import SampledReverseKLLoss
from nemorl_distillation.teachers import (
    Reader,
    SameTokens,
    Teacher,
    Turn,
    given_count,
    given_sample,
    sampled_logprobs,
    turns,
)
from nemorl_distillation.vocabulary import shared_vocabulary

T = TypeVar("T", bound=TaughtConfig)
M = TypeVar("M", DistillationConfig, OPDConfig)


class TaughtTrainer(RolloutTrainer[T]):
    """Base of all algorithms whose only signal is a teacher. One defines ``loss`` in ``setup``, and what is left open
    below."""

    loss: TopKDistillationLoss | SampledReverseKLLoss
    compares_held_out: ClassVar[bool] = True
    """Validation measures how far the student is from its teacher"""

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        # 1. The student responds: it is taught about the states that it gets itself into.
        samples = self.respond(rows)

        # 2. Teachers read the responses and say, token by token, what they think of them.
        with self.run.timer.phase("teacher_logprob_inference"):
            batch = self.ask_teachers(samples, self.to_batch(samples))
        first_loss = None
        if isinstance(self.loss, SampledReverseKLLoss) and not self.loss.on_policy:
            first_loss = replace(self.loss, on_policy=True)
        minibatches = self.cut(samples, batch, self.config.num_minibatches, first_loss=first_loss)

        # 3. Update, then publish: the next responses must come from the new weights.
        updates = self.update_policy(self.loss, minibatches, first_loss=first_loss)
        self.sync_weights()
        return {**self.describe(samples), **updates}

    def validate(self, rows: Sequence[Row]) -> dict[str, float]:
        """``reverse_kl``: nats per token between student and teacher on new responses to held-out prompts.

        The k3 estimate from the sampled tokens. Where there is an environment, its metrics too.
        """
        scored = super().validate(rows) if self.has_rewards else {}
        if not self.compares_held_out:
            return scored
        began_s = time.monotonic()
        samples = self.held_out(rows)
        if not self.has_rewards:
            self.recorder.rollout(samples, "validation", self.step, began_s)
        batch = self.to_batch(samples)
        found = {name: metric.value for name, metric in rollout_metrics(samples).items()}
        return {
            "reverse_kl": self.reverse_kl(samples, batch),
            "avg_length": found["mean_gen_tokens_per_sample"],
            "truncation_rate": found["truncation_rate"],
            **scored,
        }

    # What an algorithm defines

    def ask_teachers(self, samples: Samples, batch: TokenBatch) -> TokenBatch:
        """The batch of the samples with what the loss reads of teachers."""
        raise NotImplementedError(f"{type(self).__name__} must define ask_teachers()")

    def reverse_kl(self, samples: Samples, batch: TokenBatch) -> float:
        """Nats per token between the student and its teachers."""
        raise NotImplementedError(f"{type(self).__name__} must define reverse_kl()")

    def respond(self, rows: Sequence[Row]) -> Samples:
        """The responses of this step."""
        return self.collect(rows)

    def held_out(self, rows: Sequence[Row]) -> Samples:
        """The responses that validation compares."""
        sampling = self.config.sampling(temperature=self.temperature)
        plan = RolloutPlan(1, sampling, self.config.max_turns)
        seed = derive_seed(self.config.seed, "validation", "reverse_kl")
        return self.rollouts.collect(to_prompts(rows, self.tokenizer), plan, seed=seed)

    # What follows from the config

    def open_inputs(self) -> None:
        """An environment is not needed: without one, nobody judges the responses."""
        self.environment = as_environment(self._scorer) or Unscored()

    @property
    def has_rewards(self) -> bool:
        """Something gives rewards, which then count for validation."""
        return not isinstance(self.environment, Unscored)

    @property
    def batch_size(self) -> int:
        return self.config.num_prompts_per_step

    @property
    def planned_updates(self) -> int:
        return self.total_steps * self.config.num_minibatches

    @property
    def rollout_plan(self) -> RolloutPlan:
        config = self.config
        return RolloutPlan(config.num_generations_per_prompt, config.sampling(), config.max_turns)

    @property
    def temperature(self) -> float:
        """That of the log-probs of both models: the sampler's, 1 where it is greedy."""
        return self.config.generation.temperature or 1.0

    def to_batch(self, samples: Samples) -> TokenBatch:
        """The samples as tensors."""
        return TokenBatch.from_samples(
            samples, loss_aggregation=self.config.loss_aggregation, temperature=self.temperature
        )

    def describe(self, samples: Samples) -> Metrics:
        """Metrics of the rollout; of rewards only where something gives them."""
        rewards = () if self.has_rewards else ("reward", "accuracy")
        return {name: metric for name, metric in rollout_metrics(samples).items() if name not in rewards}


class ModelTaughtTrainer(TaughtTrainer[M]):
    """Its teachers are models of their own, which the run holds beside the student."""

    def setup(self) -> None:
        self.teachers = roster(self.config, self.check_teacher)

    def check_teacher(self, path: str, token_ids: int) -> None:
        """Refuse a teacher that cannot say what it will be asked, given how many token ids it has."""

    def turns(self, samples: Samples, batch: TokenBatch) -> Iterator[tuple[Turn, TrainingPolicy]]:
        """The part of a batch that each teacher reads, and its model."""
        for turn in turns(self.teachers, samples.sequences, batch, self.config.teacher_column):
            yield turn, self.run.auxiliary_models[turn.teacher.role]

    def reverse_kl(self, samples: Samples, batch: TokenBatch) -> float:
        """The mean over teachers by their weights."""
        student = self.run.policy.get_logprobs(batch)
        total = count = 0.0
        for turn, model in self.turns(samples, batch):
            mean = turn.teacher.reader.reverse_kl(model, turn.samples, turn.batch, student[turn.tokens])
            total += turn.teacher.weight * mean.total
            count += turn.teacher.weight * mean.count
        return total / max(count, 1.0)


class DistillationTrainer(ModelTaughtTrainer[DistillationConfig]):
    """KL on the teacher's likeliest tokens (GKD, arXiv:2306.13649)."""

    config_class = DistillationConfig
    given_responses = 0
    """Of this step, the dataset's: the first ones"""

    def setup(self) -> None:
        super().setup()
        config = self.config
        several = tuple((teacher.name, teacher.weight) for teacher in self.teachers)
        plain = len(several) == 1 and several[0][1] == 1
        reads_text = any(isinstance(teacher.reader, OtherTokens) for teacher in self.teachers)
        self.loss = TopKDistillationLoss(
            config.kl_type,
            config.mixed_kl_weight,
            config.outside_topk,
            () if plain else several,
            config.uncommon_weight if reads_text else 0.0,
            config.jsd_beta,
            config.sft_loss_weight,
        )

    def check_teacher(self, path: str, token_ids: int) -> None:
        if self.config.topk > token_ids:
            raise UsageError(
                f"topk is {self.config.topk}, {path} and the student have {token_ids} tokens to choose from",
                fix=f"set topk to {token_ids} or less",
            )

    def respond(self, rows: Sequence[Row]) -> Samples:
        """Some rows with the dataset's response, the rest with the student's."""
        self.given_responses = count = given_count(self.config.dataset_fraction, len(rows), self.step)
        return Samples([*self.given(rows[:count]), *(self.collect(rows[count:]) if rows[count:] else ())])

    def row_problems(self, rows: Sequence[Row]) -> Iterator[ConfigIssue]:
        """Where nothing is sampled, rows are what :meth:`given` takes."""
        if self.config.dataset_fraction < 1:
            yield from super().row_problems(rows)
            return
        try:
            self.given(rows)
        except DataError as error:
            yield ConfigIssue("data", error.message, error.fix)

    def held_out(self, rows: Sequence[Row]) -> Samples:
        """Held-out samples: the dataset's responses where training never samples."""
        return self.given(rows) if self.config.dataset_fraction == 1 else super().held_out(rows)

    def given(self, rows: Sequence[Row]) -> Samples:
        """The dataset's responses."""
        limit = self.config.policy.max_sequence_tokens
        return Samples([given_sample(row, index, self.tokenizer, limit) for index, row in enumerate(rows)])

    def ask_teachers(self, samples: Samples, batch: TokenBatch) -> TokenBatch:
        """The batch with the fields that the loss requires."""
        is_routed = self.config.teacher_column is not None
        places = batch.num_tokens, 1 if is_routed else len(self.teachers)
        ids_NSK = torch.zeros(*places, self.config.topk, dtype=torch.int64)
        logprobs_NSK, uncommon_NSK = (torch.full(ids_NSK.shape, -torch.inf) for _ in range(2))
        teacher_ids_NS = torch.zeros(places, dtype=torch.int64)
        compared_NS = torch.zeros(places, dtype=torch.bool)
        for turn, model in self.turns(samples, batch):
            found = turn.teacher.reader.candidates(model, turn.samples, turn.batch, self.config.topk)
            slot = 0 if is_routed else turn.number
            ids_NSK[turn.tokens, slot] = found.ids
            logprobs_NSK[turn.tokens, slot] = found.logprobs
            uncommon_NSK[turn.tokens, slot] = found.uncommon
            compared_NS[turn.tokens, slot] = found.compared
            teacher_ids_NS[turn.tokens, slot] = turn.number
        batch = batch.with_tokens(teacher_logprobs=logprobs_NSK.flatten(1), teacher_ids=teacher_ids_NS)
        batch = batch.with_tokens(candidate_ids=ids_NSK.flatten(1))
        if self.loss.requires & {"teacher_uncommon"}:
            batch = batch.with_tokens(teacher_uncommon=uncommon_NSK.flatten(1))
            batch = self._with_own(batch, ids_NSK, teacher_ids_NS, compared_NS)
        return self._with_text(batch) if self.loss.requires & {"is_given"} else batch

    def _with_own(
        self, batch: TokenBatch, ids_NSK: torch.Tensor, teacher_ids_NS: torch.Tensor, compared_NS: torch.Tensor
    ) -> TokenBatch:
        """The student's likeliest tokens as further candidates, and which of them a teacher lacks."""
        own_NK, _ = self.run.policy.get_topk_logprobs(batch, self.config.topk)
        own_NSK = own_NK[:, None].expand_as(ids_NSK)
        lacks_TV = torch.stack([teacher.reader.lacks for teacher in self.teachers])
        lacked_NSK = lacks_TV[teacher_ids_NS[..., None], own_NSK] & compared_NS[..., None]
        return batch.with_tokens(
            candidate_ids=torch.cat([ids_NSK, own_NSK], 2).flatten(1), student_uncommon=lacked_NSK.flatten(1)
        )

    def _with_text(self, batch: TokenBatch) -> TokenBatch:
        """The token itself as the last candidate, and which sequences are the dataset's."""
        candidate_ids = torch.cat([batch["candidate_ids"], batch.token_ids[:, None]], 1)
        is_given = torch.arange(len(batch)) < self.given_responses
        return batch.with_tokens(candidate_ids=candidate_ids).with_sequences(is_given=is_given)


class OPDTrainer(ModelTaughtTrainer[OPDConfig]):
    """Policy gradient of the reverse KL on the sampled tokens."""

    config_class = OPDConfig

    def setup(self) -> None:
        super().setup()
        config = self.config
        self.loss = SampledReverseKLLoss(
            config.clip_low,
            config.clip_high,
            on_policy=config.num_minibatches == 1,
            is_weighted=len(self.teachers) > 1 or self.teachers[0].weight != 1,
        )

    def ask_teachers(self, samples: Samples, batch: TokenBatch) -> TokenBatch:
        """``teacher_logprobs`` [N], the mean by the teachers' weights, and ``teacher_weights`` [N], their sum."""
        logprobs, weights = sampled_logprobs(self.turns(samples, batch), batch.num_tokens)
        return batch.with_tokens(teacher_logprobs=logprobs, teacher_weights=weights)


def roster(config: TeacherModels, check: Callable[[str, int], None] = lambda _path, _token_ids: None) -> list[Teacher]:
    """The teachers of a run, in the order of the config.

    Args:
        config: Names them.
        check: Told the path of each in the config, and how many token ids the student has in common with it.

    Raises:
        UsageError: student and teacher do not mean the same by a token id.
    """
    return [_teacher(path, teacher, config, check) for path, teacher in config.teachers_by_path.items()]


def _teacher(path: str, teacher: TeacherConfig, config: TeacherModels, check: Callable[[str, int], None]) -> Teacher:
    policy = config.policy
    reader: Reader
    if teacher.align == "text":
        reader = OtherTokens.between(policy, teacher.model)
        token_ids = min(len(reader.to_student), len(reader.lacks))
    else:
        student_ids, token_ids = shared_vocabulary(policy.model_name, teacher.model, policy.tokenizer.name)
        reader = SameTokens(student_ids)
    check(path, token_ids)
    return Teacher(path.rpartition(".")[2], teacher.weight, config.role_of(teacher), reader)
