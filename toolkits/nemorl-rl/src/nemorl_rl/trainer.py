"""RolloutTrainer: the trainer of every algorithm that samples from the policy it trains.

It adds to :class:`nemorl.trainer.BaseTrainer` what sampling takes: a generator that holds the policy's weights, an
environment that scores, and the buffer of rollouts that run ahead of training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nemorl.base.process.deadlines import deadline
from nemorl.base.process.timing import Timer
from nemorl.contracts import DataModule, DataSource, Loss
from nemorl.contracts.environment import Environment
from nemorl.errors import ConfigIssue, NemorlError
from nemorl.metrics import Mean, Metric, Metrics
from nemorl.plugins import registry
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl.run import TrainResult
from nemorl.trainer import BaseTrainer
from nemorl.types import Row, Samples

from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.data.code_fingerprints import code_fingerprints
from nemorl_rl.data.prompt_check import FIRST_ROWS, prompt_problems
from nemorl_rl.data.rows import RowDataModule
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool
from nemorl_rl.environments.sources import RewardSource, as_environment
from nemorl_rl.evaluation.evaluation import evaluate, planned_turns
from nemorl_rl.placement.engines import RolloutResources
from nemorl_rl.placement.tenant_resources import Remarks
from nemorl_rl.policy_gradient.updates import run_updates
from nemorl_rl.rollouts.completions import Completions
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan
from nemorl_rl.rollouts.prompts import to_prompts
from nemorl_rl.rollouts.recording import NoRecorder, RolloutRecorder
from nemorl_rl.rollouts.rehearsal import rehearse, reward_problems
from nemorl_rl.rollouts.reward_penalties import PenaliseEpisodes
from nemorl_rl.rollouts.schedule import Settled
from nemorl_rl.rollouts.seeding import derive_seed
from nemorl_rl.serving.generation_policy import GenerationPolicy
from nemorl_rl.slots import OPEN_RECORDS

if TYPE_CHECKING:
    from nemorl_tensors import LossAggregation, TokenBatch

    from nemorl_rl.curriculum.curriculum import Curriculum
    from nemorl_rl.rollouts.buffer import AsyncRolloutBuffer
    from nemorl_rl.serving.proving import WeightReceipts

R = TypeVar("R", bound=RolloutRunConfig)


class RolloutTrainer(BaseTrainer[R]):
    """Runs an algorithm that samples. Subclasses define ``train_step`` and ``rollout_plan``.

    Example:
        >>> class Nothing(RolloutTrainer):
        ...     batch_size = 8
        ...     rollout_plan = RolloutPlan(samples_per_prompt=4, sampling=SamplingParams())
        ...     def train_step(self, rows):
        ...         return rollout_metrics(self.collect(rows))
    """

    resources_class = RolloutResources

    def __init__(self, config: R) -> None:
        super().__init__(config)
        self.environment: Environment
        """Scores responses."""
        self.tokenizer: Tokenizer
        self.generation: GenerationPolicy
        """The policy as it samples."""
        self.rollouts: RolloutEngine
        self.recorder: RolloutRecorder = NoRecorder()
        """Keeps rollouts in the run's directory."""
        self.buffer: AsyncRolloutBuffer | None = None
        self.curriculum: Curriculum | None = None
        """Chooses the prompts of the steps, where ``data.sampling`` asks for it."""
        self._step_began_s = time.monotonic()
        """When the present step began"""
        self._scorer: RewardSource | None = config.environment
        self._until_pooled = ExitStack()
        """Closes an environment that was built from a config, in a run that ends before a pool does"""
        self.receipts: WeightReceipts | None = None
        """Of the weights that the generator was given."""
        self._sync_bytes: int | None = None
        """Bytes that a replica of the generator read of the weights of the last sync, if it counts"""

    # What an algorithm defines

    @property
    def rollout_plan(self) -> RolloutPlan:
        """How a prompt becomes a group of samples."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout_plan")

    def validate(self, rows: Sequence[Row]) -> dict[str, float]:
        """Metrics on held-out rows. By default: respond, score, average (the code path of ``nemorl eval``)."""
        settings, began_s = self.config.validation, time.monotonic()
        evaluation = evaluate(
            self.rollouts,
            to_prompts(rows, self.tokenizer),
            num_generations=settings.num_generations,
            sampling=settings.sampling(self.config.generation),
            seed=derive_seed(self.config.seed, "validation"),
            max_turns=planned_turns(self),
        )
        self.recorder.rollout(evaluation.samples, "validation", self.step, began_s)
        return evaluation.metrics

    # What it may use

    @property
    def resources(self) -> RolloutResources:
        """Where the run's workers are, and how weights reach the engines."""
        assert isinstance(self.run.resources, RolloutResources), "resources_class says so"
        return self.run.resources

    def collect(self, rows: Sequence[Row]) -> Samples:
        """A scored group for each row of this step, as ``rollout_plan`` says."""
        if self.buffer is not None:
            samples = self.buffer.collect()
        else:
            prompts = to_prompts(rows, self.tokenizer)
            samples = self.rollouts.collect(prompts, self.rollout_plan, seed=self._rollout_seed(self.step))
            self._settle(samples)
        self.run.hooks.fire("on_rollout_end", trainer=self, step=self.step, samples=samples)
        self.recorder.rollout(samples, "train", self.step, self._step_began_s)
        return samples

    def weights_proven(self, versions: Sequence[int]) -> bool | None:
        """Whether receipts prove all of these versions; ``None``: nobody knows of one."""
        return None if self.receipts is None else self.receipts.verdict(versions)

    def sync_weights(self) -> None:
        """Give the generator the current policy: outside ``train_step`` it always has it.

        Raises:
            WeightsUnprovenError: It holds something else (``weights.on_unproven``).
        """
        assert self.receipts is not None, "build_parts makes them with the generator"
        self.recorder.updated()
        with self.run.timer.phase("weight_sync"):
            publish = partial(self.resources.weight_handle, self.progress.step)
            self._sync_bytes, receipt = self.receipts.update(lambda digests: publish(digests=digests))
        if receipt is not None:
            facts = receipt.facts()
            self.directory.event("weight_receipt", **facts)
            self.run.hooks.fire("on_weights_proven", trainer=self, step=self.progress.step, receipt=facts)
            self.receipts.settle(receipt)
        if self.buffer is not None:
            self.buffer.publish(self.progress.step)
        self.run.hooks.fire("on_weights_synced", trainer=self, step=self.progress.step, version=self.progress.step)

    def averaged_over(self, asked: LossAggregation | None) -> LossAggregation:
        """The units that a loss averages over: those asked for; unset, episodes where an agent makes them, else tokens.

        An agent that forks, or rewrites its history, has more sequences and more trained tokens: by tokens it would buy
        itself a larger share of the gradient.
        """
        drives = isinstance(self._scorer, Environment | EnvironmentConfig) and self._scorer.drives_policy
        return asked or ("sequence" if drives else "token")

    def with_old_logprobs(self, batch: TokenBatch) -> TokenBatch:
        """The batch with ``old_logprobs``: the training backend's own view before any update of this step."""
        with self.run.timer.phase("policy_and_reference_logprobs"):
            return self.run.policy.with_logprobs(batch, "old_logprobs")

    def with_old_moments(self, batch: TokenBatch) -> TokenBatch:
        """The batch with ``old_logprobs``, and beside them ``old_entropies`` and ``old_collisions``, the chance that
        two tokens drawn there are the same (capability ``moments``)."""
        with self.run.timer.phase("policy_and_reference_logprobs"):
            logprobs, entropies, collisions = self.run.policy.get_moments(batch).unbind(-1)
        return batch.with_tokens(old_logprobs=logprobs, old_entropies=entropies, old_collisions=collisions)

    def with_reference_logprobs(self, batch: TokenBatch) -> TokenBatch:
        """The batch with ``reference_logprobs``: the frozen initial policy's."""
        with self.run.timer.phase("policy_and_reference_logprobs"):
            return self.run.policy.with_logprobs(batch, "reference_logprobs", "reference")

    def cut(
        self, samples: Samples, batch: TokenBatch, count: int, *, first_loss: Loss | None = None
    ) -> list[TokenBatch]:
        """The minibatches of a batch, recorded. With a ``first_loss``, all but the first get ``old_logprobs`` here: the
        first update is the old policy's own, its forward pass finds them."""
        minibatches = batch.minibatches(count)
        if first_loss is not None:
            first, *others = minibatches
            rest = self.with_old_logprobs(batch.select(range(len(first), len(batch))))
            parts = rest["old_logprobs"].split([part.num_tokens for part in others])  # type: ignore[no-untyped-call]
            minibatches = [
                first,
                *(part.with_tokens(old_logprobs=old) for part, old in zip(others, parts, strict=True)),
            ]
        self.recorder.batch(samples, minibatches)
        return minibatches

    def update_policy(
        self, loss: Loss, minibatches: Sequence[TokenBatch], *, epochs: int = 1, first_loss: Loss | None = None
    ) -> dict[str, Metric]:
        """The optimizer steps of a batch, as ``run_updates`` takes them."""
        with self.run.timer.phase("policy_training"):
            return run_updates(self.run.policy, loss, minibatches, epochs=epochs, first_loss=first_loss)

    # What the loop asks

    def fit(
        self,
        dataset: DataSource | None = None,
        reward_fn: RewardSource | None = None,
        **options: Any,
    ) -> TrainResult:
        """Train until the configured end, a stop request or an error.

        Args:
            dataset: Rows, a dataset name, a dataset config or a ``DataModule``. Unset: ``config.data``.
            reward_fn: ``f(prompt, response)`` or an ``Environment``. Unset: ``config.environment``.
            **options: As :meth:`BaseTrainer.fit` takes them: ``val_dataset``, ``callbacks``, ``resume``, …

        Returns:
            Metrics, history and the run directory.
        """
        self._scorer = reward_fn if reward_fn is not None else self.config.environment
        with self._until_pooled:
            return super().fit(dataset, **options)

    def missing_inputs(self, source: DataSource | None) -> Iterator[ConfigIssue]:
        yield from super().missing_inputs(source)
        yield from self.config.reward_problems(self._scorer, "pass fit(reward_fn=…) or set `environment:`")

    def open_inputs(self) -> None:
        environment = as_environment(self._scorer)
        assert environment is not None, "missing_inputs says so, where an algorithm needs one"
        self.environment = environment
        if isinstance(self._scorer, EnvironmentConfig | str):
            self._until_pooled.callback(environment.close)

    def preflight(self) -> Iterator[ConfigIssue]:
        row = self.data.first_row if isinstance(self.data, RowDataModule) else None
        problems = [*super().preflight(), *reward_problems(self.environment, row), *self._driving_problems()]
        if not problems:
            rehearse(self.environment, row, self.directory.warn)
            self.tokenizer = Tokenizer.of(self.config.policy)  # the model takes longer to load
            rows = self.data.first_rows(FIRST_ROWS) if isinstance(self.data, RowDataModule) else ()
            problems += self.row_problems(rows)
        if not problems:
            from nemorl_rl.agents.trial import try_out

            owner, limit_s = f"a trial episode of {self.environment.owner}", self.config.plugins.build_timeout_s
            with deadline(owner, limit_s, setting="plugins.build_timeout_s"):
                try_out(self.environment, row, self.tokenizer, self.config.rollouts.chat_renderer)
        yield from problems

    def row_problems(self, rows: Sequence[Row]) -> Iterator[ConfigIssue]:
        """The first row that training cannot use, asked before the model loads. By default each is a prompt."""
        return prompt_problems(rows, self.tokenizer)

    def _driving_problems(self) -> Iterator[ConfigIssue]:
        backend = self.config.generation.backend
        is_attached = self.config.place().is_attached
        drives = self.environment.drives_policy or self.config.rollouts.turns == "free"
        if drives and (is_attached or "submit" not in backend.supports):
            name = registry().name_of("generation_backends", type(backend))
            where = " in the trainer's processes" if is_attached else ""
            what = f"episodes of {self.environment.owner} go at their own pace, {name}{where} takes whole batches"
            yield ConfigIssue("generation.backend", what, "choose a backend that supports `submit`: hf, vllm or server")
        if self.config.rollouts.turns == "free" and self.environment.batched:
            what = f"{self.environment.owner} scores responses in batches, for which episodes have to wait"
            yield ConfigIssue("rollouts.turns", what, "set it to `together`")

    def code_fingerprints(self) -> Mapping[str, str]:
        return code_fingerprints(self._scorer)

    def own_hooks(self) -> Mapping[str, object]:
        from nemorl_rl.drafts.config import draft_hooks

        return {
            "nemorl-rl:remarks": Remarks(),
            "nemorl-rl:completions": Completions(self.config.records.print_completions),
            **draft_hooks(self.config.generation.backend),
        }

    def build_parts(self) -> None:
        """Start the generator, and what collects and scores its responses."""
        from nemorl_rl.serving.proving import WeightReceipts

        run, config = self.run, self.config
        backend = registry().name_of("generation_backends", type(config.generation.backend))
        run.console.announce(f"starting the generator {backend}")
        with run.loading():
            self.generation = self.resources.generation_policy()
        pool = run.own(EnvironmentPool.from_config(self.environment, config.rollouts), "close")
        self._until_pooled.pop_all()
        limit = config.policy.max_sequence_tokens
        penalties = config.rollouts.reward_penalties
        penalise = None if penalties is None else PenaliseEpisodes.of(penalties, self.tokenizer)
        self.rollouts = RolloutEngine(
            self.generation, pool, self.tokenizer, max_sequence_tokens=limit, timer=run.timer, penalise=penalise
        )
        place = config.place()
        self.receipts = WeightReceipts(
            config.weights,
            self.generation,
            run.policy,
            self.tokenizer,
            can_answer="receipts" in config.generation.backend.supports and not place.is_attached,
            precision=config.policy.precision,
            warn=self.directory.warn,
        )
        open_records = OPEN_RECORDS.filled() if config.records.max_gib > 0 else None
        if open_records is not None:
            self.recorder = run.own(open_records(self), "close")

    def restore(self) -> None:
        """Be where the run was, rollouts that ran ahead included."""
        self.curriculum = self.data.curriculum if isinstance(self.data, RowDataModule) else None
        self.buffer = self.new_buffer()
        super().restore()
        self._record_prompts()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self.curriculum is None else {**state, "prompts": self.curriculum.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.curriculum is not None:  # before the data, whose batches on their way are drawn again by it
            self.curriculum.load_state_dict(state["prompts"])
        super().load_state_dict(state)

    @property
    def batches(self) -> DataModule:
        """The data, or rollouts of it that are finished."""
        return self.buffer or self.data

    def next_rows(self) -> Sequence[Row]:
        self._step_began_s = time.monotonic()
        if self.buffer is None:
            return super().next_rows()
        with self.run.timer.phase("exposed_generation"):
            try:
                return self.buffer.next_batch()
            except NemorlError:  # whoever looks for the reason finds it in the groups that nobody wanted
                self.recorder.rollout(Samples(()), "train", self.progress.step + 1, self._step_began_s)
                raise

    def save(self) -> Path:
        # A run that goes on from a checkpoint makes no record of the steps before it again.
        self.recorder.flush()
        path = super().save()
        self._record_prompts()
        return path

    def step_metrics(self, rows: Sequence[Row]) -> Metrics:
        of_buffer = self.buffer.metrics() if self.buffer is not None else {}
        metrics = {**super().step_metrics(rows), **self.generation.take_metrics(), **of_buffer}
        metrics |= self.curriculum.metrics() if self.curriculum is not None else {}
        proof = None if self.receipts is None or self.receipts.newest is None else self.receipts.newest.is_proven
        metrics = metrics if proof is None else {**metrics, "weights_proven": Mean(float(proof))}
        return metrics if self._sync_bytes is None else {**metrics, "weight_sync_bytes": Mean(self._sync_bytes)}

    def _record_prompts(self) -> None:
        """Record the statistics that the newest checkpoint holds."""
        if self.curriculum is not None and isinstance(self.data, RowDataModule):
            from nemorl_rl.curriculum.table import prompt_table

            columns = prompt_table(self.curriculum.statistics, self.data.rows_at)
            self.recorder.prompts(columns, self.progress.step, self.curriculum.rows)

    def _settle(self, samples: Samples) -> None:
        """Tell the curriculum what became of the rows of this step."""
        if self.curriculum is not None:
            for index, group in groupby(samples, lambda sample: sample.prompt.index):
                self.curriculum.settle(self.curriculum.newest, index, list(group), self.step)

    def _rollout_seed(self, batch: int) -> int:
        return derive_seed(self.config.seed, "rollout", batch)

    def new_buffer(self) -> AsyncRolloutBuffer | None:
        """A buffer of rollouts, where they run ahead of training, or not every group is trained on."""
        settings = self.config.rollouts
        if settings.mode == "sync" and self.rollout_plan.keep is None:
            return None
        from nemorl_rl.rollouts.buffer import AsyncRolloutBuffer

        return AsyncRolloutBuffer(
            self.data,
            self.rollouts.with_timer(Timer()),
            self.rollout_plan,
            max_staleness=settings.max_staleness if settings.mode == "async" else 0,
            max_batches=settings.max_batches_per_step,
            on_stale=settings.on_stale,
            deadline_s=self.config.cluster.worker_timeout_s + settings.environment_timeout_s,
            seed_of=self._rollout_seed,
            on_dropped=self.recorder.rejected,
            on_settled=self._on_settled,
        )

    def _on_settled(self, row: Settled) -> None:
        if self.curriculum is not None:
            self.curriculum.settle(row.batch, row.index, row.group, row.step)
