"""``nemorl.push_to_hub``: a run's model, with its card, to the Hugging Face hub. Only ever when it is called."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from nemorl.base.files.atomic import exported
from nemorl.errors import UsageError, boundary
from nemorl.run import TrainResult
from nemorl_trust.audit.recording import record

from nemorl_cli.report.model_card import HUB_NAME, model_card
from nemorl_cli.report.run_data import RunData

WEIGHTS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Files of a model folder that are pushed."""


class Hub(Protocol):
    """The part of ``huggingface_hub.HfApi`` that is used."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], commit_message: str
    ) -> Any: ...

    def upload_file(self, *, repo_id: str, path_or_fileobj: bytes, path_in_repo: str, commit_message: str) -> Any: ...


def push_to_hub(
    run: TrainResult | Path | str,
    repo_id: str,
    *,
    model: Path | str | None = None,
    private: bool = True,
    license: str | None = None,
    notes: str = "",
    hub: Hub | None = None,
) -> str:
    """Upload the exported model of a run and a model card: algorithm, data, metrics, versions, licence.

    Whoever is logged in with ``hf auth login`` or ``HF_TOKEN`` uploads. The card holds no local paths, no samples and
    nothing of the config but what it lists.

    Args:
        run: What ``fit`` returned, or a run directory.
        repo_id: ``name/model`` on the hub; made if it is not there yet.
        model: Folder of the model. Unset: the one that the run exported when it ended.
        private: A new repository is visible to you alone.
        license: Identifier as the hub knows it, e.g. ``apache-2.0``.
        notes: Markdown of your own for the card.
        hub: Used in place of ``huggingface_hub.HfApi()``.

    Returns:
        Address of the repository.

    Raises:
        UsageError: the run exported no model, ``repo_id`` is no name, or huggingface_hub is not installed.
        ForeignError: the hub refused.

    Example:
        >>> nemorl.push_to_hub(result, "me/sums", license="apache-2.0")  # doctest: +SKIP
        'https://huggingface.co/me/sums'
    """
    run_dir = run.run_dir if isinstance(run, TrainResult) else Path(run)
    folder = run_dir / "model" if model is None else Path(model)
    if not (run_dir / "config.yaml").is_file():
        raise UsageError(f"{run_dir} is not a run directory (no config.yaml)", fix="give the path of a run")
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"there is no model in {folder}",
            fix="export a checkpoint (`nemorl export RUN OUTPUT`) and pass model=OUTPUT",
        )
    if HUB_NAME.fullmatch(repo_id) is None:
        raise UsageError(f"{repo_id!r} is no name of a repository", fix="write name/model")
    card = model_card(RunData.load(run_dir), license=license, notes=notes)
    hub = hub or _hub()
    with boundary(f"the Hugging Face hub, pushing to {repo_id!r} (are you logged in? `hf auth login`)"):
        hub.create_repo(repo_id, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=list(WEIGHTS),
            commit_message="Model trained with nemorl",
        )
        hub.upload_file(
            repo_id=repo_id,
            path_or_fileobj=card.encode(),
            path_in_repo="README.md",
            commit_message="Model card",
        )
    record("weights_uploaded", {"run": str(run_dir.resolve()), "repository": repo_id, **exported(folder)})
    return f"https://huggingface.co/{repo_id}"


def _hub() -> Hub:
    if find_spec("huggingface_hub") is None:
        raise UsageError("huggingface_hub is not installed", fix="pip install huggingface_hub")
    from huggingface_hub import HfApi

    api: Hub = HfApi()
    return api
