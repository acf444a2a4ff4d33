"""Presets: names, rows of published schemas, options, and what is said about mistakes."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
import yaml
from jsonschema import Draft202012Validator
from nemorl.config import load_config
from nemorl.errors import ConfigError, DataError, UsageError
from nemorl.plugins import registry
from nemorl_rl.data.rows import rows_of
from nemorl_tasks.datasets.names import find_dataset
from nemorl_tasks.datasets.preset import PresetConfig
from nemorl_tasks.datasets.preset_file import find_preset, folded, known_names, presets
from published import EVALUATION, TRAINING
from pyarrow import parquet
from pydantic import ValidationError
from recorded_messages import Raises

ROOT = Path(__file__).parents[3]
PUBLISHED = EVALUATION | TRAINING


def config(data, **more):
    return load_config({"algorithm": "grpo", "model": "org/model", "environment": "math", "data": data, **more})


def first(name, folder, **options):
    published = PUBLISHED[name]
    folder = folder / (find_preset(name).subset if isinstance(find_preset(name).subset, str) else "")
    published.write(folder)
    chosen = {**published.options, **options, "split": published.split}
    return PresetConfig(preset=name, path=str(folder / f"{published.split}.jsonl"), **chosen).build("train")[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_row_of_the_published_schema_becomes_one_of_nemorl(tmp_path, name):
    row, expected = first(name, tmp_path), PUBLISHED[name].expected
    assert {key: row[key] for key in expected} == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_missing_column_is_named_with_those_there_are(tmp_path, name, raises: Raises):
    published = PUBLISHED[name]
    path = published.write(tmp_path, without=published.needs)
    with raises(ValueError, published.needs.split(".")[0]):
        PresetConfig(preset=name, path=str(path), split=published.split, **published.options).build("train")


@pytest.mark.parametrize(
    "name",
    ["GSM8K", "gsm8k", "GSM-8K", "gsm_8k", "aime24", "AIME2024", "math500", "mmlu_pro", "mmlu_DE-DE", "gpqa_diamond"],
)
def test_case_dashes_and_underscores_do_not_matter(name):
    assert config(name).data.spec.hub


def test_a_variant_has_fields_of_its_own():
    assert find_preset("gpqa").subset == "gpqa_main"
    assert find_preset("gpqa-diamond").subset == "gpqa_diamond"
    assert find_preset("mmlu_zh_cn").subset == "ZH_CN"


def test_no_two_presets_share_a_name():
    names = [folded(name) for name in known_names()]
    assert sorted(names) == sorted(set(names))


def test_every_preset_says_where_it_is_from_and_under_which_terms():
    for preset in presets().values():
        assert preset.licence, preset.name
        assert preset.homepage.startswith("https://"), preset.name


def test_a_preset_is_a_dataset_of_a_config_and_loads_again_as_it_was_written():
    loaded = config({"name": "gsm8k", "max_rows": 3}, validation={"data": "aime24"})
    assert (loaded.data.spec.name, loaded.data.max_rows) == ("GSM8K", 3)
    assert loaded.validation.data.spec.name == "AIME2024"
    again = load_config(loaded.model_dump(mode="json"))
    assert again.data == loaded.data
    assert registry().name_of("datasets", type(again.data)) == "preset"


def test_rows_are_found_by_name_with_and_without_options(tmp_path):
    path = str(EVALUATION["GSM8K"].write(tmp_path))
    assert rows_of({"name": "gsm8k", "path": path}, "train")[0]["answer"] == "12"
    assert rows_of({"name": "GSM8K", "path": path, "repeat": 3}, "train")[2]["answer"] == "12"


def test_a_path_object_is_a_path_and_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        (tmp_path / "gsm8k").mkdir(exist_ok=True)
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(json.dumps({"prompt": split, "answer": "1"}))
    assert rows_of(Path("gsm8k"), "train")[0]["prompt"] == "train"
    assert find_dataset("gsm8k").spec.hub == "openai/gsm8k"


def test_a_mistyped_name_suggests_the_right_one(raises: Raises):
    with raises(ConfigError, "GSM8K", path="data"):
        config("gsmk8")
    with raises(UsageError, "GSM8K"):
        rows_of("gsmk8", "train")


def test_a_file_that_is_not_there_is_said_to_be_a_file(tmp_path, raises: Raises):
    EVALUATION["GSM8K"].write(tmp_path)
    with raises(ConfigError, "trian.jsonl", "train.jsonl", path="data.path"):
        config(str(tmp_path / "trian.jsonl"))
    with raises(ConfigError, path="data.preset"):
        config(str(tmp_path / "mine.yaml"))


def test_files_and_names_of_the_hub_are_datasets_of_a_config(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1?", "answer": "2"}))
    assert config({"name": str(path), "chat": True}).data.build("train")[0]["answer"] == "2"
    assert config({"name": "openai/gsm8k", "config_name": "main"}).data.path == "openai/gsm8k"


def test_a_mistyped_option_suggests_the_right_one(raises: Raises):
    with raises(ConfigError, "max_rows", path="data.max_row"):
        config({"name": "gsm8k", "max_row": 3})


def test_a_folder_stands_in_for_the_hub_with_its_splits_and_subsets(tmp_path):
    rows = EVALUATION["GSM8K"].rows
    for split, count in (("train", 3), ("test", 2)):
        (tmp_path / "main").mkdir(exist_ok=True)
        (tmp_path / "main" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows * count)))
    data = PresetConfig(preset="gsm8k", path=str(tmp_path))
    assert [len(data.build(split)) for split in ("train", "validation")] == [3, 2]


def test_several_subsets_are_joined(tmp_path):
    for number, subset in enumerate(("AIME2025-I", "AIME2025-II")):
        (tmp_path / subset).mkdir()
        row = {"question": f"Part {number}?", "answer": str(number)}
        (tmp_path / subset / "test.jsonl").write_text(json.dumps(row))
    rows = PresetConfig(preset="aime25", path=str(tmp_path)).build("validation")
    assert [row["answer"] for row in rows] == ["0", "1"]


def test_a_split_that_is_not_there_is_an_error_that_lists_the_files(tmp_path, raises: Raises):
    EVALUATION["GSM8K"].write(tmp_path / "main")
    with raises(DataError, "test", "train.jsonl"):
        PresetConfig(preset="gsm8k", path=str(tmp_path)).build("validation")


def test_an_evaluation_set_has_rows_to_validate_on_alone(tmp_path):
    path = str(EVALUATION["AIME2024"].write(tmp_path))
    data = PresetConfig(preset="aime24", path=path)
    assert data.build("train") is None
    assert len(data.build("validation")) == 1


def test_one_split_alone_leaves_the_others_out(tmp_path):
    EVALUATION["GSM8K"].write(tmp_path / "main")
    data = PresetConfig(preset="gsm8k", path=str(tmp_path), split="train")
    assert len(data.build("train")) == 1
    assert data.build("validation") is None


def test_repeated_rows_are_asked_in_rounds(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) for i in range(3)))
    rows = PresetConfig(preset="gsm8k", path=str(path), repeat=2, max_rows=2).build("train")
    assert [row["answer"] for row in rows] == ["0", "1", "0", "1"]


def test_a_template_has_the_prompt_in_braces(tmp_path):
    row = first(
        "GSM8K", tmp_path, prompt_template=r"Put the number into \boxed{{}}: {prompt}", system_prompt="Be brief."
    )
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": r"Put the number into \boxed{}: Tom has 3 bags of 4 pens. How many pens?"},
    ]


def test_without_chat_a_prompt_is_text(tmp_path):
    assert first("GSM8K", tmp_path, chat=False)["prompt"] == "Tom has 3 bags of 4 pens. How many pens?"


def test_the_options_of_a_question_are_shown_with_its_letters(tmp_path):
    template = "{question} ({letters})\n{options}"
    row = first("MMLU", tmp_path, prompt_template=template, chat=False)
    assert row["prompt"] == "2+2? (ABCD)\nA) 1\nB) 2\nC) 3\nD) 4"


def test_shuffled_options_follow_the_seed_and_the_letter_follows_the_option(tmp_path):
    orders = set()
    for seed in range(8):
        row = first("GPQA", tmp_path, seed=seed)
        assert row["options"].splitlines()["ABCD".index(row["answer"])] == f"{row['answer']}) thymine"
        assert row["options"] == first("GPQA", tmp_path, seed=seed)["options"]
        orders.add(row["options"])
    assert len(orders) > 1


OWN = "summary: ours\nlicence: ours\nhomepage: https://example.org\ntrain: train\nchat: false\n"


def rows_of_ones_own(folder, fields, *table, **options):
    """Rows of a preset of one's own with these fields, over a CSV file of these lines."""
    (folder / "own.yaml").write_text(f"name: own\n{OWN}{fields}")
    (folder / "rows.csv").write_text("\n".join(table) + "\n")
    return PresetConfig(preset=str(folder / "own.yaml"), path=str(folder / "rows.csv"), **options)


