"""Presets with images and sounds: rows as they are published become messages with parts, and what cannot is refused."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
from nemorl.config import load_config
from nemorl.errors import ConfigError, DataError
from nemorl_tasks.datasets.derived import inside_tag
from nemorl_tasks.datasets.media_rows import Media, placed, with_parts
from nemorl_tasks.datasets.preset import PresetConfig
from nemorl_tasks.datasets.preset_file import find_preset, presets
from nemorl_tasks.datasets.sources import undecoded
from PIL import Image
from recorded_messages import Raises

OPTIONS = "Please choose the answer from the following options: ['3', 'One', '4']. Output the final answer in <answer>"


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


DIAGRAM = {"bytes": png(4, 3), "path": None}
SOUND = {"bytes": b"RIFF", "path": "a.wav"}
ROWS: dict[str, dict[str, Any]] = {
    "clevr-cogent": {"image": DIAGRAM, "problem": "How many cubes?", "solution": "<answer> 3 </answer>"},
    "geometry3k": {"images": [DIAGRAM], "problem": "<image>Find x.", "answer": "30", "id": 7},
    "refcoco": {
        "captions": ["man", "man in red", "left"],
        "bbox": [64.0, 100.0, 320.4, 400.0],
        "image_path": "coco/train2014/a.jpg",
    },
    "mmpr-tiny": {
        "images": [{"path": "MMPR-Tiny/images/a.jpg"}, {"path": "MMPR-Tiny/images/b.jpg"}],
        "extra_info": {"question": "<image>\nIs <image_2> bigger?"},
        "reward_model": {"ground_truth": "yes"},
    },
    "avqa": {
        "audio": SOUND,
        "question": "How many bells are in the video?\nChoices:\nA. 3\nB. One\nC. 4",
        "answer": "B. One",
    },
    "audiomcq": {"audio_path": "clips/a.wav", "question": "How many?", "choices": ["3", "One", "4"], "answer": "One"},
    "mmau": {"audio": SOUND, "question": "How many?", "choices": ["3", "One", "4"], "answer": "One"},
    "daily-omni": {
        "video_id": "v1",
        "Question": "What first?",
        "Choice": ["A. a bell", "B. a dog", "C. rain", "D. a car"],
        "Answer": "B",
    },
}
"""A row of each in the schema that its authors publish."""
FILES = {
    "coco/train2014/a.jpg": png(640, 400),
    "MMPR-Tiny/images/a.jpg": b"first",
    "MMPR-Tiny/images/b.jpg": b"second",
    "clips/a.wav": b"sound",
    "Videos/v1/v1_video.mp4": b"frames",
    "Videos/v1/v1_audio.wav": b"sound of frames",
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return str(tmp_path)


def converted(
    name: str, folder: str | None = None, row: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    data = PresetConfig(preset=name, media_folder=folder, **options)
    return data.mapping().convert(ROWS[name] if row is None else row, number=0, source=name)


def content(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of the last message of the prompt."""
    found: list[dict[str, Any]] = row["prompt"][-1]["content"]
    return found


def shown(row: dict[str, Any]) -> list[Any]:
    """Texts as they are, and the bytes of each image, sound and video by its kind."""
    parts = content(row)
    return [part["text"] if part["type"] == "text" else (part["type"], part[part["type"]]["bytes"]) for part in parts]


PLAIN = {"prompt_template": "{prompt}"}


