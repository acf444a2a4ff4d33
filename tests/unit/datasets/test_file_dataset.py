import csv
import gzip
import json
import pickle
import subprocess
import sys

import pytest
from nemorl.errors import ConfigError, DataError
from nemorl_tasks.datasets import FileConfig
from nemorl_tasks.datasets.names import find_dataset
from pydantic import ValidationError
from recorded_messages import Raises

ROWS = [{"question": f"{i}+{i}?", "answer": 2 * i, "level": "easy"} for i in range(20)]


def write(path, rows=ROWS):
    """The rows in the format of the path's extension."""
    if path.name.lower().endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode() + b"\n\n"))
    elif path.suffix in {".jsonl", ".ndjson"}:
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def only_problem(**options):
    """(field, what is wrong, how to fix it) of a config with one mistake."""
    with pytest.raises(ValidationError) as caught:
        FileConfig(**options)
    (error,) = caught.value.errors()
    return error["loc"][0], error["ctx"]["message"], error["ctx"]["fix"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.json", "a.parquet", "a.csv", "a.tsv", "a.jsonl.gz", "a.JSONL.gz"]
)
def test_every_format_gives_the_same_canonical_rows(tmp_path, name):
    rows = FileConfig(path=write(tmp_path / name)).build("train")
    assert len(rows) == 20
    assert rows[3] == {"question": "3+3?", "level": "easy", "prompt": "3+3?", "answer": "6"}
    assert [row["answer"] for row in rows[18:]] == ["36", "38"]


def test_a_packed_file_that_is_cut_or_damaged_is_an_error_of_the_data(tmp_path, raises: Raises):
    whole = write(tmp_path / "a.jsonl.gz").read_bytes()
    for broken in (whole[:-20], whole[:20] + bytes(20) + whole[40:], b"no gzip", gzip.compress(b"\xff\n")):
        (tmp_path / "b.jsonl.gz").write_bytes(broken)
        with raises((DataError, ValidationError), "b.jsonl.gz"):
            FileConfig(path=tmp_path / "b.jsonl.gz").build("train")


def test_a_folder_of_packed_files_is_found_by_their_names(tmp_path):
    write(tmp_path / "train.jsonl.gz")
    write(tmp_path / "test.jsonl.gz", ROWS[:2])
    found = find_dataset(tmp_path)
    assert [len(found.build(split)) for split in ("train", "validation")] == [20, 2]


def test_there_is_no_validation_split_unless_asked_for(tmp_path):
    assert FileConfig(path=write(tmp_path / "a.jsonl")).build("validation") is None
    assert FileConfig(path=tmp_path / "a.jsonl").build("test") is None


def test_a_validation_file_is_a_split_of_its_own(tmp_path):
    config = FileConfig(path=write(tmp_path / "a.jsonl"), validation_path=write(tmp_path / "b.csv", ROWS[:2]))
    assert [len(config.build(split)) for split in ("train", "validation")] == [20, 2]


def test_held_out_rows_are_disjoint_complete_and_seeded(tmp_path):
    path = write(tmp_path / "a.jsonl")

    def prompts(split, seed):
        return [row["prompt"] for row in FileConfig(path=path, validation_fraction=0.25, seed=seed).build(split)]

    train, validation = prompts("train", 0), prompts("validation", 0)
    assert (len(train), len(validation)) == (15, 5)
    assert set(train) | set(validation) == {row["question"] for row in ROWS}
    assert validation == prompts("validation", 0)
    assert validation != prompts("validation", 1)


def test_max_rows_keeps_the_first_rows_of_each_split(tmp_path):
    config = FileConfig(path=write(tmp_path / "a.jsonl"), max_rows=3)
    assert [row["answer"] for row in config.build("train")] == ["0", "2", "4"]


def test_a_template_fills_columns_and_leaves_latex_alone(tmp_path):
    template = r"{level}: {question} Put it in \boxed{}. {{level}}"
    rows = FileConfig(path=write(tmp_path / "a.jsonl"), prompt_template=template).build("train")
    assert rows[1]["prompt"] == r"easy: 1+1? Put it in \boxed{}. {level}"