def test_an_option_that_is_left_out_does_not_move_the_right_one(tmp_path):
    fields = (
        "task: multiple choice\ncolumns: {prompt: q}\nchoices: {options: [a, b, c, d], correct: right}\n"
        "prompt_template: '{options}'\n"
    )
    # Of red, nothing, green and blue the third is right, by its number or its letter: the second of those shown.
    rows = rows_of_ones_own(tmp_path, fields, "q,a,b,c,d,right", "Which?,red,,green,blue,2", "Which?,red,,green,blue,C")
    for row in rows.build("train"):
        assert (row["prompt"], row["answer"]) == ("A) red\nB) green\nC) blue", "B")


@pytest.mark.parametrize(("right", "options"), [("1", "a: b"), ("4", "[a, b, c, d]"), ("1", "q")])
def test_options_that_are_no_list_and_a_right_one_that_is_none_are_refused(tmp_path, right, options, raises: Raises):
    fields = f"task: multiple choice\ncolumns: {{prompt: q}}\nchoices: {{options: {options}, correct: right}}\n"
    with raises((DataError, ValidationError, ConfigError)):
        rows_of_ones_own(tmp_path, fields, "q,a,b,c,d,right", f"Which?,red,,green,blue,{right}").build("train")


def test_the_first_row_is_the_first_that_is_kept_of_those_that_one_row_makes(tmp_path):
    fields = "task: preference\ncolumns: {prompt: q}\nranked: {completions: said}\ndrop: {chosen: [a]}\n"
    (tmp_path / "own.yaml").write_text(f"name: own\n{OWN}{fields}")
    said = [{"rank": rank, "completion": text} for rank, text in enumerate("abc")]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "1?", "said": said}))
    config = PresetConfig(preset=str(tmp_path / "own.yaml"), path=str(tmp_path / "rows.jsonl"), pairs="all")
    assert config.first_row() == config.build("train")[0]
    assert config.first_row()["chosen"] == "b"


