"""Records of episodes with images and sounds: ids below zero, the items' files, and what is made of them again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from command_line import Command
from nemorl.base.files.jsonl import dumps
from nemorl.errors import UsageError
from nemorl.media import Media
from nemorl.types import Branch, Sample
from nemorl_cli.report.comparing.prompts import pairs_of
from nemorl_cli.report.records.evaluating import EvaluationRecords
from nemorl_cli.report.records.items import named_ids, true_ids
from nemorl_cli.report.records.media_files import MediaFiles, media_file, read_media
from nemorl_cli.report.records.reading import FOLDER, read_records
from nemorl_cli.report.records.samples import sample_of
from nemorl_cli.report.records.schema import SCHEMA
from nemorl_cli.report.records.selecting import Selection
from nemorl_cli.report.records.table import Group, Rollout, table_of
from nemorl_cli.report.records.tokens import token_texts
from nemorl_cli.report.records.writing import Recorder
from nemorl_cli.transcripts import token_table
from nemorl_insight.diff.rollouts import RecordPair, StepRecords
from nemorl_rl.rollouts.completions import shown_prompt
from nemorl_rl.rollouts.recording import RecordingConfig
from record_files import write_records
from recorded_messages import Raises
from seen_records import decode, episode, parts, picture, tone

RED, BLUE, TONE = picture(1), picture(2), tone()


def rows(*samples: Sample) -> list[dict[str, Any]]:
    rollout = Rollout("run", "train", 1, 0.0, [Group(0, samples)])
    found: list[dict[str, Any]] = table_of(rollout, decode).to_pylist()
    return found


def recorder(run_dir: Path, **amounts: Any) -> Recorder:
    config = RecordingConfig(**amounts)
    return Recorder(run_dir, config, validation_every=0, decode=decode, warn=pytest.fail)


def write(run_dir: Path, steps: dict[int, Sequence[Sample]], **amounts: Any) -> None:
    records = recorder(run_dir, **amounts)
    for step, samples in steps.items():
        records.rollout(samples, "train", step)
    records.close()


def files(run_dir: Path) -> set[str]:
    return {path.stem for path in (run_dir / FOLDER / "media").iterdir()}


def test_tokens_of_items_are_numbers_below_zero_and_the_items_stand_beside_them() -> None:
    [row] = rows(episode(["a", (RED, 3), "b", (BLUE, 2), (RED, 3)], "2"))
    # a, 3 of the first item, b, 2 of the second, 3 of the first again, the response
    assert row["sequences"][0]["token_ids"] == [97, -1, -1, -1, 98, -2, -2, -1, -1, -1, 50]
    assert row["media"] == [
        {"digest": RED.digest, "kind": "image", "tokens": 3},
        {"digest": BLUE.digest, "kind": "image", "tokens": 2},
    ]
    assert row["prompt_media"] == 2
    [prompt, policy] = row["turns"]
    assert prompt["text"] == "ab"
    assert prompt["shown"] == [
        {"item": 0, "at": 1, "tokens": 3},
        {"item": 1, "at": 2, "tokens": 2},
        {"item": 0, "at": 2, "tokens": 3},
    ]
    assert policy["shown"] == []


def test_an_item_shown_twice_in_a_row_is_two_items_of_its_length() -> None:
    sample = episode([(RED, 2), (RED, 2), "?"])
    [row] = rows(sample)
    assert row["sequences"][0]["token_ids"][:4] == [-1] * 4
    assert row["media"][0]["tokens"] == 2
    assert [(one["at"], one["tokens"]) for one in row["turns"][0]["shown"]] == [(0, 2), (0, 2)]
    assert true_ids(row["sequences"][0]["token_ids"], row["media"]) == sample.token_ids


def test_markers_between_the_tokens_of_an_item_part_its_run_but_not_the_item() -> None:
    # A family may write special tokens, which have no text, between rows of an image: here it is id 0.
    ids = [*RED.token_ids(4)]
    marked = (*ids[:2], 0, *ids[2:])
    sample = Sample(
        *(episode([]).prompt, (*marked, 50), (False,) * 5 + (True,), (0.0,) * 5 + (-0.5,)),
        *(episode([]).score, "2", "stop"),
        media=(RED,),
    )
    table = table_of(Rollout("run", "train", 1, 0.0, [Group(0, [sample])]), lambda ids: decode(ids).replace("\0", ""))
    [row] = table.to_pylist()
    assert row["sequences"][0]["token_ids"] == [-1, -1, 0, -1, -1, 50]
    assert row["turns"][0]["shown"] == [{"item": 0, "at": 0, "tokens": 4}]
    assert true_ids(row["sequences"][0]["token_ids"], row["media"]) == sample.token_ids


def test_observations_and_branches_show_items_of_the_episode() -> None:
    fork = Branch(parts((TONE, 2), "?", "7"), (False, False, False, True), (0.0, 0.0, 0.0, -0.5))
    sample = episode(["a", (RED, 2)], "2", ["see ", (BLUE, 3)], branches=[fork], more=[TONE])
    [row] = rows(sample)
    assert [item["kind"] for item in row["media"]] == ["image", "image", "audio"]
    assert row["prompt_media"] == 1
    assert row["sequences"][1]["token_ids"] == [-3, -3, 63, 55]
    [of_environment] = [turn for turn in row["turns"] if turn["author"] == "environment"]
    assert of_environment["shown"] == [{"item": 1, "at": 4, "tokens": 3}]
    items = {item.digest: item for item in sample.media}
    found = sample_of({**row, "outcome": "scored"}, items)
    told = [(one.token_ids, one.response_mask, one.generation_logprobs) for one in found.sequences]
    assert told == [(one.token_ids, one.response_mask, one.generation_logprobs) for one in sample.sequences]
    assert found.media == sample.media
    assert found.prompt.media == sample.prompt.media == (RED,)


def test_an_episode_of_text_has_no_items() -> None:
    [row] = rows(episode(["a"]))
    assert (row["media"], row["prompt_media"], row["turns"][0]["shown"]) == ([], 0, [])
    assert row["sequences"][0]["token_ids"] == [97, 50]


@pytest.mark.parametrize(
    ("ids", "media", "told"),
    [
        ([*RED.token_ids(2), 50], (BLUE,), "carry"),
        ([*RED.token_ids(3)[1:], 50], (RED,), "part"),
        ([*RED.token_ids(3), *RED.token_ids(2), 50], (RED,), "part"),
    ],
)
def test_tokens_that_could_not_be_rebuilt_are_refused(ids: list[int], media: tuple[Media, ...], told: str) -> None:
    count = len(ids)
    sample = Sample(
        *(episode([]).prompt, tuple(ids), (False,) * (count - 1) + (True,), (0.0,) * count),
        *(episode([]).score, "2", "stop"),
        media=media,
    )
    with pytest.raises(ValueError, match=told):
        rows(sample)


def test_records_without_the_columns_still_read(tmp_path: Path) -> None:
    write_records(tmp_path, [{"split": "train", "step": 1, "sample_id": "train-1-0-0", "prompt": "a"}])
    path = tmp_path / FOLDER / "train" / "step_000001.parquet"
    older = pq.read_table(path).drop_columns(["media", "prompt_media"]).replace_schema_metadata(SCHEMA.metadata)
    pq.write_table(older, path)
    [row] = read_records(tmp_path)
    assert row["media"] is None
    assert true_ids([5, 6], row["media"]) == (5, 6)
    assert named_ids([5, 6], row["media"]) == [5, 6]


# Files


def test_items_are_kept_once_by_digest_and_no_record_holds_their_bytes(tmp_path: Path) -> None:
    write(tmp_path, {1: [episode([(RED, 2), (TONE, 3)])] * 2, 2: [episode([(RED, 2)])]})
    folder = tmp_path / FOLDER
    assert files(tmp_path) == {RED.digest, TONE.digest}
    image, sound = (media_file(folder, item.digest) for item in (RED, TONE))
    assert image is not None
    assert sound is not None
    assert (image.suffix, sound.suffix) == (".png", ".wav")
    assert image.read_bytes() == RED.data
    for path in [*folder.rglob("*.parquet"), *folder.rglob("*.jsonl")]:
        assert RED.data[:32] not in path.read_bytes()
    assert all(token >= 0 for token in token_texts(folder))


def test_a_name_from_outside_leaves_the_folder_of_media_alone(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "secret.png").write_bytes(b"")
    assert media_file(tmp_path, "../secret") is None
    assert media_file(tmp_path, "0" * 64) is None


def test_an_item_whose_file_is_gone_is_refused_by_name(tmp_path: Path, raises: Raises) -> None:
    write(tmp_path, {1: [episode([(RED, 2)])]})
    [row] = read_records(tmp_path)
    assert read_media(tmp_path, row["media"])[RED.digest] == RED
    path = media_file(tmp_path / FOLDER, RED.digest)
    assert path is not None
    path.unlink()
    with raises(UsageError, f"image {RED.digest[:12]}"):
        read_media(tmp_path, row["media"])


def test_files_go_with_the_last_record_that_names_them(tmp_path: Path) -> None:
    steps = {1: [episode([(RED, 2)])], 2: [episode([(RED, 2), (BLUE, 2)])], 3: [episode([(TONE, 2)])]}
    write(tmp_path, steps)
    kept = Selection(tmp_path / FOLDER, RecordingConfig(), 0)
    kept.removed_after(2)
    assert files(tmp_path) == {RED.digest, BLUE.digest}
    kept.removed_after(1)
    assert files(tmp_path) == {RED.digest}


def test_thinning_to_the_budget_counts_and_drops_files_of_items(tmp_path: Path) -> None:
    big = [Media("image", bytes([number]) * 40_000) for number in range(4)]
    steps = {step: [episode([(big[step - 1], 2)])] for step in (1, 2, 3, 4)}
    # Of 4 items of 40 kB two fit; `every` becomes 2, and steps 2 and 4 are left.
    write(tmp_path, steps, max_gib=125_000 / 2**30)
    assert {row["step"] for row in read_records(tmp_path)} == {2, 4}
    assert files(tmp_path) == {big[1].digest, big[3].digest}


def test_a_step_that_is_made_again_leaves_no_file_behind(tmp_path: Path) -> None:
    files_of = MediaFiles(tmp_path / FOLDER)
    path = tmp_path / FOLDER / "train" / "step_000001.parquet"
    files_of.store(path, [RED])
    files_of.store(path, [BLUE])
    files_of.settle()
    assert files(tmp_path) == {BLUE.digest}


def test_an_evaluation_that_replaces_another_leaves_the_files_of_a_run(tmp_path: Path) -> None:
    write(tmp_path, {1: [episode([(RED, 2)])]})
    for item in (BLUE, TONE):
        records = EvaluationRecords(tmp_path, decode)
        records.add("drawings", 0, [episode([(RED, 2), (item, 2)])])
        records.flush()
    assert files(tmp_path) == {RED.digest, TONE.digest}


# Comparisons and the terminal


def test_prompts_of_equal_words_about_other_images_are_not_the_same(tmp_path: Path) -> None:
    for name, item in (("one", RED), ("same", RED), ("other", BLUE)):
        write(tmp_path / name, {1: [episode(["what?", (item, 2)])]})
    same = pairs_of(tmp_path / "one", tmp_path / "same")
    assert same is not None
    assert len(same.pairs) == 1
    assert pairs_of(tmp_path / "one", tmp_path / "other") is None


def test_the_first_token_that_differs_is_that_of_the_other_image(tmp_path: Path) -> None:
    for name, item in (("one", RED), ("other", BLUE)):
        write(tmp_path / name, {1: [episode(["a", (item, 2)])]})
    one, other = (StepRecords.read(tmp_path / name, 1) for name in ("one", "other"))
    assert one is not None
    assert other is not None
    point = RecordPair(one, other, 0.0).first_difference("data")
    assert point is not None
    assert (point.first, point.token) == (f"image {RED.digest[:12]}:0", 1)
    assert RecordPair(one, one, 0.0).first_difference("data") is None


def test_the_terminal_names_items_in_their_places_and_folds_their_tokens(tmp_path: Path, nemorl: Command) -> None:
    write(tmp_path, {1: [episode(["see ", (RED, 3), "and ", (TONE, 2), "now"])]})
    shown = nemorl("view", "samples", tmp_path, "--full", "--tokens").out
    image, sound = f"[image 90x60 {RED.digest[:4]}…]", f"[audio 0.5 s {TONE.digest[:4]}…]"
    assert f"see {image} and {sound} now" in shown
    assert f"4-6    {image}" in shown
    assert f"{image} {sound} see and now" in nemorl("view", "samples", tmp_path).out
    [answer] = nemorl("view", "samples", tmp_path, "--json", "--tokens").json
    assert answer["media"][0] == {"digest": RED.digest, "kind": "image", "tokens": 3}


def test_tokens_of_an_item_are_one_line_of_the_table() -> None:
    [row] = rows(episode(["a", (RED, 2), (RED, 2)]))
    lines = list(token_table(row, {97: "a"}, ["[image]"]))
    assert [line[:2] for line in lines] == [("0", "a"), ("1-2", "[image]"), ("3-4", "[image]"), ("5", "50")]


def test_json_lines_say_how_many_bytes_there_are_and_not_which() -> None:
    row = {"prompt": [{"role": "user", "content": [{"type": "image", "media": RED}]}], "image": RED.data}
    text = dumps(row).decode()
    assert json.loads(text)["image"] == f"{len(RED.data)} bytes"
    assert len(text) < 200
    assert "PNG" not in text


def test_a_run_under_way_names_the_images_of_a_prompt() -> None:
    prompt = episode(["what?", (RED, 2), (TONE, 2)]).prompt
    assert shown_prompt(prompt) == f"[image 90x60 {RED.digest[:4]}…] [audio 0.5 s {TONE.digest[:4]}…] what?"
