"""Loading one split with the ``datasets`` library: memory-mapped from its cache, without progress bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import DataError

FORMATS = {
    ".arrow": "arrow",
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".txt": "text",
}
"""Extension of a file -> the builder of the ``datasets`` library that reads it."""


def load_split(path: str, subset: str | None, split: str, revision: str | None) -> Any:
    """A ``datasets.Dataset``.

    Args:
        path: Name on the hub, or a folder laid out like one there.
        subset: Configuration, where there are several.
        split: Its name, or a slice of it.
        revision: Branch, tag or commit. Unset: the newest.

    Raises:
        DataError: There is no such dataset, configuration or split, or it cannot be reached.
    """
    datasets = _library()
    place = path + (f" ({subset})" if subset else "")
    with quiet():
        try:
            return datasets.load_dataset(path, subset, split=split, revision=revision)
        except Exception as error:  # whatever the hub, the network or a file parser raises
            fix = _split_fix(path, subset, split) if "split" in str(error).lower() else None
            reason = str(error).strip().split("\n", 1)[0]
            raise DataError(
                f"cannot load split {split!r} of dataset {place}: {type(error).__name__}: {reason}",
                fix=fix
                or "check the name on https://huggingface.co/datasets, the network, and config_name; "
                "for a gated dataset, log in with `hf auth login`",
            ) from error


def load_files(pattern: str) -> Any:
    """The rows of the files that a pattern or URL names (``shards/*.arrow``), joined in the order of their names.

    Raises:
        DataError: there are none, of a format that is not known, or they cannot be read.
    """
    suffix = Path(pattern).suffix.lower()
    if suffix not in FORMATS:
        raise DataError(f"{pattern} has no known format", fix=f"end it in one of {', '.join(FORMATS)}")
    datasets = _library()
    with quiet():
        try:
            return datasets.load_dataset(FORMATS[suffix], data_files=pattern, split="train")
        except Exception as error:  # as above
            reason = str(error).strip().split("\n", 1)[0]
            raise DataError(f"cannot read {pattern}: {type(error).__name__}: {reason}", fix="check the path") from error


def download_file(repository: str, name: str, revision: str | None) -> Path:
    """One file of a repository of the hub, in its cache.

    Raises:
        DataError: it is not there or cannot be reached.
    """
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repository, name, repo_type="dataset", revision=revision))
    except Exception as error:  # whatever the hub and the network raise
        reason = str(error).strip().split("\n", 1)[0]
        raise DataError(
            f"cannot download {name} of dataset {repository}: {type(error).__name__}: {reason}",
            fix="check the network; or download it elsewhere and give its path",
        ) from error


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError("the library `datasets` is not installed", fix="pip install nemorl-tasks") from error
    return datasets


def _split_fix(path: str, subset: str | None, split: str) -> str | None:
    """The splits there are, when that can be found out."""
    import datasets

    try:
        names = [str(name) for name in datasets.get_dataset_split_names(path, subset)]
    except Exception:  # the first error is the one to report
        return None
    return f"it has {', '.join(names)}. {did_you_mean(split, names) or ''}".strip()


@contextmanager
def quiet() -> Iterator[None]:
    """The library without progress bars and chatter, as it was before afterwards."""
    import datasets

    bars, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()
