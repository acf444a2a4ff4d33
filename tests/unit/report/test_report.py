"""The report: complete from a whole run, sane from a broken one, and deaf to what model output tries."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from nemorl.plugins import Registry, registry
from nemorl.plugins.kinds import ReportSectionConfig
from nemorl_cli.report import charts, parts, run_data
from nemorl_cli.report.declared import Declarations, admitted
from nemorl_cli.report.report import write_combined_report, write_report
from nemorl_cli.report.run_data import RunData
from nemorl_cli.report.sections import Curves, Section, Table, Text, TranscriptSection
from nemorl_cli.report.viewing.overview import blocks_of, spread
from nemorl_ppo import PPOConfig
from nemorl_rl.config import RolloutRunConfig
from nemorl_tasks.environments.config import SlidingPuzzleConfig
from record_files import write_records

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def write_lines(path: Path, records: list[Mapping[str, Any]], tail: str = "") -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


def sample(step: int, prompt: str, response: str, reward: float, split: str = "validation") -> dict[str, Any]:
    return {"step": step, "split": split, "prompt": prompt, "response": response, "answer": "4", "reward": reward,
            "finish_reason": "stop", "tokens": 3}  # fmt: skip


def make_run(folder: Path, steps: int = 3) -> Path:
    """Reward 0.1 per step, accuracy 0.25 -> 0.75, 4 s per step of which 3 s have a name."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"algorithm: grpo\nmodel: tiny\nmax_steps: {steps}\nseed: 1\n")
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.9", "libraries": {"torch": "2.13.0"}}))
    metrics: list[Mapping[str, Any]] = [{"step": 0, "time": 1000.0, "validation/accuracy": 0.25}]
    for step in range(1, steps + 1):
        metrics.append(
            {"step": step, "time": 1000.0 + 4 * step, "train/reward": 0.1 * step, "train/loss": None,
             "timing/train/total_step_time": 4.0, "timing/train/generation": 2.0,
             "timing/train/prepare_for_generation/total": 1.0,
             "timing/train/prepare_for_generation/transfer_and_update_weights": 0.5}
        )  # fmt: skip
    metrics.append({"step": steps, "time": 1000.0 + 4 * steps, "validation/accuracy": 0.75})
    write_lines(folder / "metrics.jsonl", metrics, tail='{"step": 99, "tra')
    write_records(folder, [sample(0, "2+2?", "5", 0.0), sample(steps, "2+2?", "4 exactly", 1.0)])
    write_lines(folder / "events.jsonl", [{"time": 1000.0, "event": "started"}, {"time": 1012.0, "event": "finished"}])
    return folder


def embedded_data(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    loaded: dict[str, Any] = json.loads(match[1])
    return loaded


def chart_cards(run: Path, algorithm: str = "") -> charts.Cards:
    if algorithm:
        (run / "config.yaml").write_text(f"algorithm: {algorithm}\n")
    data = RunData.load(run)
    return charts.cards(data, Declarations.of(data, admitted(data)))


def test_a_report_holds_the_headline_the_curves_and_the_samples(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "my-run"))
    page = path.read_text()
    assert path == tmp_path / "my-run" / "report.html"
    for expected in (
        "my-run",
        "grpo",
        "tiny",
        "75.0%",
        "finished",
        '["torch","2.13.0"]',
        "4 exactly",
        "25.0% at step 0",
    ):
        assert expected in page
    (run,) = embedded_data(page)["runs"]
    charts = {chart["title"]: chart for chart in run["overview"]["curves"]["moving"]}
    assert charts["Reward"]["steps"] == [1, 2, 3]
    assert charts["Reward"]["series"][0]["values"] == [0.1, 0.2, 0.3]
    assert charts["Validation accuracy"]["series"][0]["values"] == [0.25, 0.75]
    assert "Loss" not in charts  # only null was recorded


