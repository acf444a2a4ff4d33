"""Which check each plugin of ``broken`` has to fail: one at least for every check of every kind, and no other check.

``TOGETHER`` lists the mistakes so plain that several checks see them, with all that do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemorl_testing.models import tiny_model

EXAMPLES = [({"text": "1+1=", "answer": "2"}, "2", 1.0), ({"text": "1+1=", "answer": "2"}, "3", 0.0)]
TWO_TURNS = [*EXAMPLES, ({"text": "1+1=", "answer": "2"}, ["3", "2"], 0.5)]
SECOND_ANSWER = [*EXAMPLES, ({"text": "1+1=", "answer": "2"}, ["3", "2"], 1.0)]
OF_EPISODES = {
    **dict.fromkeys(("GoodGame", "PaysLateAnswersInFull", "EndsWithTheFirstMistake"), TWO_TURNS),
    **dict.fromkeys(("GoodAgent", "ListensOnce"), SECOND_ANSWER),
    "SharesItsState": [("6*7=", "42", 1.0)],
}
"""Examples of environments that are asked several times."""
SMALL_BATCHES = {"batch_size": 4}
SMALL_GROUPS = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4}
SMALL_CRITIC = {"num_prompts_per_step": 2, "num_generations_per_prompt": 3, "critic": {"optimizer": {"lr": 1e-3}}}
TEACHER = {"model": str(tiny_model(seed=11, num_hidden_layers=1)), "precision": "float32"}
TAUGHT = {"num_prompts_per_step": 4, "teacher": TEACHER}
OF_REWARDS, OF_ROWS = "what_earns_more_becomes_likelier", "given_responses_become_likelier"
OF_CRITICS, OF_STUDENTS = "a_critic_nears_what_is_earned", "a_student_nears_its_teachers"
CERTIFIED = "losses_are_certified"
BAD_LOSSES = frozenset(
    {
        *("OwnNormalisation", "AveragesAverages", "Unlearns", "SpillsMaskedSlots", "ClimbsTheLoss", "Disagrees"),
        *("RollsTheMaskOfItsLoss", "CriticFlees", "CriticAverages", "CriticRollsItsMask", "CriticTimesMask"),
    }
)
"""Mutants whose mistake is in a loss, where its certificate sees it, too."""
SILENT = frozenset(
    {
        *("generator_has_the_weights_of_each_step", "garbage_in_masked_slots_changes_nothing"),
        *(OF_REWARDS, OF_CRITICS, OF_STUDENTS),
    }
)
"""Checks that say nothing about algorithms that sample nothing."""


@dataclass(frozen=True)
class Mutant:
    """One broken plugin."""

    kind: str
    value: str
    """Of its entry point, below the package ``broken``."""
    fails: frozenset[str]
    """Names of the checks."""
    options: Mapping[str, Any] = field(default_factory=dict)
    skips: Collection[str] = frozenset()
    """Names of checks that say nothing about it."""

    @property
    def name(self) -> str:
        return str(self.options.get("mistake") or self.value.partition(":")[2])

    @property
    def settings(self) -> Mapping[str, Any]:
        """What its author says of it."""
        return {"examples": OF_EPISODES.get(self.name, EXAMPLES)} if self.kind == "environments" else {}

    @property
    def is_slow(self) -> bool:
        return self.kind in ("training_backends", "algorithms")


CONFIGS = {
    "config_module_imports_nothing_heavy": "heavy:Heavy",
    "summary_is_one_line": ("configs:NoSummary", "configs:LongSummary"),
    "required_modules_say_how_to_install_them": ("configs:NeedsModulesOfUnknownOrigin", "configs:OneModuleAsText"),
    "every_option_is_documented": (
        "configs:UndocumentedOption",
        "configs:UndocumentedClass",
        "configs:UndocumentedPart",
    ),
    "options_that_name_something_declare_it": "configs:NamesAModelInPassing",
    "unknown_option_is_refused": "configs:AcceptsAnything",
    "config_is_frozen": "configs:CanBeChanged",
    "config_pickles": "configs:HoldsALock",
    "config_loads_again_from_its_dump": "configs:WritesWhatItCannotRead",
    "json_schema_covers_every_option": "configs:WithoutSchema",
}
ENVIRONMENTS = {
    "examples_get_their_reward": "WrongWayRound",
    "any_response_gets_a_finite_score": ("FailsOnEmpty", "DividesByLength"),
    "scores_are_repeatable": "Moody",
    "threads_do_not_change_scores": "NotThreadSafe",
    "async_code_never_blocks": "SleepsOnTheLoop",
    "episode_answers": "FallsSilent",
    "close_twice_is_harmless": "ClosesOnce",
    "conversations_get_their_total": ("PaysLateAnswersInFull", "EndsWithTheFirstMistake", "ListensOnce"),
    "prompts_are_left_as_they_are": ("PopsFromTheRow", "PopsInARollout"),
    "any_form_of_an_example_gets_a_finite_score": (
        "FailsOnFences",
        "TakesRaisedDigitsForNumbers",
        "TakesColumnsForText",
        "PassesNoNumbers",
    ),
    "an_agent_ends_whatever_the_policy_says": "DividesByWords",
    "episodes_of_an_agent_are_apart": "SharesItsState",
    "a_cancelled_agent_ends": "GoesOnWhenCancelled",
    "an_agent_never_blocks": "SleepsInARollout",
}
DATASETS = {
    "rows_are_an_indexable_sequence": "endless",
    "rows_have_a_usable_shape": "no prompt",
    "rows_are_plain_data": "tuples",
    "rows_are_the_same_every_time": "shuffles",
    "validation_is_disjoint_from_training": "leaks",
    "unknown_split_gives_no_rows": "any split",
}
LOGGERS = {
    "metrics_are_written": "every fourth step",
    "every_number_is_accepted": "integers",
    "several_records_may_share_a_step": "one record per step",
    "resumed_run_goes_on": "truncates",
    "close_twice_is_harmless": "closes once",
}
TRANSPORTS = {
    "what_is_published_is_fetched": "widens",
    "the_version_before_stays_valid": "one place for all versions",
    "a_payload_can_be_sent": "sends a function",
    "what_arrives_has_the_digests_that_were_sent": (
        "drops a tensor",
        "swaps a pair",
        "keeps an expert",
        "cuts a bucket short",
        "ties a head that is not",
        "sends adapters over an old base",
    ),
}
HOOKS = {
    "it_answers_an_event": "NothingToCall",
    "manager_accepts_it": ("UnknownEvent", "UnknownArgument"),
    "essential_is_a_bool": "EssentialInWords",
}
COMMANDS = {
    "it_is_a_command": "commands:by_hand",
    "help_is_shown": "commands:help_fails",
    "it_describes_itself": "commands:undescribed",
    "wrong_option_is_refused": "commands:tolerant",
    "import_is_silent": "loud:app",
}
TEMPLATES = {
    "it_is_a_mapping": "templates:unfinished.yaml",
    "first_line_says_what_it_is": "templates:silent.yaml",
    "it_is_a_valid_config": "templates:misspelt.yaml",
    "it_can_be_launched": "templates:dataless.yaml",
}
REPORT_SECTIONS = {
    "it_gives_a_section_or_nothing": "gives_text",
    "run_without_records_is_no_error": "expects_rewards",
    "records_are_left_as_they_are": "takes_out",
    "report_can_draw_it": ("short_rows", "curve_without_steps"),
}
ALGORITHMS = {
    "unknown_option_is_refused": "configs:LenientAlgorithm",
    "config_loads_again_from_its_dump": "configs:UnreadableAlgorithm",
    "trainer_belongs_to_the_config": ("algorithms:BorrowedTrainer", "algorithms:OtherName"),
    "small_run_finishes": "algorithms:Diverges",
    "microbatches_change_nothing": "algorithms:OwnNormalisation",
    "metrics_are_those_of_the_whole_batch": "algorithms:AveragesAverages",
    "what_is_trained_is_what_was_chosen": "algorithms:LosesTheEnd",
    OF_ROWS: "algorithms:Unlearns",
    CERTIFIED: "algorithms:RoundsToFloat32",
    "run_learns_something": "algorithms:OnlyLooks",
    "killed_run_resumes_as_if_nothing_happened": "algorithms:Forgetful",
    "same_seed_gives_the_same_run": "algorithms:FixedSeed",
}
SAMPLING_ALGORITHMS = {
    "garbage_in_masked_slots_changes_nothing": "algorithms:SpillsMaskedSlots",
    "generator_has_the_weights_of_each_step": "algorithms:SyncsTooLate",
    OF_REWARDS: ("algorithms:WantsTheWorst", "algorithms:ClimbsTheLoss"),
    "what_is_trained_is_what_was_chosen": "algorithms:RollsItsMask",
    "every_trained_token_has_a_gradient": "algorithms:RollsTheMaskOfItsLoss",
}
ALGORITHMS_WITH_A_CRITIC = {
    OF_CRITICS: "algorithms:CriticFlees",
    "microbatches_change_nothing": "algorithms:CriticAverages",
    "every_trained_token_has_a_gradient": "algorithms:CriticRollsItsMask",
    "garbage_in_masked_slots_changes_nothing": "algorithms:CriticTimesMask",
}
TRAINING = {
    "logprobs_equal_transformers": "ReturnsFloat64",
    "temperature_divides_the_logits": "TrainsAtTemperatureOne",
    "masked_and_first_tokens_score_zero": "ScoresFirstTokens",
    "on_policy_ratio_is_one": "ScoresWithAnotherKernel",
    "one_step_equals_transformers_and_adamw": ("ReportsMeanLoss", "ReportsNoLearningRate"),
    "gradient_is_clipped_and_its_norm_reported": ("NeverClips", "ReportsClippedNorm"),
    "microbatching_changes_nothing": "AveragesMicrobatches",
    "order_of_sequences_is_irrelevant": "TrustsOrder",
    "garbage_in_masked_fields_changes_nothing": "SpillsMaskedFields",
    "batch_with_nothing_to_train_is_harmless": "RefusesEmptyShards",
    "sequences_without_gradient_still_count": ("LosesMetrics", "LeavesOutAndRenormalises"),
    "missing_loss_field_is_named": "IgnoresMissingFields",
    "gradient_that_is_not_finite_skips_the_update": "SkipsSilently",
    "continuing_from_a_checkpoint_changes_nothing": "ForgetsOptimizer",
    "a_checkpoint_without_optimizer_begins_a_new_one": "SavesOptimizerAnyway",
    "a_snapshot_is_of_the_step_it_was_taken_after": "SnapshotsLiveTensors",
    "a_snapshot_is_named_when_it_is_whole": "SealsTooEarly",
    "what_leaves_the_device_comes_back_unchanged": ("LosesMomentsOnTheWay", "StaysOnTheDevice"),
    "plan_is_what_the_backend_holds": "HoldsMoreThanPlanned",
    "plan_grows_with_the_microbatch": "PlansLongMicrobatchesAsShort",
    "a_gradient_of_zero_goes_on_by_momentum": "StandsStillWithoutSlope",
    "pieces_make_the_weights": ("PublishesFirstPieces", "LosesTheLastRow"),
    "adapters_are_what_the_model_has_beyond_its_base": "ScalesItsAdapters",
    "the_saved_adapters_are_those_at_hand": ("SavesFirstAdapters", "SaysAnotherAlpha"),
    "recorded_activations_are_those_of_transformers": "CountsLayersFromTheEnd",
    "recorded_routes_are_taken_and_routers_learn": ("ChoosesByItself", "FreezesRouters"),
    "a_scaled_rate_scales_the_update": ("ReportsTheScaleAlone", "KeepsTheLastScale"),
    "a_scaled_rate_is_in_the_checkpoint": "SavesNoScale",
    "two_halves_are_a_train_step": "AddsTwice",
    "gradients_of_several_calls_add_up": ("KeepsTheLastGradient", "AddsWhatItMeasures"),
    "a_pass_says_what_its_loss_was_given": "SaysNothingOfWhatItSkipped",
    "a_step_takes_the_adam_it_is_given": ("IgnoresTheClip", "KeepsTheDecay"),
    "a_pass_that_failed_midway_is_not_applied": "AppliesParts",
    "adapters_that_take_turns_learn_as_alone": ("SharesMoments", "DropsGradients"),
    "a_new_adapter_says_what_the_base_says": "BeginsWithTheLast",
    "an_adapter_that_is_removed_is_gone": "KeepsTheRemoved",
    "reference_stays_frozen": "MovingReference",
    "reference_must_be_asked_for": "PolicyForReference",
    "export_is_the_model": "TakesHeadsForTied",
    "save_pretrained_loads_with_transformers": ("SavesNoTokenizer", "SavesFirstWeights"),
    "shutdown_twice_is_harmless": "ShutsDownOnce",
    "coupled_sequences_stay_together": "TearsPairs",
    "likeliest_tokens_are_those_of_transformers": "RenormalisesTopK",
    "moments_are_those_of_transformers": "ShrinksEntropies",
    "an_entropy_bonus_raises_the_entropy": "TurnsTheEntropyGradient",
    "candidates_are_scored_in_place_of_tokens": "ScoresTokensAsCandidates",
    "values_are_those_of_the_saved_model": "ValuesAfter",
    "values_can_be_learnt": "ConstantCritic",
    "each_head_answers_for_itself": "AnswersWithAnyHead",
    "sequences_that_begin_alike_are_scored_as_alone": "ScoresSharedTokensOnce",
    "sequences_that_begin_alike_teach_as_alone": "TrainsSharedTokensOnce",
    "generator_speaks_for_the_trained_policy": "GathersOnce",
}
GENERATION = {
    "one_completion_per_seed": "RefusesEmptyCalls",
    "logprobs_equal_transformers": "ForgetsTemperature",
    "truncation_does_not_renormalise": "Renormalises",
    "seeds_decide_the_tokens": "OneSeedForAll",
    "rows_do_not_depend_on_their_batch": "PaddingChangesSeeds",
    "greedy_takes_the_most_likely_token": "SeveralSeedsAreNeverGreedy",
    "length_limits_are_honoured": "FullContextIsAnEnd",
    "end_token_ends_a_response": "LongResponsesAreCut",
    "stop_token_ids_end_a_response": "IgnoresStopTokens",
    "stop_strings_end_a_response": "IgnoresStopStrings",
    "ignored_end_tokens_end_nothing": "EndsAtIgnoredTokens",
    "prompt_logprobs_equal_transformers": "ShiftsPromptLogprobs",
    "requests_of_one_call_may_sample_differently": "OneMinPForAll",
    "an_image_for_a_model_that_reads_text_is_refused_by_name": "ReadsPlaceholders",
    "top_k_draws_from_the_k_most_likely": "TopKPlusOne",
    "update_weights_takes_effect": "CountsUpdates",
    "a_conversation_goes_on_with_the_weights_at_hand": "KeepsTurnsForEver",
    "weights_in_process_are_shared": "CopiesWeights",
    "sleep_changes_nothing": "WakesUpYoung",
    "sleep_gives_memory_back": "SleepsWithItsWeights",
    "forgotten_weights_are_not_sampled_from": "TakesMemoryForWeights",
    "bad_request_is_explained": "RaisesPlainErrors",
    "submitted_requests_are_answered_as_in_a_batch": "SubmitsOneSeed",
    "a_request_joins_those_that_run": "LongerPromptsWait",
    "requests_do_not_change_each_other": "CompanyChangesSeeds",
    "a_cancelled_request_frees_what_it_holds": "CancelsTheFutureAlone",
    "a_bad_request_fails_alone": "OneBadRequestEndsAll",
    "running_requests_go_on_with_new_weights": ("MissesTheUpdate", "UpdatesWhenIdle"),
    "sleep_is_refused_while_requests_run": "SleepsWheneverAsked",
    "an_observed_response_is_an_ordinary_one": "ObservesAnotherSeed",
    "recorded_activations_are_those_of_transformers": "RecordsAnotherResponse",
    "routes_are_those_of_transformers": "ShiftsRoutes",
    "a_named_version_is_sampled_from": "SharesSnapshots",
    "a_version_that_is_not_held_is_refused_by_name": "AnswersWithTheNewest",
    "running_requests_keep_the_version_that_they_name": "MovesAllRequests",
    "a_receipt_is_of_the_weights_at_hand": "DigestsOfFewUpdates",
    "a_receipt_names_what_is_not_as_sent": "EchoesDigests",
    "shutdown_twice_is_harmless": "ShutsDownOnce",
    "generator_speaks_for_the_trained_policy": "SeesNewTensorsOnly",
}

BASES = {
    "environments": "environments:AnyEnvironment",
    "datasets": "datasets:AnyDataset",
    "loggers": "loggers:AnyLogger",
    "weight_transports": "transports:AnyTransport",
    "hooks": "hooks:AnyHook",
    "report_sections": "report_sections:AnySection",
    "training_backends": "backends:BrokenTraining",
    "generation_backends": "backends:BrokenGeneration",
}
"""Config classes whose option ``mistake`` says what is wrong; by default nothing is."""

DRIVING = frozenset(
    {
        "an_agent_ends_whatever_the_policy_says",
        "episodes_of_an_agent_are_apart",
        "a_cancelled_agent_ends",
        "an_agent_never_blocks",
    }
)
"""Checks of environments that drive the policy; the others answer it."""
CONVERSATIONS = frozenset({"conversations_get_their_total"})
"""Checks of examples that only environments of several turns have."""
OF_BOTH = frozenset(
    {"close_twice_is_harmless", "prompts_are_left_as_they_are", "any_form_of_an_example_gets_a_finite_score"}
)
ANSWERING = frozenset(ENVIRONMENTS) - DRIVING - CONVERSATIONS - OF_BOTH

SOUND = (
    *(
        Mutant(kind, value, frozenset(), skips=DRIVING | CONVERSATIONS if kind == "environments" else frozenset())
        for kind, value in BASES.items()
    ),
    Mutant("environments", "configs:Sound", frozenset(), skips=DRIVING | CONVERSATIONS),
    Mutant("environments", BASES["environments"], frozenset(), {"mistake": "GoodGame"}, DRIVING),
    Mutant("commands", "commands:good", frozenset()),
    Mutant("templates", "templates:good.yaml", frozenset()),
    Mutant("environments", BASES["environments"], frozenset(), {"mistake": "GoodAgent"}, ANSWERING),
    Mutant("datasets", BASES["datasets"], frozenset(), {"mistake": "none: prompts with several answers"}),
    Mutant("loggers", BASES["loggers"], frozenset(), {"mistake": "none: a database"}),
    Mutant("algorithms", "algorithms:SoundSFT", frozenset(), SMALL_BATCHES, SILENT),
    Mutant("algorithms", "algorithms:SoundGRPO", frozenset(), SMALL_GROUPS, {OF_ROWS, OF_CRITICS, OF_STUDENTS}),
    Mutant("algorithms", "algorithms:SoundPPO", frozenset(), SMALL_CRITIC, {OF_ROWS, OF_STUDENTS}),
    Mutant("algorithms", "algorithms:SoundStudent", frozenset(), TAUGHT, {OF_ROWS, OF_CRITICS, OF_REWARDS}),
)
"""What the mutants derive from: all checks pass, so what fails is the mistake."""


def _by_value(kind: str, table: Mapping[str, str | tuple[str, ...]], **options: Any) -> Iterator[Mutant]:
    for check, values in table.items():
        for value in (values,) if isinstance(values, str) else values:
            also = {CERTIFIED} if value.partition(":")[2] in BAD_LOSSES else set()
            yield Mutant(kind, value, frozenset({check, *also}), options)


def _by_mistake(kind: str, table: Mapping[str, str | tuple[str, ...]]) -> Iterator[Mutant]:
    for check, mistakes in table.items():
        for mistake in (mistakes,) if isinstance(mistakes, str) else mistakes:
            yield Mutant(kind, BASES[kind], frozenset({check}), {"mistake": mistake})


ALONE = (
    *_by_value("environments", CONFIGS),
    Mutant("training_backends", "configs:TakesNoHead", frozenset({"build_takes_what_the_kernel_gives"})),
    *_by_mistake("environments", ENVIRONMENTS),
    *_by_mistake("datasets", DATASETS),
    *_by_mistake("loggers", LOGGERS),
    *_by_mistake("weight_transports", TRANSPORTS),
    *_by_mistake("hooks", HOOKS),
    *_by_value("commands", COMMANDS),
    *_by_value("templates", TEMPLATES),
    *_by_mistake("report_sections", REPORT_SECTIONS),
    *_by_value("algorithms", ALGORITHMS, **SMALL_BATCHES),
    *_by_value("algorithms", SAMPLING_ALGORITHMS, **SMALL_GROUPS),
    *_by_value("algorithms", ALGORITHMS_WITH_A_CRITIC, **SMALL_CRITIC),
    *_by_value("algorithms", {OF_STUDENTS: "algorithms:Disagrees"}, **TAUGHT),
    *_by_mistake("training_backends", TRAINING),
    *_by_mistake("generation_backends", GENERATION),
)

_COMPARING = {
    "export_is_the_model",
    "generator_speaks_for_the_trained_policy",
    "one_step_equals_transformers_and_adamw",
    "gradient_is_clipped_and_its_norm_reported",
}
_SCORING = {
    "logprobs_equal_transformers",
    "temperature_divides_the_logits",
    "masked_and_first_tokens_score_zero",
    "on_policy_ratio_is_one",
    "export_is_the_model",
    "save_pretrained_loads_with_transformers",
    "generator_speaks_for_the_trained_policy",
    "a_pass_says_what_its_loss_was_given",
    "recorded_routes_are_taken_and_routers_learn",
}
TOGETHER = tuple(
    Mutant(kind, BASES[kind], frozenset(fails), {"mistake": mistake})
    for kind, mistake, fails in (
        ("training_backends", "Shifted", _SCORING),
        (
            "training_backends",
            "Pickles",
            {"continuing_from_a_checkpoint_changes_nothing", "a_snapshot_is_named_when_it_is_whole"},
        ),
        (
            "training_backends",
            "SortsByLength",
            {*_SCORING, "order_of_sequences_is_irrelevant", "sequences_that_begin_alike_are_scored_as_alone"},
        ),
        (
            "training_backends",
            "PrefixesNames",
            {*_COMPARING, "pieces_make_the_weights", "adapters_are_what_the_model_has_beyond_its_base"},
        ),
        (
            "training_backends",
            "ExportsFirstWeights",
            {
                *_COMPARING,
                "pieces_make_the_weights",
                "a_checkpoint_without_optimizer_begins_a_new_one",
                "a_gradient_of_zero_goes_on_by_momentum",
                "gradients_of_several_calls_add_up",
                "a_step_takes_the_adam_it_is_given",
                "recorded_routes_are_taken_and_routers_learn",
                "sequences_that_begin_alike_teach_as_alone",
                "sequences_without_gradient_still_count",
                "a_scaled_rate_scales_the_update",
                "coupled_sequences_stay_together",
                "candidates_are_scored_in_place_of_tokens",
                "microbatching_changes_nothing",
                "order_of_sequences_is_irrelevant",
                "garbage_in_masked_fields_changes_nothing",
                "gradient_that_is_not_finite_skips_the_update",
            },
        ),
        (
            "generation_backends",
            "DropsStopTokens",
            {
                "length_limits_are_honoured",
                "end_token_ends_a_response",
                "stop_token_ids_end_a_response",
                "stop_strings_end_a_response",
                "ignored_end_tokens_end_nothing",
                "submitted_requests_are_answered_as_in_a_batch",
            },
        ),
        (
            "generation_backends",
            "OneTokenTooMany",
            {
                "length_limits_are_honoured",
                "greedy_takes_the_most_likely_token",
                "ignored_end_tokens_end_nothing",
            },
        ),
        (
            "generation_backends",
            "KeepsOldWeights",
            {
                "update_weights_takes_effect",
                "generator_speaks_for_the_trained_policy",
                "a_conversation_goes_on_with_the_weights_at_hand",
                "weights_in_process_are_shared",
                "sleep_changes_nothing",
                "forgotten_weights_are_not_sampled_from",
                "running_requests_go_on_with_new_weights",
                "a_named_version_is_sampled_from",
                "a_version_that_is_not_held_is_refused_by_name",
                "running_requests_keep_the_version_that_they_name",
                "a_receipt_is_of_the_weights_at_hand",
                "a_receipt_names_what_is_not_as_sent",
            },
        ),
    )
)