def test_holding_out_of_no_rows_is_an_error_that_says_so(tmp_path, raises: Raises):
    fields = "task: text\ncolumns: {prompt: q, response: r}\nkeep: {r: ['yes']}\nvalidation_fraction: 0.5\n"
    config = rows_of_ones_own(tmp_path, fields, "q,r", "1?,no", "2?,no")
    with raises(DataError, "own"):
        config.build("train")


def test_characters_per_row_of_rows_without_a_text_is_a_problem_of_the_config(raises: Raises):
    with raises(ValidationError, path="characters_per_row"):
        PresetConfig(preset="AIME2024", characters_per_row=100)


@pytest.mark.parametrize("preference", ["-2", "2.0"])
def test_a_preference_may_be_text(tmp_path, preference):
    fields = "task: preference\ncolumns: {prompt: q}\npair: {first: a, second: b, preference: p}\n"
    (row,) = rows_of_ones_own(tmp_path, fields, "q,a,b,p", f"1?,one,two,{preference}").build("train")
    assert row["chosen"] == ("one" if float(preference) < 0 else "two")


@pytest.mark.parametrize("preference", ["0", "", "nan", "better"])
def test_a_preference_for_neither_is_refused(tmp_path, preference, raises: Raises):
    fields = "task: preference\ncolumns: {prompt: q}\npair: {first: a, second: b, preference: p}\n"
    with raises((DataError, ValidationError)):
        rows_of_ones_own(tmp_path, fields, "q,a,b,p", f"1?,one,two,{preference}").build("train")


def test_an_answer_without_its_mark_is_an_error_that_names_the_row(tmp_path, raises: Raises):
    path = tmp_path / "train.jsonl"
    path.write_text(
        json.dumps({"question": "1?", "answer": "#### 1"}) + "\n" + json.dumps({"question": "2?", "answer": "2"})
    )
    with raises(DataError, 1, "####"):
        PresetConfig(preset="gsm8k", path=str(path)).build("train")[1]


def test_a_preset_of_ones_own_is_a_file_of_ten_lines(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "1+1?", "meta": {"gold": [2]}}))
    file = tmp_path / "sums.yaml"
    file.write_text(
        "name: sums\ntask: math\nsummary: sums of ours\nlicence: ours\nhomepage: https://example.org\n"
        "train: train\ncolumns: {prompt: 'What is {q}', answer: meta.gold.0}\nchat: false\n"
    )
    data = config({"name": str(file), "path": str(tmp_path / "rows.jsonl")}).data
    assert data.build("train")[0] == {"q": "1+1?", "meta": {"gold": [2]}, "prompt": "What is 1+1?", "answer": "2"}