def test_charts_are_what_the_parts_of_a_run_declare(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    names = ("train/critic/values_max", "train/critic/returns_max", "train/environment/moves", "mine/x", "train/lr")
    write_lines(run / "metrics.jsonl", [{"step": step, **dict.fromkeys(names, 0.5 * step)} for step in (1, 2)])
    (run / "config.yaml").write_text("algorithm: ppo\nmodel: tiny\nenvironment: sliding_puzzle\n")
    cards = {card["title"]: card for card in chart_cards(run).moving}
    assert list(cards) == ["Learning rate", "Values and returns", "Moves", "mine/x"]
    values, moves, mine = cards["Values and returns"], cards["Moves"], cards["mine/x"]
    assert (values["unit"], values["watch_for"]) == ("reward", PPOConfig.metrics[names[0]].watch_for)
    assert [line["label"] for line in values["series"]] == ["values max", "returns max"]
    assert values["notes"] == [f"values max: {PPOConfig.metrics[names[0]].meaning}",
                               f"returns max: {PPOConfig.metrics[names[1]].meaning}"]  # fmt: skip
    assert moves["meaning"] == SlidingPuzzleConfig.metrics["train/environment/moves"].meaning
    assert (mine["unit"], mine["meaning"], mine["watch_for"], mine["series"][0]["values"]) == ("", "", "", [0.5, 1.0])


@pytest.mark.parametrize(
    ("config", "title"),
    [
        ("algorithm: ppo\nmodel: tiny\nnum_minibatches: none\n", "Critic"),  # it no longer loads: the algorithm's own
        ("algorithm: ppo\nplugins: {allow: [nobody]}\n", "train/critic/explained_var"),
        ("algorithm: gone\nmodel: tiny\n", "train/critic/explained_var"),
        ("algorithm: [1]\n", "train/critic/explained_var"),
        ("", "train/critic/explained_var"),
    ],
)
def test_without_its_plugins_a_chart_is_called_as_its_metric(tmp_path: Path, config: str, title: str) -> None:
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text(config)
    name = "train/critic/explained_var"
    write_lines(run / "metrics.jsonl", [{"step": step, name: 0.1 * step} for step in (1, 2)])
    assert [card["title"] for card in chart_cards(run).moving] == [title]
    assert name in write_report(run).read_text()


def test_curves_that_never_move_and_more_than_can_be_read_are_kept_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    many = {f"mine/{index}": 1.0 for index in range(charts.MAX_CHARTS + 5)}
    pass_at = {f"validation/pass@{k}": float(k) for k in range(1, 33)}
    write_lines(run / "metrics.jsonl", [{"step": step, "train/lr": 1e-5, **many, **pass_at} for step in (1, 2)])
    cards = chart_cards(run, "grpo")
    assert cards.left_out == 7  # learning rate, pass@k and 65 of ours: 67 charts
    assert "Learning rate 1e-05" in cards.constants
    shown = next(card for card in cards.still if card["title"] == "pass@k")
    # 32 curves, every fourth, the last among them
    assert [line["label"] for line in shown["series"]] == [f"pass@{k}" for k in range(4, 33, 4)]
    assert shown["notes"] == ["8 of 32 curves are drawn"]


def test_the_report_names_no_metric_of_a_plugin() -> None:
    sources = "".join(path.read_text() for path in Path(charts.__file__).parent.glob("*.py"))
    algorithms = [registry().load("algorithms", entry.id) for entry in registry().index.of_kind("algorithms")]
    own = {name for algorithm in algorithms for name in algorithm.metrics} - set(RolloutRunConfig.metrics)
    assert len(own) > 50
    assert not [name for name in own if name in sources]


def test_a_report_needs_no_network(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run")).read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "@import" not in page
    assert "url(" not in page


@pytest.mark.parametrize("field", ["prompt", "response", "answer"])
def test_model_output_cannot_inject_markup(tmp_path: Path, field: str) -> None:
    run = make_run(tmp_path / "run")
    write_records(run, [{**sample(0, "p", "r", 0.0), field: ATTACK}])
    page = write_report(run).read_text()
    assert "<script>alert" not in page
    assert "<img" not in page
    record = embedded_data(page)["runs"][0]["records"][0]
    assert record[field] == ATTACK


def test_names_configs_events_and_the_environment_cannot_inject_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", [{"step": 1, f"train/{ATTACK}": 1.0, f"validation/pass@{ATTACK}": 1.0,
                                         f"timing/train/{ATTACK.replace('/', '')}": 1.0}])  # fmt: skip
    write_lines(run / "events.jsonl", [{"event": ATTACK, "reason": ATTACK, "time": 1.0}])
    (run / "config.yaml").write_text(f"algorithm: '{ATTACK}'\nmodel: '{ATTACK}'\n{ATTACK}: 1\n")
    (run / "environment.json").write_text(json.dumps({"torch": ATTACK, ATTACK: [{"a": ATTACK}]}))
    page = write_combined_report([(ATTACK, run)], tmp_path / "all.html", {ATTACK: ATTACK}).read_text()
    assert "<script>alert" not in page
    assert "<img" not in page