@pytest.mark.parametrize(
    ("name", "parts", "answer"),
    [
        ("clevr-cogent", [("image", DIAGRAM["bytes"]), "How many cubes?"], "3"),
        ("geometry3k", [("image", DIAGRAM["bytes"]), "Find x."], "30"),
        (
            # 64/640, 100/400, 320.4/640 and 400/400, in thousandths.
            "refcoco",
            [
                ("image", FILES["coco/train2014/a.jpg"]),
                "Please provide the bounding box coordinate of the region described by the following phrase: "
                "man in red",
            ],
            "[100, 250, 501, 1000]",
        ),
        ("mmpr-tiny", [("image", b"first"), "Is", ("image", b"second"), "bigger?"], "yes"),
        ("avqa", [("audio", b"RIFF"), f"How many bells are in the audio? {OPTIONS} </answer>."], "One"),
        ("audiomcq", [("audio", b"sound"), f"How many? {OPTIONS} </answer>."], "One"),
        ("mmau", [("audio", b"RIFF"), f"How many? {OPTIONS} </answer>."], "One"),
        (
            "daily-omni",
            [
                ("video", b"frames"),
                ("audio", b"sound of frames"),
                "What first?\nA. a bell\nB. a dog\nC. rain\nD. a car\n"
                "Your replies must contain only a single letter (either A,B,C or D).",
            ],
            "B",
        ),
    ],
)
def test_a_published_row_becomes_a_message_with_parts(name: str, parts: list[Any], answer: str, folder: str) -> None:
    row = converted(name, folder, **PLAIN)
    assert [message["role"] for message in row["prompt"]] == ["user"]
    assert shown(row) == parts
    assert (row["answer"], row["response"]) == (answer, answer)
    # What is in the prompt is not kept beside it, where records of rows would have it too.
    assert not {"image", "images", "audio", "audio_path", "image_path"} & row.keys()


def test_every_preset_with_media_has_a_row_here() -> None:
    with_media = {preset.name for preset in presets().values() if preset.media}
    assert with_media == {find_preset(name).name for name in ROWS}
    assert {name for name in ROWS if find_preset(name).media_files} == {
        "refcoco",
        "mmpr-tiny",
        "audiomcq",
        "daily-omni",
    }


def test_a_template_is_put_around_the_text_and_not_around_the_image(folder: str) -> None:
    row = converted("mmpr-tiny", folder, prompt_template="Look. {prompt} Think.", system_prompt="Be brief.")
    assert row["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert shown(row) == [("image", b"first"), "Look. Is", ("image", b"second"), "bigger? Think."]


@pytest.mark.parametrize("name", ["clevr-cogent", "geometry3k", "refcoco"])
def test_a_prompt_asks_for_the_element_that_its_reward_reads(name: str, folder: str) -> None:
    (_, text) = shown(converted(name, folder))
    assert "<answer>" in text
    assert "</think>" in text


def test_space_at_the_ends_of_a_template_is_kept(folder: str) -> None:
    row = converted("mmpr-tiny", folder, prompt_template=" Look.\n{prompt}\n")
    assert shown(row)[1::2] == [" Look.\nIs", "bigger?\n"]


def test_images_without_a_marker_go_before_the_text(folder: str) -> None:
    question = {"extra_info": {"question": "Which is bigger?"}}
    assert shown(converted("mmpr-tiny", folder, {**ROWS["mmpr-tiny"], **question})) == [
        ("image", b"first"),
        ("image", b"second"),
        "Which is bigger?",
    ]


@pytest.mark.parametrize(
    "question", ["<image>Is it?", "<image><image>Is <image> it?"], ids=["one marker", "three markers"]
)
def test_two_images_for_another_number_of_markers_are_refused(question: str, folder: str, raises: Raises) -> None:
    with raises(DataError, 0, 2, question.count("<image>")):
        converted("mmpr-tiny", folder, {**ROWS["mmpr-tiny"], "extra_info": {"question": question}})


@pytest.mark.parametrize("nothing", [None, [], [None], [{"bytes": None, "path": None}]])
def test_a_row_without_its_image_is_refused(nothing: Any, raises: Raises) -> None:
    with raises(DataError, 0, "images"):
        converted("geometry3k", None, {**ROWS["geometry3k"], "images": nothing})


def test_bytes_image_objects_and_data_urls_are_passed_on_as_they_are() -> None:
    picture = Image.new("RGB", (2, 2))
    for item in (b"bytes", picture, "data:image/png;base64,iVBORw0KGgo="):
        (part, _) = content(converted("clevr-cogent", None, {**ROWS["clevr-cogent"], "image": item}))
        assert part["image"] is item


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.wav", "media_folder"),
        ("../secret.wav", "media_folder"),
        ("clips/../../secret.wav", "media_folder"),
        ("/etc/hostname", "media_folder"),
        ("https://example.org/a.wav", "machine"),
        ("file:///etc/hostname", "machine"),
    ],
)
def test_a_row_names_files_of_its_folder_alone(name: str, said: str, folder: str, raises: Raises) -> None:
    (Path(folder).parent / "secret.wav").write_bytes(b"secret")
    with raises(DataError, 0, said):
        converted("audiomcq", folder, {**ROWS["audiomcq"], "audio_path": name})