def test_a_system_prompt_makes_a_conversation(tmp_path):
    rows = FileConfig(path=write(tmp_path / "a.jsonl"), system_prompt="Be brief.").build("train")
    assert rows[1]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def test_chat_without_a_system_prompt_is_one_user_message(tmp_path):
    rows = FileConfig(path=write(tmp_path / "a.jsonl"), chat=True).build("train")
    assert rows[1]["prompt"] == [{"role": "user", "content": "1+1?"}]


def test_conversations_are_kept_and_lose_empty_fields(tmp_path):
    talk = [{"role": "user", "content": "hi", "tool_calls": None}, {"role": "assistant", "content": "hello"}]
    path = write(tmp_path / "a.jsonl", [{"talk": talk}])
    row = FileConfig(path=path, messages_column="talk", system_prompt="S").build("train")[0]
    assert row["messages"] == [
        {"role": "system", "content": "S"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    ]  # fmt: skip


def test_preferences_in_text_and_in_messages_come_out_the_same(tmp_path):
    ask = {"role": "user", "content": "2+2?"}
    texts = write(tmp_path / "a.jsonl", [{"prompt": "2+2?", "good": "4", "bad": "5"}])
    row = FileConfig(path=texts, chosen_column="good", rejected_column="bad", chat=True).build("train")[0]
    pair = {key: [ask, {"role": "assistant", "content": text}] for key, text in (("chosen", "4"), ("rejected", "5"))}
    talk = FileConfig(path=write(tmp_path / "b.jsonl", [pair])).build("train")[0]
    for found in (row, talk):
        assert (found["prompt"], found["chosen"], found["rejected"]) == ([ask], "4", "5")


def test_a_column_may_play_two_parts(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "2+2?", "answer": "2+2=4 #### 4"}])
    row = FileConfig(path=path, response_column="answer").build("train")[0]
    assert row["response"] == row["answer"] == "2+2=4 #### 4"


def test_a_missing_file_is_reported_with_its_closest_neighbour(tmp_path):
    write(tmp_path / "train.jsonl")
    field, message, fix = only_problem(path=tmp_path / "trian.jsonl")
    assert (field, fix) == ("path", "did you mean 'train.jsonl' in the same folder?")
    assert message.endswith("does not exist")


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.txt", "x", "no supported format"),
        ("a", "x", "no extension"),
        ("a.jsonl", "", "no rows"),
        ("b.jsonl", "\n\n", "no rows"),
        ("a.json", "[]", "no rows"),
        ("a.csv", "question,answer\n", "no rows"),
        ("c.jsonl", '{"prompt": "a"', "line 1: not valid JSON"),
        ("d.jsonl", "[1]", "line 1: a list where a row"),
        ("b.json", '[{"a": 1},\n oops]', "not valid JSON: line 2"),
        ("c.json", "[1, 2]", "does not hold a list of rows"),
        ("b.csv", "prompt,answer\na,b,c\n", "line 2: 3 values for 2 columns"),
        ("a.parquet", "not parquet", "not a readable Parquet file"),
        ("e.jsonl", '{"prompt": 5}', "column 'prompt' should hold text or chat messages, but holds int 5"),
        ("f.jsonl", '{"messages": "hi"}', "should hold a list of chat messages"),
        ("g.jsonl", '{"prompt": "a", "chosen": "b"}', "but no rejected ones"),
        ("h.jsonl", '{"chosen": "a", "rejected": "b"}', "preference without a prompt"),
    ],
)
def test_an_unusable_file_is_reported_when_the_config_loads(tmp_path, name, content, what):
    (tmp_path / name).write_text(content)
    field, message, fix = only_problem(path=tmp_path / name)
    assert field == "path"
    assert what in message
    assert fix


def test_a_mistyped_column_is_reported_with_the_closest_and_all_there_are(tmp_path):
    path = write(tmp_path / "a.jsonl")
    field, message, fix = only_problem(path=path, answer_column="anwser")
    assert (field, fix) == ("answer_column", "Did you mean 'answer'?")
    assert "question, answer, level" in message
    assert only_problem(path=path, prompt_template="{qestion}")[::2] == ("prompt_template", "Did you mean 'question'?")