class Skeleton(HTMLParser):
    """The elements of a page with the names of their attributes, and all text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, *(name for name, _ in attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.elements.append((f"/{tag}",))

    def handle_comment(self, data: str) -> None:
        self.elements.append(("comment",))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] not in ("script", "style"):
            self.text += data


def run_that_says(text: str, folder: Path) -> Path:
    """A run directory with ``text`` in every place that a run, its data or its plugins can fill."""
    word = text.replace("/", "|")  # of a directory, or between the slashes of a metric
    run = make_run(folder / word)
    (run / "config.yaml").write_text(
        json.dumps({"algorithm": text, "model": text, text: [text], "plugins": {"report_sections": ["s", "t", text]}})
    )
    versions = {"torch": text, text: [{"a": text}], "plugins": {text: text}, "python": text}
    (run / "environment.json").write_text(json.dumps(versions))
    names = (f"train/{text}", f"validation/pass@{text}", f"timing/train/{word}", text, f"train/reward/{text}")
    write_lines(run / "metrics.jsonl", [{"step": step, **dict.fromkeys(names, 1.0 + step)} for step in (1, 2)])
    said = {"prompt": text, "response": text, "answer": text, "finish_reason": text}
    write_records(run, [{"step": 1, "split": "train", "reward": 0.5, **said}])
    told = {"event": f"error {text}", text: text, "status": text, "level": text}
    write_lines(run / "events.jsonl", [{"time": 1.0, **told}, {"time": text, "event": {f"error {text}": [text]}}])
    return run


def texts_of(data: Any) -> list[str]:
    """All texts of a page's data, keys included."""
    if isinstance(data, dict):
        return [text for key, value in data.items() for text in (key, *texts_of(value))]
    return [text for value in data for text in texts_of(value)] if isinstance(data, list) else [data]


@pytest.mark.parametrize(
    "attack",
    [
        ATTACK,
        """"><img src=x onerror=alert(1)><a href="javascript:alert(2)" """,
        "' onmouseover='alert(1)' style='position:fixed",
        "--><!-- </style></title></textarea></pre><svg onload=alert(1)>",
        "{{ 7 * 191 }}{% for x in range(9) %}<b>{% endfor %}{# ${data} $title",
        "</pre></code></script ><iframe srcdoc='<script>alert(1)</script>'>&lt;b&gt;",
    ],
)
def test_nothing_that_a_run_says_becomes_an_element_or_an_attribute(
    tmp_path: Path, nemorl_registry: Registry, attack: str
) -> None:
    said = ""

    class Hostile(ReportSectionConfig):
        def build(self) -> Callable[[RunData], Section]:
            marked = Markup(said)  # text that calls itself safe HTML
            table = Table([said, marked], [[said, marked], [None, 1.0]])
            curves = Curves(said, {said: {1: 1.0}}, said)
            no_block: Any = said
            return lambda run: Section(said, [Text(said), Text(marked), table, curves, no_block])

    class Broken(ReportSectionConfig):
        def build(self) -> Callable[[RunData], Section]:
            raise ValueError(said)

    nemorl_registry.register("report_sections", "s", Hostile)
    nemorl_registry.register("report_sections", "t", Broken)
    skeletons = []
    for said in ("harmless text", attack):
        run = run_that_says(said, tmp_path / said[:8].encode().hex())
        alone = write_report(run, tmp_path / "one.html").read_text()
        together = write_combined_report([(said, run)], tmp_path / "all.html", {"title": said, said: said}).read_text()
        skeletons.append([Skeleton(page).elements for page in (alone, together)])
        for page in (alone, together):
            data = embedded_data(page)
            # title, model, config, environment, metric, prompt, response, answer, event, section, table: all as said
            assert texts_of(data).count(said) > 20
            assert said.replace("/", "|") in Skeleton(page).text + data["runs"][0]["overview"]["name"]
    for harmless, hostile in zip(*skeletons, strict=True):
        assert Counter(hostile) - Counter(harmless) == Counter()
        assert hostile == harmless


def test_the_page_allows_only_its_own_script_to_run(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run")).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'$", policy[1])
    assert "default-src 'none'" in policy[1]


def test_template_signs_in_model_output_are_left_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_records(run, [sample(0, "$title costs ${data} $$5", "r", 0.0)])
    assert "$title costs ${data} $$5" in write_report(run).read_text()


