"""A checkpoint as a Hugging Face folder, which any backend and any other tool starts from (``nemorl export``)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from nemorl.base.files.atomic import exported, listed, replacing_folder
from nemorl.base.files.checkpoints import Checkpoint
from nemorl.base.packages.site import site
from nemorl.config.load import load_config
from nemorl.config.models import AuxiliaryModel, PolicyConfig
from nemorl.config.run import RunConfig
from nemorl.contracts import AdapterBackend
from nemorl.errors import CheckpointError, UsageError
from nemorl.resources.manager import ResourceManager, short_name
from nemorl.storage.checkpoints import CheckpointManager


def export_model(
    run_dir: Path,
    output: Path,
    *,
    step: int | None = None,
    best: bool = False,
    adapter: bool = False,
    overrides: Sequence[str] = (),
) -> Checkpoint:
    """Write the policy of one of a run's checkpoints as a model folder, or its LoRA adapter as a folder of peft.

    The run's own training backend reads it, on as many workers as the run had; ``overrides`` may say otherwise
    (``cluster.launcher=local``), as far as the backend reads checkpoints of other layouts.

    Args:
        run_dir: Of the run.
        output: Folder to write; must not exist yet.
        step: Of the checkpoint. Unset: the latest.
        best: The best one by the run's metric.
        adapter: The adapter alone; the model that it adapts stays where the run found it.
        overrides: Changes of the run's config, as ``path=value``.

    Returns:
        The checkpoint that was exported.

    Raises:
        UsageError: There is no such run or checkpoint, ``output`` exists, or the run has no adapter.
        CheckpointError: The latest, or one that may be the best, is damaged.
    """
    if not (run_dir / "config.yaml").is_file():
        raise UsageError(f"{run_dir} is not a run directory (no config.yaml)", fix="give the path of a run")
    if output.exists():
        raise UsageError(f"{output} exists", fix="choose another folder")
    config = load_config(run_dir / "config.yaml", overrides)
    if adapter:
        _require_adapter(run_dir, config.policy)
    checkpoint = _chosen(run_dir, config, step, best)
    checkpoint.verify()
    with closing(ResourceManager(config, run_dir)) as resources:
        policy = resources.auxiliary_policy("policy", AuxiliaryModel(config.policy, config.policy_head), 1)
        policy.load_checkpoint(checkpoint.path / "policy")
        if adapter:
            with replacing_folder(output) as draft:
                policy.workers.call(AdapterBackend.save_adapters, draft)
        else:
            policy.save_pretrained(output)
    site().record("weights_exported", {"run": str(run_dir.resolve()), "step": checkpoint.step, **exported(output)})
    return checkpoint


def _require_adapter(run_dir: Path, policy: PolicyConfig) -> None:
    if policy.lora is None:
        raise UsageError(
            f"{run_dir} trained all weights of {policy.model_name}: it has no LoRA adapter",
            fix="leave out --adapter: a model folder is written",
        )
    if "adapters" not in policy.backend.supports:
        raise UsageError(
            f"training backend {short_name(policy.backend)} cannot write adapters apart from the model",
            fix="leave out --adapter: a model folder is written, adapters merged into it",
        )


def _chosen(run_dir: Path, config: RunConfig, step: int | None, best: bool) -> Checkpoint:
    manager = CheckpointManager.of_run(run_dir, config)
    found = {checkpoint.step: checkpoint for checkpoint in manager.all()}
    if not found:
        raise UsageError(f"{run_dir} has no complete checkpoint", fix="let the run save one: checkpoint.every")
    if step is not None and step not in found:
        raise UsageError(f"there is no checkpoint of step {step}", fix=f"there are {', '.join(map(str, found))}")
    newest, sound = found[max(found)].path, {checkpoint.path for checkpoint in found.values()}
    lost = [path for path in listed(newest.parent, "step_*") if path not in sound and (best or path > newest)]
    if step is None and lost:
        reason = manager.damaged().get(lost[-1], f"{lost[-1]} could not be read")
        raise CheckpointError(reason, fix=f"choose another one by its step: {', '.join(map(str, found))}")
    chosen = manager.best() if best else found[max(found) if step is None else step]
    assert chosen is not None, "there is one"
    return chosen