def test_a_wrong_preset_file_is_explained(tmp_path, raises: Raises):
    file = tmp_path / "sums.yaml"
    file.write_text("name: sums\ntask: maths\nsumary: x\nlicence: ours\nhomepage: https://example.org\n")
    with raises(ConfigError, "math", "summary", path="data.preset"):
        config(str(file))


@pytest.mark.slow
def test_a_config_with_a_preset_is_checked_without_the_library_that_reads_it():
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "from nemorl.config import load_config\n"
        "load_config({'algorithm': 'grpo', 'model': 'm/m', 'data': 'gsm8k', 'environment': 'math'}, for_launch=True)\n"
        "from nemorl_tasks.datasets.preset import PresetConfig\n"
        "try: PresetConfig(preset='gsm8k').build('train')\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install nemorl-tasks" in done.stdout


def trees(folder):
    """Two trees as OASST publishes them: one with two ways through it, one without a reply."""
    replies = [
        {"text": "Hello!", "role": "assistant", "replies": [{"text": "Bye", "role": "prompter", "replies": []}]},
        {"text": "What?", "role": "assistant", "replies": []},
    ]
    rows = [
        {"message_tree_id": "1", "prompt": {"text": "Hi", "role": "prompter", "replies": replies}},
        {"message_tree_id": "2", "prompt": {"text": "Anyone?", "role": "prompter", "replies": []}},
    ]
    path = folder / "2023-04-12_oasst_all.trees.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


def test_every_way_through_a_tree_of_replies_is_a_conversation(tmp_path):
    trees(tmp_path)
    rows = PresetConfig(preset="OASST", path=str(tmp_path), validation_fraction=0).build("train")
    spoken = [[f"{message['role']}: {message['content']}" for message in row["messages"]] for row in rows]
    assert spoken == [["user: Hi", "assistant: Hello!", "user: Bye"], ["user: Hi", "assistant: What?"]]


def test_rows_of_a_tree_without_its_root_are_refused(tmp_path, raises: Raises):
    path = tmp_path / "trees.jsonl"
    path.write_text(json.dumps({"message_tree_id": "1"}))
    with raises(ValueError, "prompt"):
        PresetConfig(preset="oasst", path=str(path))


def test_only_problems_with_an_answer_to_compare_with_are_kept(tmp_path):
    path = TRAINING["NuminaMath-1.5"].write(tmp_path)
    rows = PresetConfig(preset="NuminaMath-1.5", path=str(path)).build("train")
    assert [row["answer"] for row in rows] == ["3"]


def test_rows_of_a_table_of_the_library_are_chosen_by_the_columns_that_decide(tmp_path, monkeypatch, raises: Raises):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "train.parquet"
    rows = TRAINING["NuminaMath-1.5"].rows
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [row["answer"] for row in PresetConfig(preset="numinamath-1.5", path=str(path)).build("train")] == ["3"]
    short = [{key: value for key, value in row.items() if key != "solution_is_valid"} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(short), path)
    with raises(ValidationError, "solution_is_valid", path="path"):
        PresetConfig(preset="numinamath-1.5", path=str(path)).build("train")


def test_ties_are_left_out_and_the_sign_says_who_is_better(tmp_path):
    path = TRAINING["HelpSteer3"].write(tmp_path)
    rows = PresetConfig(preset="HelpSteer3", path=str(path)).build("train")
    assert [(row["chosen"], row["rejected"]) for row in rows] == [("A", "B"), ("B", "A")]


def test_deepscaler_is_validated_on_aime_2024():
    assert PresetConfig(preset="DeepScaler").spec.validation_preset == "AIME2024"


def test_a_preset_validated_on_another_hands_its_prompt_on(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(PresetConfig, "_rows", lambda self, spec, name, part: asked.append((self, spec.name, name)))
    PresetConfig(preset="DeepScaler", prompt_template="Solve {prompt}").build("validation")
    ((data, name, split),) = asked
    assert (name, split, data.prompt_template) == ("AIME2024", "train", "Solve {prompt}")


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("best_worst", [("a", "d")]),
        ("neighbours", [("a", "b"), ("c", "d")]),
        ("all", [("a", "b"), ("a", "c"), ("a", "d"), ("b", "d"), ("c", "d")]),
    ],
)
def test_ranked_responses_make_pairs_and_equal_ranks_make_none(tmp_path, which, expected):
    # ranks a 0, b 1, c 1, d 2: neighbours in the order a b c d are (a, b), (b, c) without a winner, (c, d)
    ranked = [{"rank": rank, "completion": text} for text, rank in (("d", 2), ("a", 0), ("b", 1), ("c", 1))]
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"context": "Hi", "completions": ranked}))
    rows = PresetConfig(preset="PreferenceDataset", path=str(path), pairs=which).build("train")
    assert [(row["chosen"], row["rejected"]) for row in rows] == expected