def test_an_empty_directory_still_gives_a_report(tmp_path: Path) -> None:
    page = write_report(tmp_path, tmp_path / "out" / "r.html").read_text()
    (run,) = embedded_data(page)["runs"]
    assert run["overview"]["curves"] == {"moving": [], "still": [], "constants": "", "left_out": 0}
    assert run["overview"]["header"]["facts"]["status"] == "incomplete"
    assert (run["records"], run["steps"]) == ([], [])


RECORDED = "records/validation/step_000000.parquet"


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "metrics.jsonl", RECORDED, "events.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe{[",
        b"null\n[1]\n3\n",
        b'{"step": "x", "time": "y", "event": 5}\n',
        b'{"step": 1, "time": 1e300}\n',
    ],
)
def test_a_damaged_file_does_not_stop_the_report(tmp_path: Path, name: str, content: bytes) -> None:
    run = make_run(tmp_path / "run")
    (run / name).write_bytes(content)
    assert "my" not in write_report(run).name


def test_phases_and_the_unnamed_rest_add_up_to_the_step_time(tmp_path: Path) -> None:
    timing = charts.timing_chart(RunData.load(make_run(tmp_path / "run")))
    assert timing is not None
    # 4 s per step = 2 generation + 1 prepare_for_generation (its inner 0.5 not counted again) + 1 without a name
    assert {s["label"]: s["values"][0] for s in timing["series"]} == {
        "generation": 2.0, "prepare for generation": 1.0, "other": 1.0
    }  # fmt: skip


def test_samples_pair_the_earliest_and_latest_of_the_same_prompt(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lines = [sample(5, "a", "a5", 1.0), sample(1, "a", "a1", 0.0), sample(1, "b", "b1", 0.0), sample(9, "a", "a9", 1.0)]
    write_records(run, [*lines, sample(1, "a", "train", 0.0, split="train")])
    pairs, split = parts.sample_pairs(RunData.load(run))
    assert split == "validation"
    assert [(early["response"], late["response"]) for early, late in pairs] == [("a1", "a9"), ("b1", "b1")]


def test_long_runs_are_thinned_without_losing_sparse_curves_or_the_last_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": step, "train/loss": 1.0} for step in range(1, 5001)]
    write_lines(
        run / "metrics.jsonl", [*lines, *({"step": s, "validation/val_loss": 2.0} for s in range(10, 5001, 10))]
    )
    chart = next(card for card in chart_cards(run, "sft").still if card["title"] == "Loss")
    train, validation = chart["series"]
    assert sum(value is not None for value in train["values"]) <= charts.MAX_POINTS
    assert sum(value is not None for value in validation["values"]) == 500
    assert chart["steps"][-1] == 5000


@pytest.mark.parametrize(
    ("events", "status"),
    [
        (["started", "finished"], "finished"),
        (["started", "checkpoint", "failed"], "failed"),
        (["started", "stopped", "resumed"], "incomplete"),
        (["started", "stopped", "warning"], "stopped"),
        (["started", "environment_error"], "incomplete"),
        ([], "incomplete"),
    ],
)
def test_the_status_is_that_of_the_last_event_about_the_run(events: list[str], status: str) -> None:
    assert RunData("run", events=tuple({"event": name} for name in events)).status == status


def test_several_stages_share_one_page(tmp_path: Path) -> None:
    stages = [("SFT warm-up", make_run(tmp_path / "sft")), ("GRPO", make_run(tmp_path / "grpo"))]
    page = write_combined_report(
        stages, tmp_path / "r.html", {"title": "Quickstart", "Accuracy after": 0.75}
    ).read_text()
    data = embedded_data(page)
    assert [run["name"] for run in data["runs"]] == ["SFT warm-up", "GRPO"]
    assert (data["title"], data["tiles"]) == ("Quickstart", [{"label": "Accuracy after", "value": "0.75", "note": ""}])


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1.0, "1"), (0.12345, "0.1235"), (1234.5, "1,234"), (1e-6, "1e-06"), (None, "–")]
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert run_data.number(value) == text


class RewardsConfig(ReportSectionConfig):
    """A section of the tests."""

    metric: str = "train/reward"
    """What it shows."""
    as_list: bool = False
    """Forget the steps."""

    def build(self) -> Callable[[RunData], Section]:
        def section(run: RunData) -> Section:
            values: Any = run.metrics[self.metric]
            return Section(f"Curve of {self.metric}", [Curves("", {"": [*values] if self.as_list else values})])

        return section