def test_a_preset_whose_rows_name_files_asks_for_their_folder(raises: Raises) -> None:
    config = {"algorithm": "grpo", "model": "org/model", "environment": "exact_alnum"}
    with raises(ConfigError, "Videos.tar", path="data.media_folder"):
        load_config({**config, "data": "daily-omni"})
    with raises(ConfigError, path="data.chat"):
        load_config({**config, "data": {"name": "clevr-cogent", "chat": False}})
    assert (
        load_config({**config, "data": {"name": "daily-omni", "media_folder": "videos"}}).data.media_folder == "videos"
    )


def test_clevr_is_validated_on_scenes_of_the_same_colours_unless_others_are_named() -> None:
    assert find_preset(str(find_preset("clevr-cogent").validation_preset)).hub == "MMInstruction/Clevr_CoGenT_ValA"
    other = find_preset("clevr_cogent_valB")
    assert (other.hub, other.train, other.validation) == ("MMInstruction/Clevr_CoGenT_ValB", None, "train")


def test_a_region_is_a_part_of_one_image(raises: Raises, tmp_path: Path) -> None:
    file = tmp_path / "boxes.yaml"
    file.write_text(
        "name: boxes\ntask: images\nsummary: ours\nlicence: ours\nhomepage: https://example.org\nhub: a/b\n"
        "columns: {prompt: '{phrase}'}\nregion: {phrases: names, box: box}\n"
    )
    with raises(ConfigError, "image", path="data.preset"):
        load_config({"algorithm": "grpo", "model": "o/m", "environment": "bbox_giou", "data": str(file)})


def test_a_box_around_what_is_no_image_is_refused(folder: str, raises: Raises) -> None:
    (Path(folder) / "coco/train2014/a.jpg").write_bytes(b"no image")
    with raises(DataError, 0):
        converted("refcoco", folder)


def test_tables_of_the_library_keep_what_they_hold_encoded() -> None:
    features = datasets.Features({"images": datasets.Sequence(datasets.Image()), "problem": datasets.Value("string")})
    table = datasets.Dataset.from_dict({"images": [[DIAGRAM]], "problem": ["<image>Find x."]}, features=features)
    assert isinstance(table[0]["images"][0], Image.Image)
    rows = undecoded(table)
    assert (len(rows), rows[0]) == (1, {"images": [DIAGRAM], "problem": "<image>Find x."})
    assert pickle.loads(pickle.dumps(rows))[0] == rows[0]
    plain = [{"problem": "Find x."}]
    assert undecoded(plain) is plain


def test_markers_are_replaced_in_their_order() -> None:
    image, sound = r"<image(?:_\d+)?>", r"<audio(?:_\d+)?>"
    media = [Media("image", b"1", image), Media("image", b"2", image), Media("audio", b"3", sound)]
    found, text = placed(media, " <audio_1><image> Which? <image_2>", "row 0")
    assert (text, [item.data for item in found], [item.stands_before for item in found]) == (
        "Which? <image_2>",
        [b"3", b"1", b"2"],
        [True, True, False],
    )
    parts = with_parts({"role": "user", "content": f"Think. {text}"}, found)["content"]
    assert parts == [
        {"type": "audio", "audio": b"3"},
        {"type": "image", "image": b"1"},
        {"type": "text", "text": "Think. Which?"},
        {"type": "image", "image": b"2"},
    ]


@pytest.mark.parametrize(
    ("text", "inside"),
    [("<answer> 3 </answer>", "3"), ("so <answer>3</answer> or <answer>4</answer>", "3"), (" yes\n", "yes")],
)
def test_an_answer_may_stand_in_an_element(text: str, inside: str) -> None:
    assert inside_tag(text, "answer") == inside