def test_a_table_without_a_prompt_says_which_column_could_be_it(tmp_path):
    field, message, fix = only_problem(path=write(tmp_path / "a.jsonl", [{"quesion": "1+1?", "x": 1}]))
    assert field == "path"
    assert "quesion, x" in message
    assert "prompt_column" in fix


def test_options_that_exclude_each_other_are_reported(tmp_path):
    path = write(tmp_path / "a.jsonl")
    both = only_problem(path=path, prompt_column="question", prompt_template="{question}")
    assert both[:2] == ("prompt_template", "prompt_column is set as well")
    assert only_problem(path=path, validation_path=path, validation_fraction=0.1)[0] == "validation_fraction"


def test_all_mistakes_are_reported_at_once(tmp_path):
    with pytest.raises(ValidationError) as caught:
        FileConfig(path=write(tmp_path / "a.jsonl"), answer_column="x", response_column="y", validation_path="no.csv")
    assert {error["loc"][0] for error in caught.value.errors()} == {
        "answer_column",
        "response_column",
        "validation_path",
    }


def test_a_malformed_line_far_down_fails_the_build_and_names_the_line(tmp_path, raises: Raises):
    path = write(tmp_path / "a.jsonl")
    path.write_text(path.read_text() + '{"question": "1')
    config = FileConfig(path=path)
    with raises(DataError, 21):
        config.build("train")


def test_a_row_of_another_shape_names_its_number(tmp_path, raises: Raises):
    rows = FileConfig(path=write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": None}])).build("train")
    with raises(DataError, 1, "prompt"):
        rows[1]


def test_holding_out_everything_is_an_error(tmp_path, raises: Raises):
    config = FileConfig(path=write(tmp_path / "a.jsonl", ROWS[:1]), validation_fraction=0.5)
    with raises(DataError):
        config.build("train")


def test_columns_are_checked_again_when_rows_are_built(tmp_path, raises: Raises):
    path = write(tmp_path / "a.jsonl")
    config = FileConfig(path=path, answer_column="answer")
    write(path, [{"question": "1+1?"}])
    with raises(ConfigError, "answer", path="answer_column"):
        config.build("train")


def test_json_lines_may_be_named_json_and_may_carry_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    for name in ("a.json", "b.jsonl"):
        assert [row["prompt"] for row in FileConfig(path=tmp_path / name).build("train")] == ["a", "b"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_rows_survive_pickling(tmp_path, name):
    rows = FileConfig(path=write(tmp_path / name), validation_fraction=0.2).build("train")
    assert list(pickle.loads(pickle.dumps(rows))) == list(rows)


def test_csv_values_stay_as_written(tmp_path):
    path = write(tmp_path / "a.csv", [{"prompt": "a, b\nc", "answer": "007"}])
    assert FileConfig(path=path).build("train")[0] == {"prompt": "a, b\nc", "answer": "007"}


def test_loading_a_config_imports_no_torch_and_prints_nothing(tmp_path):
    path = write(tmp_path / "a.jsonl")
    code = (
        f"import sys; from nemorl_tasks.datasets import FileConfig; c = FileConfig(path={str(path)!r}); "
        "assert not {'torch', 'datasets', 'pandas', 'pyarrow'} & set(sys.modules); c.build('train')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ASK = {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]}


def test_calls_parts_and_tools_of_conversations_are_kept(tmp_path):
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    rows = [
        {"messages": [ASK, called, {"role": "tool", "tool_call_id": "c1", "content": "3"}], "tools": [{"name": "add"}]}
    ]
    row = FileConfig(path=write(tmp_path / "a.jsonl", rows)).build("train")[0]
    assert row["messages"] == [ASK, {"role": "assistant", "tool_calls": [CALL]}, rows[0]["messages"][2]]
    assert row["tools"] == [{"name": "add"}]


def test_a_pair_keeps_the_calls_and_the_reasoning_of_its_messages(tmp_path):
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    rows = [{"chosen": [ASK, called], "rejected": [ASK, {"role": "assistant", "content": "4"}], "tools": []}]
    row = FileConfig(path=write(tmp_path / "a.jsonl", rows)).build("train")[0]
    assert (row["prompt"], row["chosen"], row["rejected"]) == ([ASK], [called], "4")