@pytest.fixture
def rewards(nemorl_registry: Registry) -> None:
    nemorl_registry.register("report_sections", "rewards", RewardsConfig)


def run_with_sections(folder: Path, *sections: object) -> Path:
    made = make_run(folder)
    with (made / "config.yaml").open("a") as file:
        file.write(f"plugins: {json.dumps({'report_sections': sections})}\n")
    return made


def sections_in(page: str) -> list[dict[str, Any]]:
    (run,) = embedded_data(page)["runs"]
    found: list[dict[str, Any]] = run["extra"]["sections"]
    return found


@pytest.mark.usefixtures("rewards")
def test_sections_stand_in_the_order_of_the_config_each_with_its_options(tmp_path: Path) -> None:
    folder = run_with_sections(tmp_path / "run", {"name": "rewards", "metric": "validation/accuracy"}, "rewards")
    page = write_report(folder).read_text()
    assert [section["title"] for section in sections_in(page)] == [
        "Curve of validation/accuracy",
        "Curve of train/reward",
    ]


@pytest.mark.usefixtures("rewards")
def test_a_section_that_cannot_be_drawn_says_so_and_the_report_goes_on(tmp_path: Path) -> None:
    folder = run_with_sections(tmp_path / "run", {"name": "rewards", "as_list": True})
    page = write_report(folder).read_text()
    (section,) = sections_in(page)
    assert "report section 'Curve of train/reward' raised AttributeError" in section["blocks"][0]["text"]
    assert "4 exactly" in page


@pytest.mark.usefixtures("rewards")
@pytest.mark.parametrize(
    ("given", "title", "words"),
    [
        ("rewrads", "rewrads", "no report section named"),
        ({"name": "rewards", "metrc": "x"}, "rewards", "report_sections.0.metrc"),
        ({"name": "rewards", "metric": "train/absent"}, "rewards", "raised KeyError"),
        (3, "3", "expected the name of a report section"),
    ],
)
def test_a_section_that_cannot_be_made_says_why_in_its_place(
    given: object, title: str, words: str, tmp_path: Path
) -> None:
    told: list[str] = []
    page = write_report(run_with_sections(tmp_path / "run", given, "rewards"), warn=told.append).read_text()
    assert [section["title"] for section in sections_in(page)] == [f"Section {title}", "Curve of train/reward"]
    (why,) = told
    assert words in why


def test_curves_of_a_plugin_in_a_row_share_a_line() -> None:
    one, other = Curves("a", {"x": {1: 1.0}}), Curves("b", {"x": {1: 2.0}})
    blocks = blocks_of([one, other, Text("1 < 2"), one, Table(["n"], [[0.5], [None]])])
    assert [block["kind"] for block in blocks] == ["charts", "text", "charts", "table"]
    assert [[card["title"] for card in block["charts"]] for block in (blocks[0], blocks[2])] == [["a", "b"], ["a"]]
    assert blocks[1]["text"] == "1 < 2"
    assert blocks[3]["rows"] == [["0.5"], ["–"]]


def test_a_plugin_shows_responses_in_its_own_way(tmp_path: Path, nemorl_registry: Registry) -> None:
    class Loud(TranscriptSection):
        def transcript(self, record: Mapping[str, Any]) -> list[Text] | None:
            return [Text(record["response"].upper())] if record["answer"] == "4" else None

    class LoudConfig(ReportSectionConfig):
        def build(self) -> Loud:
            return Loud()

    nemorl_registry.register("report_sections", "loud", LoudConfig)
    folder = run_with_sections(tmp_path / "run", "loud")
    write_records(folder, [sample(0, "2+2?", "five", 0.0), sample(3, "2+2?", None, 1.0)])  # type: ignore[arg-type]
    (run,) = embedded_data(write_report(folder).read_text())["runs"]
    first, second = (record["shown"] for record in run["records"])
    assert first == [{"kind": "text", "text": "FIVE"}]
    assert "loud raised AttributeError" in second[0]["text"]  # None has no upper()
    assert run["extra"]["sections"] == []


def test_a_budget_of_records_is_spread_over_the_run() -> None:
    assert list(spread(range(9))) == [0, 8, 4, 2, 6, 1, 3, 5, 7]
    assert list(spread([])) == []
    assert list(spread([5])) == [5]
