"""Capabilities: what a backend can do beyond its core protocol, declared on its config class (``supports``).

They are compared when a config loads, so what a run needs and a backend lacks is an error before anything starts. A
capability with a protocol promises its methods; the others promise that an option works. ``nemorl plugins check`` tests
each that is declared.
"""

from __future__ import annotations

from typing import Literal

TrainingCapability = Literal[
    "activation_checkpointing",  # policy.activation_checkpointing
    "activations",  # ObservableTrainer: what each layer says
    "adapters",  # AdapterBackend: LoRA apart from the model
    "asynchronous_checkpoint",  # SnapshottingBackend: a checkpoint is written while training goes on
    "filtered_logprobs",  # log-probs among the tokens that the sampler left
    "lora",  # policy.lora
    "muon",  # policy.optimizer.name
    "nf4",  # policy.lora.base: a base in 4 bits
    "offload",  # OffloadingBackend: leaves the device's memory and comes back
    "packing",  # several sequences in a row
    "rate_scale",  # RateScalingBackend: learns more slowly from now on
    "reference",  # get_logprobs(batch, "reference")
    "remarks",  # RemarkingBackend
    "shared_prefixes",  # sequences that begin alike are computed once
    "tensor_parallel_lora",  # LoRA under tensor parallelism
    "topk_logprobs",  # get_topk_logprobs
    "value_head",  # get_values
    "weight_pieces",  # PublishesPieces: each rank sends its part
    "weights_only_checkpoint",  # save_checkpoint(optimizer=False)
]
"""Of a training backend.

>>> able: frozenset[TrainingCapability] = frozenset({"lora", "offload"})
"""
GenerationCapability = Literal[
    "activations",  # ObservableSampler
    "adapter_snapshots",  # several versions of adapters at a time
    "adapters",  # takes LoRA apart from the model
    "any_transport",  # fetches weights over whatever transport a run names
    "filtered_logprobs",  # log-probs among the tokens that the sampler left
    "generation_metrics",  # ReportingSampler
    "in_flight_updates",  # update_weights while requests run
    "prompt_logprobs",  # SamplingParams.prompt_logprobs
    "remarks",  # RemarkingBackend
    "shared_weights",  # samples from the trainer's own tensors
    "sleep",  # SleepingBackend: leaves the device's memory and comes back
    "snapshots",  # several versions of the weights at a time
    "submit",  # RequestBackend: single requests, at any time
    "weight_pieces",  # reads the parts that ranks send
]
"""Of a generation backend.

>>> able: frozenset[GenerationCapability] = frozenset({"sleep", "submit"})
"""
