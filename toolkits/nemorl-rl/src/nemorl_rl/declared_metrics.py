"""Metrics of algorithms that sample, as their config classes declare them. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from nemorl.metrics import MetricInfo

_STALE = "above `rollouts.max_staleness`, never; close to it throughout: training is the slower side"
_UNSCORED = "anything above 0: the environment hangs, or its time limit is too short"

ROLLOUT_METRICS: Mapping[str, MetricInfo] = {
    "train/reward": MetricInfo(
        "Reward",
        meaning="mean reward, as the environment gave it",
        watch_for="growth while validation accuracy does not follow: the policy games the reward",
        smooth=True,
    ),
    "validation/reward": MetricInfo("Validation reward", meaning="mean reward"),
    "train/reward/<part>": MetricInfo(
        "Parts of the reward",
        meaning="mean of a named part of the reward, where the environment gives parts; 0 for a response without it",
        watch_for="one part that grows at the cost of the others",
    ),
    "train/accuracy": MetricInfo(
        "Accuracy",
        "share",
        "share of responses that the environment calls right; the mean reward where it does not say",
        smooth=True,
    ),
    "validation/accuracy": MetricInfo(
        "Validation accuracy",
        "share",
        "share of right responses; the mean reward where the environment does not say",
        "a fall while the training reward grows: the policy overfits its prompts or games the reward",
    ),
    "validation/pass@<k>": MetricInfo(
        "pass@k",
        "share",
        "probability that at least one of k responses is right (unbiased, arXiv:2107.03374), for k from 1 to "
        "`validation.num_generations`, if that is above 1",
        "pass@1 that grows while large k fall: responses become alike",
    ),
    "validation/cons@<k>": MetricInfo(
        "cons@k",
        "share",
        "probability that the majority of k responses is right, where the environment tells answers apart",
    ),
    "train/mean_gen_tokens_per_sample": MetricInfo(
        "Response length",
        "tokens",
        "tokens per response, mean",
        "growth up to the token limit, or collapse to a few tokens",
        smooth=True,
    ),
    "validation/avg_length": MetricInfo("Validation response length", "tokens", "tokens per response"),
    "train/weight_sync_bytes": MetricInfo(
        "Size of a weight sync",
        "bytes",
        "bytes of the tensors that an engine read at the last sync: of the whole model, of LoRA adapters alone "
        "(`rollouts.adapters`), or over `delta_socket` and `delta_folder` of what travelled",
    ),
    "train/weight_sync_fallbacks": MetricInfo(
        "Whole weights instead of changes",
        meaning="engines that were sent the whole weights since the run began though they had some, up to the sync "
        "before: over `delta_socket` and `delta_folder`",
        watch_for="growth: bits change on their way or in an engine's memory; `events.jsonl` has the first as a remark",
    ),
    "train/weights_proven": MetricInfo(
        "Weights proven",
        meaning="1 where the last receipt says that every engine holds the weights as they were sent, 0 where it "
        "contradicts (`weights.receipts`); nothing where an engine cannot answer",
        watch_for="0: responses are not of the policy; `events.jsonl` names the tensors",
    ),
    "train/max_gen_tokens_per_sample": MetricInfo("Longest response", "tokens", "tokens of the longest response"),
    "train/truncation_rate": MetricInfo(
        "How responses end",
        "share",
        "share cut by the token limit",
        "growth of the cut ones: raise `generation.max_new_tokens`, or punish length",
    ),
    "train/natural_termination_rate": MetricInfo(
        "How responses end", "share", "share of responses that ended by themselves; the two add up to 1"
    ),
    "validation/truncation_rate": MetricInfo(
        "Truncated in validation",
        "share",
        "share cut by the token limit",
        "above a few percent: accuracy is understated",
    ),
    "train/mean_prompt_length": MetricInfo("Prompt length", "tokens", "tokens per prompt"),
    "train/mean_total_tokens_per_sample": MetricInfo("Sequence length", "tokens", "tokens per sequence"),
    "train/num_samples": MetricInfo("Responses", "responses", "responses of the step"),
    "train/num_valid_samples": MetricInfo(
        "Scored responses", "responses", "responses of the step that could be scored: the others teach nothing"
    ),
    "train/avg_turns_per_sample": MetricInfo("Turns", "turns per episode", "turns per episode", smooth=True),
    "validation/avg_turns": MetricInfo(
        "Validation turns", "responses per episode", "responses per episode, where any had several"
    ),
    "train/avg_trajectory_age": MetricInfo(
        "Age of responses",
        "weight versions",
        "asynchronous rollouts: weight versions between sampling and training, mean",
        _STALE,
    ),
    "train/max_trajectory_age": MetricInfo(
        "Age of responses",
        "weight versions",
        "asynchronous rollouts: weight versions between sampling and training, largest",
        _STALE,
    ),
    "performance/generator_idle_frac": MetricInfo(
        "Waste in the step",
        "share",
        "asynchronous rollouts: share of the time since the step before in which the generator had nothing to do",
        "above 0.3: training is the slower side; give it devices of generation, or raise `rollouts.max_staleness`",
        smooth=True,
    ),
    "performance/generator_busy_s": MetricInfo(
        "Generator busy",
        "seconds",
        "asynchronous rollouts: seconds since the step before in which the generator sampled, those of validations and "
        "checkpoints between the steps included",
        smooth=True,
    ),
    "train/dropped_stale_groups": MetricInfo(
        "Groups dropped as stale",
        "groups",
        "groups of this step's wait that came too late",
        "many in every step: raise `rollouts.max_staleness`, or sample less",
    ),
    "train/requeued_stale_groups": MetricInfo(
        "Groups made again",
        "groups",
        "`rollouts.on_stale: requeue`: groups of this step's wait that came too late; their prompts are sampled again",
        "many in every step: raise `rollouts.max_staleness`",
    ),
    "train/dropped_unwanted_groups": MetricInfo(
        "Groups dropped as equal",
        "groups",
        "`dynamic_sampling`: groups whose rewards were all the same",
        "growth: the prompts are too easy or too hard by now",
    ),
    "train/outcome/<name>": MetricInfo(
        "How episodes end",
        "share",
        "share of episodes that ended so, of outcomes that occurred; `rollouts.on_outcome` says what each teaches",
        "`infrastructure` and `environment_timeout` above 0: see their cause in `nemorl view`; growth of "
        "`environment_timeout` while rewards are low: the policy may provoke it",
    ),
    "train/outcome_gradient/<name>": MetricInfo(
        "What the gradient learns from",
        "share",
        "share of an outcome in the sum of |advantage| x tokens, the size of the surrogate's gradient before clipping",
        "`truncated` or `policy_timeout` carries most of it: the policy mainly learns to be short or quick",
    ),
    "validation/failed_frac": MetricInfo(
        "Validation failures",
        "share",
        "share of held-out responses without a verdict, which no other metric counts; appears when there are any",
        "anything above 0: fewer prompts are behind every mean",
    ),
    "train/prompts/seen_frac": MetricInfo(
        "Prompts asked",
        "share",
        "`data.sampling`: share of the data's prompts of which a response was scored",
    ),
    "train/prompts/visits": MetricInfo(
        "Groups per prompt",
        "groups",
        "`data.sampling`: groups of a prompt that were scored, mean of those that were asked",
    ),
    "train/prompts/pass_rate/hard": MetricInfo(
        "Pass rate by difficulty",
        "share",
        "`data.sampling`: recent pass rate, mean of the prompts of which less than a third passed in their first group",
        "no growth: these prompts are beyond the policy, and what they cost is lost",
        smooth=True,
    ),
    "train/prompts/pass_rate/medium": MetricInfo(
        "Pass rate by difficulty", "share", "of those between a third and two thirds", smooth=True
    ),
    "train/prompts/pass_rate/easy": MetricInfo(
        "Pass rate by difficulty",
        "share",
        "of those of which at least two thirds passed",
        "a fall: the policy forgets what it could do",
        smooth=True,
    ),
    "train/environment/environment_timeout": MetricInfo(
        "Responses not scored in time",
        "share",
        "share of responses that were not scored in time; appears when there are any",
        _UNSCORED,
    ),
    "train/environment/episode_timeout": MetricInfo(
        "Responses not scored in time",
        "share",
        "share of episodes that `rollouts.episode_timeout_s` ended; appears when there are any",
        _UNSCORED,
    ),
    "train/environment/calls": MetricInfo(
        "Calls of the policy", "calls", "agents: answers of the policy per episode", "`rollouts.max_calls`: raise it"
    ),
    "train/environment/sequences": MetricInfo(
        "Token sequences",
        "sequences",
        "agents: token sequences per episode; 1 where every call goes on from the one before",
        "many: the agent rewrites its history, and each sequence computes it again",
    ),
    "train/environment/delivered_tokens": MetricInfo(
        "Delivered tokens", "tokens", "agents: sampled tokens per episode, of episodes that could be scored"
    ),
    "train/environment/dropped_tokens": MetricInfo(
        "Dropped tokens",
        "tokens",
        "agents: sampled tokens per episode that train nothing, as nobody could score it",
        "above 0: the log says what failed",
    ),
    "train/environment/forked_tokens": MetricInfo(
        "Forked tokens",
        "tokens",
        "agents: sampled tokens per episode that a further sequence holds as context, where the agent forks or retries",
        "many: the sequences share beginnings, and each computes them again",
    ),
    "train/environment/realigned_tokens": MetricInfo(
        "Realigned tokens",
        "tokens",
        "agents: sampled tokens per episode that came back written in another way and had to be rendered anew",
        "many: the agent rewrites the policy's answers",
    ),
    "train/environment/malformed_tool_calls": MetricInfo(
        "Malformed tool calls",
        "calls",
        "agents: tool calls per episode that could not be read, and stayed in the text",
        "growth: `message_penalties.invalid_tool_call_advantage` punishes them",
    ),
    "train/environment/constrained_tokens": MetricInfo(
        "Constrained tokens",
        "tokens",
        "agents: tokens per episode that were sampled within a response format, and are context: they train nothing",
        "near all tokens: leave the format to the prompt, or nothing is learnt",
    ),
    "train/environment/broken_tool_choices": MetricInfo(
        "Broken tool choices",
        "calls",
        "agents: answers per episode that called no tool where one was required, or one that was not to be called",
        "many: the agent requires tools, which is not enforced while sampling",
    ),
    "train/environment/ended_by_<name>": MetricInfo(
        meaning="agents: share of episodes that an error of this name ended with reward 0: the context was full, or no "
        "call was left"
    ),
    "train/environment/<name>": MetricInfo(
        meaning="mean of a number that the environment reports; 0 for a response without it"
    ),
    "timing/train/generation": MetricInfo("Generation", "seconds", "sampling responses"),
    "timing/train/reward_calculation": MetricInfo("Reward calculation", "seconds", "waiting for the environment"),
    "timing/train/policy_and_reference_logprobs": MetricInfo("Log-probs", "seconds", "old and reference log-probs"),
    "timing/train/exposed_generation": MetricInfo(
        "Exposed generation",
        "seconds",
        "asynchronous rollouts: waiting for rollouts, in place of `data_processing`",
        "most of the step: generation is the slower side",
    ),
    "timing/train/weight_sync": MetricInfo("Weight sync", "seconds", "handing the new weights to the generator"),
}
"""Of every algorithm that samples. ``<part>``, ``<name>`` and ``<k>`` stand for any text."""

_CLIPPED = "above about 0.2: fewer or smaller updates per rollout"

RATIO_METRICS: Mapping[str, MetricInfo] = {
    **dict.fromkeys(
        ("train/probs_ratio", "train/probs_ratio_min", "train/probs_ratio_max"),
        MetricInfo(
            "Policy ratio",
            meaning="probability ratio of policy and old policy: mean, smallest and largest over tokens",
            watch_for="drift of the mean away from 1; with one update per step it is exactly 1",
        ),
    ),
    "train/probs_ratio_clamped": MetricInfo("Clipped policy ratio", meaning="the ratio after clipping"),
    "train/probs_ratio_clamped_frac": MetricInfo(
        "Clipped tokens",
        "share",
        "share of tokens from which the clip takes the gradient: a high ratio with a positive advantage or a low one "
        "with a negative one (elsewhere: pg_clipfrac, clip_ratio)",
        _CLIPPED,
        smooth=True,
    ),
    **dict.fromkeys(
        ("train/probs_ratio_clamped_low_frac", "train/probs_ratio_clamped_high_frac"),
        MetricInfo("Clipped below, above", "share", "the two parts of `probs_ratio_clamped_frac`", smooth=True),
    ),
}
"""Of algorithms that compare the policy with the one that sampled."""

SAMPLER_METRICS: Mapping[str, MetricInfo] = {
    "train/token_mult_prob_error": MetricInfo(
        "Sampler mismatch",
        meaning="mean of exp(|old - generation log-prob|): how far trainer and sampler disagree; 1 is perfect",
        watch_for="above `rollouts.mismatch_warning` (1.05) the run warns; above `rollouts.mismatch_limit` (1.3) in "
        "the first step it ends",
    ),
    "train/gen_kl_error": MetricInfo(
        "KL between sampler and trainer",
        "nats per token",
        "estimate of KL(sampler || old policy); 0 is perfect",
        "growth: find the cause of the mismatch",
    ),
    **dict.fromkeys(
        [f"train/logprob_error/{name}" for name in ("mean", "max", "p50", "p99", "p999")],
        MetricInfo(
            "Log-prob error",
            "nats",
            "mean, maximum and quantiles of |old - generation log-prob| over tokens",
            "a large maximum beside a small median: single tokens; all large: the engines as a whole",
        ),
    ),
    "train/sampling_importance_ratio": MetricInfo(
        "Importance ratio",
        meaning="mean of exp(old - generation log-prob); with `importance_correction`, of the weights that it applies",
        watch_for="drift away from 1, which is perfect",
    ),
    "train/nonfinite_sampler_logprobs": MetricInfo(
        "Impossible tokens",
        "tokens",
        "tokens, per optimizer step, that the sampler says it cannot have drawn (log-prob -inf or NaN); "
        "`importance_correction` gives them weight 0",
        "anything above 0: the sampler's log-probs are those of another distribution",
    ),
    "train/approx_entropy": MetricInfo(
        "Entropy",
        "nats per token",
        "entropy per token, estimated from the sampled tokens",
        "falling to 0 early: exploration is over",
        smooth=True,
    ),
}
"""Of algorithms that compare the trainer's log-probs with the sampler's."""

CORRECTION_METRICS: Mapping[str, MetricInfo] = {
    "train/is_oob_ratio": MetricInfo(
        "Weights out of bounds",
        "share",
        "`importance_correction`: share of tokens (`sequence_mask`: of responses) beyond its bounds, so capped or left "
        "out",
        "growth: find the cause of the mismatch",
    ),
}
"""Of algorithms that have `importance_correction`."""

KL_METRICS: Mapping[str, MetricInfo] = {
    "train/kl_penalty": MetricInfo(
        "KL to the initial policy",
        "nats per token",
        "mean estimate per token as it is charged: within `kl_output_clamp`, before its weight",
        "fast growth",
        smooth=True,
    ),
}
"""Of algorithms that charge the distance from the initial policy."""

ADVANTAGE_METRICS: Mapping[str, MetricInfo] = {
    **dict.fromkeys(
        ("train/advantages/mean", "train/advantages/max", "train/advantages/min"),
        MetricInfo("Advantages", meaning="mean, largest and smallest advantage, before normalisation over the batch"),
    ),
    "train/without_gradient_frac": MetricInfo(
        "Responses without gradient",
        "share",
        "share of responses whose advantage is 0, which teach nothing beyond the KL to the initial policy",
        "near 1: almost nothing is learnt; `dynamic_sampling` or other prompts help",
    ),
    "train/skipped_backward_frac": MetricInfo(
        "Responses without backward pass",
        "share",
        "share of responses that the engine gave no backward pass, as their gradient is 0; 0 with a KL in the loss",
    ),
}
"""Of algorithms that turn rewards into advantages."""