def test_texts_are_joined_until_they_are_long_enough(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("abc", "", "de", "fghij", "k")))
    # 3 + 2 characters reach 5, and so do the next 5; the last row is what remains.
    rows = PresetConfig(preset="arrow_text", path=str(path), characters_per_row=5).build("train")
    assert [row["response"] for row in rows] == ["abc\nde", "fghij", "k"]


def test_a_picture_in_a_conversation_is_refused(tmp_path, raises: Raises):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"conversations": [{"from": "human", "value": "<image> What is this?"}]}))
    with raises(ValueError, "<image>"):
        PresetConfig(preset="ShareGPT", path=str(path))


def test_a_conversation_keeps_its_calls_and_text_in_parts(tmp_path, raises: Raises):
    path = tmp_path / "train.jsonl"
    parts = [{"type": "text", "text": "1 + 2?"}]
    said = [{"from": "human", "value": parts}, {"from": "gpt", "value": None, "tool_calls": [{"name": "add"}]}]
    path.write_text(json.dumps({"conversations": said}))
    row = PresetConfig(preset="ShareGPT", path=str(path)).build("train")[0]
    called = {"tool_calls": [{"name": "add"}], "role": "assistant", "content": ""}
    assert row["messages"] == [{"role": "user", "content": "1 + 2?"}, called]
    path.write_text(json.dumps({"conversations": [{"from": "human", "value": [{"type": "image"}]}]}))
    with raises(ValueError):
        PresetConfig(preset="ShareGPT", path=str(path))


def test_a_preset_of_files_of_ones_own_asks_for_their_path(raises: Raises):
    with raises(ConfigError, "openai_format", path="data.path"):
        config("openai_format")


def test_every_preset_has_rows_in_these_tests():
    tested = {*PUBLISHED, "AIME2025", "open_assistant", "MATH", "MMMLU"}
    tested |= {preset.name for preset in presets().values() if preset.media}  # in test_media_presets
    assert set(presets()) == tested


def test_the_last_box_of_a_solution_is_its_answer(tmp_path):
    path = tmp_path / "train.jsonl"
    solutions = [r"First \boxed{1}, so \boxed{\frac{2}{3}}.", r"It is \boxed 7."]
    path.write_text("\n".join(json.dumps({"problem": "x?", "solution": text, "type": "Algebra"}) for text in solutions))
    rows = PresetConfig(preset="MATH", path=str(path), split="train").build("train")
    assert [row["answer"] for row in rows] == [r"\frac{2}{3}", "7"]
    assert rows[0]["response"] == solutions[0]


def test_questions_in_another_language_have_a_name_each(tmp_path):
    (tmp_path / "DE_DE").mkdir()
    row = {"Question": "2+2?", "A": "1", "B": "4", "C": "3", "D": "2", "Answer": "B", "Subject": "arithmetic"}
    (tmp_path / "DE_DE" / "test.jsonl").write_text(json.dumps(row))
    rows = PresetConfig(preset="mmlu_DE-DE", path=str(tmp_path)).build("validation")
    assert (rows[0]["answer"], rows[0]["options"]) == ("B", "A) 1\nB) 4\nC) 3\nD) 2")


def test_the_examples_of_the_page_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "datasets.md").read_text(), re.DOTALL)
    parts = [yaml.safe_load(block) for block in blocks]
    (sums,) = [part for part in parts if "homepage" in part]
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(sums))
    parts[parts.index(sums)] = {"data": {"name": "./sums.yaml", "max_rows": 100}}
    assert len(parts) == 6
    schema = Draft202012Validator(type(config("gsm8k")).model_json_schema())
    for part in parts:
        written = {"algorithm": "grpo", "model": "org/model", "environment": "math", "data": "gsm8k", **part}
        if "temperature" in written.get("validation", {}):
            assert load_config(written).validation.data.sets["aime24"].repeat == 16
        load_config(written, for_launch=True)
        schema.validate(written)
