"""Metrics of distillation beside those of every algorithm that samples, as its config classes declare them."""

from __future__ import annotations

from collections.abc import Mapping

from nemorl.metrics import MetricInfo

_DISTANCE = "over the outcomes that `outside_topk` makes"
_MASS = "well below 1: raise `topk`"

DISTILLATION_METRICS: Mapping[str, MetricInfo] = {
    "validation/reverse_kl": MetricInfo(
        "Distance to the teacher",
        "nats per token",
        "k3 estimate of KL(student || teacher) per token on new responses, at the sampling temperature; 0 "
        "is the teacher itself",
        "no fall: raise the learning rate, or begin with some of the teacher's responses (`dataset_fraction`)",
    ),
    "train/forward_kl": MetricInfo(
        "KL in training", "nats per token", f"KL(teacher || student), {_DISTANCE}", smooth=True
    ),
    "train/reverse_kl": MetricInfo(
        "KL in training",
        "nats per token",
        f"KL(student || teacher), {_DISTANCE}; `opd`: estimated from the sampled tokens",
        smooth=True,
    ),
    "train/jsd": MetricInfo(
        "Divergence in training",
        "nats per token",
        f"`kl_type: jsd`: generalised Jensen-Shannon divergence, {_DISTANCE}",
        smooth=True,
    ),
    "train/sft_loss": MetricInfo(
        "SFT loss",
        "nats per token",
        "`sft_loss_weight`: negative log-likelihood of the dataset's responses",
        smooth=True,
    ),
    "train/reverse_kl/<teacher>": MetricInfo(
        "KL in training, by teacher",
        "nats per token",
        "`reverse_kl` of one of several teachers",
        "one that falls while another rises: they contradict each other; route rows with `teacher_column`",
        smooth=True,
    ),
    "train/teacher_topk_mass": MetricInfo(
        "Probability of the top k",
        "share",
        "probability that the teacher gives to its `topk` tokens",
        _MASS,
        smooth=True,
    ),
    "train/student_topk_mass": MetricInfo(
        "Probability of the top k",
        "share",
        "probability that the student gives to the teacher's `topk` tokens",
        _MASS,
        smooth=True,
    ),
    "train/compared_frac": MetricInfo(
        "Places compared",
        "share",
        "share of the response's tokens, for each of its teachers, where something could be compared; 1 unless one "
        "has `align: text`",
        "below a half: the tokenizers cut text too differently",
        smooth=True,
    ),
    "train/uncommon_distance": MetricInfo(
        "Distance of other tokens",
        "probability",
        "`align: text`: L1 distance of the sorted probabilities of tokens that only one of the two has",
        smooth=True,
    ),
    "timing/train/teacher_logprob_inference": MetricInfo("Teacher", "seconds", "seconds the teacher reads"),
}
"""Of both algorithms."""

SELF_METRICS: Mapping[str, MetricInfo] = {
    "train/taught_frac": MetricInfo(
        "Responses with a teacher",
        "share",
        "share of the responses that the policy read behind a privileged prompt; the others train nothing",
        "`sdpo`: 0 until something succeeds; raise `num_generations_per_prompt`, or have the environment give feedback",
    ),
    "train/no_room_frac": MetricInfo(
        "Responses without room",
        "share",
        "share of the responses that train nothing, as they are longer than `policy.max_sequence_tokens` behind their "
        "privileged prompt",
        "above 0: raise `policy.max_sequence_tokens`",
    ),
}
"""Of algorithms whose teacher is the policy itself."""

MOPD_METRICS: Mapping[str, MetricInfo] = {
    "train/teacher_reverse_kl": MetricInfo(
        "KL to the teachers",
        "nats per token",
        "KL(policy || its teachers) before the update, estimated from the sampled tokens",
        "no fall: lower `outcome_weight`",
        smooth=True,
    ),
    **{
        f"train/{name}_advantage_size": MetricInfo(
            "Sizes of the two advantages",
            "advantage",
            "mean absolute advantage per token: what teachers say, what the reward says",
            "one far above the other decides alone: see `outcome_weight`",
            smooth=True,
        )
        for name in ("teacher", "outcome")
    },
}
"""Of GRPO with teachers."""
