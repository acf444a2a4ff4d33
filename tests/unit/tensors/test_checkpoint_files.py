"""A rank's files of a checkpoint, written at once or in a thread over copies: the same bytes, of one moment."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from nemorl_tensors.engines.checkpoint_files import BackgroundWriter, HostCopies, RankFiles, TensorFile
from safetensors import safe_open


def rank_files(scale: float = 1.0) -> RankFiles:
    tensors = {
        "matrix": torch.arange(6.0).view(2, 3).mul(scale),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "low": torch.full((3,), 0.5 * scale, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 4),
    }
    return RankFiles({"model/a.safetensors": TensorFile(tensors, {"format": "pt"})}, {"position.json": "{}\n"})


def written(folder: Path, files: RankFiles) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files.write(folder)}


def test_a_snapshot_is_byte_for_byte_what_a_save_at_that_moment_writes(tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    at_once, live = written(tmp_path / "at_once", RankFiles(rank_files().tensors)), rank_files()
    writer = BackgroundWriter()
    writer.begin(tmp_path / "later", live)
    for tensor in live.tensors["model/a.safetensors"].tensors.values():
        tensor.zero_()
    found = writer.files(wait=True)
    assert found is not None
    assert {Path(file).relative_to(tmp_path / "later").as_posix() for file in found} == {*at_once, "position.json"}
    assert (tmp_path / "later/model/a.safetensors").read_bytes() == at_once["model/a.safetensors"]
    assert all(hashlib.sha256(Path(file).read_bytes()).hexdigest() == digest for file, digest in found.items())
    with safe_open(tmp_path / "later/model/a.safetensors", "pt") as file:
        assert file.get_tensor("transposed").tolist() == [[0, 3], [1, 4], [2, 5]]
        assert (file.get_tensor("count").item(), file.metadata()) == (7, {"format": "pt"})
    writer.close()


def test_the_memory_of_copies_is_used_again_and_grows() -> None:
    copies = HostCopies()

    def place(files: RankFiles) -> int:
        return copies.of(files).tensors["model/a.safetensors"].tensors["matrix"].data_ptr()

    first = place(rank_files())
    assert place(rank_files(2.0)) == first
    large = RankFiles({"model/a.safetensors": TensorFile({"matrix": torch.ones(1000)})})
    assert copies.of(large).tensors["model/a.safetensors"].tensors["matrix"].sum() == 1000
    again = place(rank_files())
    assert place(rank_files()) == again
    copies.close()


def test_what_ends_the_thread_is_raised_where_the_files_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file in the place of the folder")
    writer = BackgroundWriter()
    writer.begin(tmp_path, rank_files())
    with pytest.raises(FileExistsError):
        writer.files(wait=True)
    (tmp_path / "model").unlink()
    writer.begin(tmp_path, rank_files())  # the next one is a new one
    assert len(writer.files(wait=True) or ()) == 2
    writer.close()
