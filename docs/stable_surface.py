"""The stable surface: what authors of plugins may build on, by module.

Each name has a docstring with an example and is on a page of docs/reference/api, made by ``generate_api.py``. Other
names of these modules, and other modules, may change in any version.
"""

from __future__ import annotations

from collections.abc import Mapping

SURFACE: Mapping[str, tuple[str, ...]] = {
    "nemorl": (
        *("BaseTrainer", "Callback", "ChainEnvironment", "CheckpointCallback", "ClusterConfig", "Console"),
        *("EarlyStopping", "Environment", "FunctionalRewardWrapper", "Gateway", "GenerationConfig", "LoggerCallback"),
        *("NemorlError", "PolicyConfig", "RayVirtualCluster", "RayWorkerGroup", "RewardFunction", "RolloutRunConfig"),
        *("RolloutTrainer", "RunConfig", "Score", "Step", "TrainResult", "Trainer", "WandbCallback"),
        "WeightedEnvironment",
        *(
            "agent_environment",
            "find_dataset",
            "get_generation_backend",
            "get_training_backend",
            "hookimpl",
            "load_config",
            "memory_plan",
            "model_folder",
            "plan_run",
            "plot_run",
            "push_to_hub",
        ),
        *("register_algorithm", "register_dataset", "register_environment", "register_generation_backend"),
        *("register_logger", "register_training_backend", "train", "train_dpo", "train_grpo", "train_sft"),
        "trl_reward",
    ),
    "nemorl.types": (
        *("Branch", "Completion", "FinishReason", "GenerationRequest", "Message", "Prompt", "Row", "Sample", "Samples"),
        *("SamplingParams", "Score", "Step"),
    ),
    "nemorl.contracts": (
        *("AdapterBackend", "DataModule", "DataSource", "Environment", "Episode", "Fingerprinted"),
        *("GenerationBackend", "GenerationCapability", "Head", "HeldOut", "HoldsVersions", "Logger", "Loss"),
        *("MomentsBackend", "ObservableSampler", "ObservableTrainer", "PublishesPieces", "RateScalingBackend"),
        *("ProvingBackend", "RemarkingBackend", "ReportingSampler", "RequestBackend", "SelectiveLoss"),
        "SizedDataModule",
        *(
            "SnapshottingBackend",
            "Table",
            "TrainingBackend",
            "TrainingCapability",
            "WeightTransport",
            "WeightsName",
            "WorkerGroup",
        ),
    ),
    "nemorl_rl.agents.contract": (
        *("CallLimitError", "CallOptions", "ChatMessage", "ChatReply", "ContextOverflowError", "EpisodeClosedError"),
        *("EpisodeError", "EpisodeLimits", "EpisodePolicy", "ToolChoice"),
    ),
    "nemorl_rl.agents.gateways": (
        *("ANY_AGENT", "Access", "EpisodeGateway", "GatewayRules", "Traffic"),
        *("gateway_is_installed", "start_gateway"),
    ),
    "nemorl.plugins.kinds": (
        *("DatasetConfig", "EnvironmentConfig", "GenerationBackendConfig", "HookConfig", "LoggerConfig"),
        *("PluginConfig", "ReportSectionConfig", "TrainingBackendConfig", "WeightTransportConfig"),
    ),
    "nemorl.config": (
        *("RESUMABLE", "CheckpointConfig", "ClusterConfig", "CodeName", "Command", "Config", "DatasetFile"),
        *("DatasetName", "FileName", "GenerationConfig", "Interpreter", "LoraConfig", "ModelName", "Names"),
        *("OptimizerConfig", "Options", "PlainText", "PluginsConfig", "PolicyConfig", "RunConfig", "ScheduleConfig"),
        *("SecretVariable", "ServedModel", "ServerURL", "TrainingOptions", "ValidationConfig", "Variables"),
        "load_config",
    ),
    "nemorl.metrics": (
        *("Histogram", "Last", "Max", "Mean", "Metric", "MetricInfo", "Metrics", "Min", "Sum"),
        *("average", "merge", "values"),
    ),
    "nemorl.errors": (
        *(
            "BackendError",
            "CheckpointError",
            "CollectiveError",
            "ConfigError",
            "ConfigIssue",
            "DataError",
            "DeadlineError",
            "DeviceLostError",
            "InfrastructureError",
        ),
        *("ForeignError", "Interrupted", "NemorlError", "PluginError", "PluginNotFoundError", "ResourceError"),
        *("RunInUseError", "StorageError", "TerminalLostError", "UsageError", "WeightsLostError"),
        *("WeightsUnprovenError", "WorkerHungError"),
        *("WorkerLostError", "boundary"),
    ),
    "nemorl.contracts.environment": ("Environment", "Episode", "as_score", "as_step"),
    "nemorl.plugins.hooks": ("HookSpecs", "hookimpl"),
    "nemorl.trainer": ("BaseTrainer",),
    "nemorl.contracts.display": ("Display",),
    "nemorl.contracts.memory": (
        *("DeviceMemoryError", "MemoryPart", "OffloadingBackend", "SleepingBackend", "WeightsForgottenError"),
    ),
    "nemorl_rl.trainer": ("RolloutTrainer",),
    "nemorl_rl.rollouts.engine": ("RolloutPlan", "rollout_metrics"),
    "nemorl_rl.config": ("BreakerConfig", "RolloutConfig", "RolloutRunConfig", "RolloutValidationConfig"),
    "nemorl_rl.planning.memory.describing": (
        *("EngineMemory", "EnginePlan", "PlansEngine", "PlansTraining", "Spread", "TrainingPlan"),
    ),
    "nemorl_rl.planning.memory.parts": ("Moments", "Part"),
    "nemorl_rl.planning.memory.models": ("HeldModel",),
    "nemorl_rl.planning.memory.engines": ("Engines", "RowsPlan", "cache_sizes", "rows_memory"),
    "nemorl_rl.planning.memory.head": ("Head", "head_buffers", "scored_logits"),
    "nemorl_rl.policy_gradient.trainer": ("PolicyGradientTrainer",),
    "nemorl_rl.policy_gradient.config": (
        *("ClippedConfig", "ClippedRatio", "ImportanceCorrection", "OverlongPenalty", "PolicyGradientConfig"),
        *("RewardScaling", "RewardShaping"),
    ),
    "nemorl_rl.policy_gradient.rewards": ("overlong", "scale", "shaped_rewards"),
    "nemorl_rl.policy_gradient.advantages": (
        *("batch_normalized", "clip_advantages", "differ", "group_advantages", "has_spread", "over_valid"),
    ),
    "nemorl_rl.policy_gradient.kl_charge": ("ChargeKL", "kl_to_go", "with_kl"),
    "nemorl_rl.policy_gradient.loss": ("ClippedPolicyGradientLoss", "PolicyGradientLoss"),
    "nemorl_rl.policy_gradient.correction": (
        *("Correction", "IcePop", "OfSequences", "Plain", "SequenceMask", "Truncated", "build_correction"),
    ),
    "nemorl_rl.policy_gradient.disagreement": ("DropDisagreeing",),
    "nemorl_rl.policy_gradient.updates": ("BatchTransform", "run_updates", "transformed"),
    "nemorl_rl.policy_gradient.metrics": ("group_metrics", "kl_metrics"),
    "nemorl_tensors": (
        *("KL_ESTIMATORS", "KLTerm", "KLType", "LossAggregation", "TokenBatch", "kl_k1", "kl_k2", "kl_k3"),
        *("linear_logprobs", "linear_topk_logprobs", "loss_weights", "masked_max", "masked_mean", "masked_min"),
        *("next_token_targets", "pair_batch", "pair_weights", "preference_metrics", "segment_ids", "segment_mean"),
        *("segment_sum", "split_pairs", "standardized", "vocab_parallel_logprobs", "vocab_parallel_topk_logprobs"),
    ),
    "nemorl_cli.report.run_data": ("RunData",),
    "nemorl_cli.report.sections": ("Curves", "Section", "Table", "Text", "TranscriptSection"),
    "nemorl_testing": (
        *("Check", "ConformanceError", "NotApplicable", "Report", "Settings", "check_plugin", "checks_for"),
        *("conformance", "run_checks"),
    ),
}
