"""The page of ``nemorl view`` and of ``nemorl report`` in a real Chromium: light, dark, and as wide as a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nemorl_cli.report.records.evaluating import EvaluationRecords
from nemorl_cli.report.report import write_report
from nemorl_insight.view.serving import Viewer
from record_files import write_records
from seen_records import decode, episode, picture, tone
from tiers import only

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
expect.set_options(timeout=60_000)  # two polls and the page's own pause take up to four seconds where nothing else runs
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
ATTACK = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>\u202eevil\x1b[31m{{7*7}}"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed: apt-get install chromium"),
]
LOOKS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}
VIEWS = ("overview", "curves", "samples", "timeline", "config", "events")


def row(step: int, group: int, place: int, response: str, reward: float) -> dict[str, Any]:
    group_id = f"train-{step}-{group}"
    sequence = {
        "token_ids": [1, 2, 3], "mask": [False, True, True], "generation_logprobs": [0.0, -1.0, -2.0],
        "old_logprobs": [0.0, -1.0, -2.5], "loss_weights": [0.0, 0.5, 0.5],
    }  # fmt: skip
    turns = [
        {"author": "prompt", "text": f"prompt {group} {ATTACK}", "sequence": 0, "start": 0, "stop": 1},
        {"author": "policy", "text": response, "sequence": 0, "start": 1, "stop": 3},
    ]
    return {
        "split": "train", "step": step, "group": group, "group_id": group_id, "sample_id": f"{group_id}-{place}",
        "prompt": f"prompt {group} {ATTACK}", "response": response, "answer": ATTACK, "reward": reward,
        "correct": reward > 0, "advantage": reward - 0.5, "tokens": 2, "prompt_tokens": 1, "total_tokens": 3,
        "num_turns": 1, "finish_reason": "stop", "weight_versions": [step - 1], "turns": turns,
        "sequences": [sequence], "components": [{"name": ATTACK, "value": reward}],
    }  # fmt: skip


def timed(record: dict[str, Any], began_s: float, *turns: tuple[str, float, float], ended_s: float) -> dict[str, Any]:
    """The record with times; of step 1 there are none, as if an older version had written it."""
    places = [{"sequence": 0, "start": place, "stop": place + 1, "text": ""} for place in range(len(turns))]
    said = [
        {**place, "author": author, "began_s": one, "ended_s": other}
        for place, (author, one, other) in zip(places, turns, strict=True)
    ]
    return {**record, "turns": said, "began_s": began_s, "ended_s": ended_s}


def add_step(run: Path, step: int) -> None:
    said = [f"answer {step}", ATTACK, "x" * 2**20, f"needle{step}"]
    rewards = [1.0, 0.0, 0.0, 0.0]
    write_records(run, [row(step, place // 2, place, said[place], rewards[place]) for place in range(4)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": step, "time": 100.0 + step, "train/reward": step / 8, f"train/{ATTACK}": step}) + "\n"
        )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps({"algorithm": "grpo", "model": ATTACK, "max_steps": 8}))
    (folder / "environment.json").write_text(json.dumps({"git": {"commit": ATTACK}}))
    alert = {"event": "alert", "rule": "falls", "metric": "train/reward", "step": 2, "value": 0.25, "severity": "error"}
    alert |= {
        "time": 102.0,
        "text": f"train/reward is 0.25 at step 2: {ATTACK}. {ATTACK}",
        "limit": ATTACK,
        "action": "stop",
    }
    events = [{"time": 100.0, "event": "error", "reason": ATTACK}, alert]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    add_step(folder, 1)
    add_step(folder, 2)
    (folder / "records/_tokens.jsonl").write_text('{"id": 2, "text": "two"}\n{"id": 3, "text": "<b>three"}\n')
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield found
        found.close()


Open = Callable[..., Any]


@pytest.fixture
def page_of(browser: Any) -> Iterator[Open]:
    """Opens a page of some looks; at the end, nothing was blocked, missing, raised or run that the run brought."""
    problems: list[str] = []
    contexts = []

    def opened(looks: str) -> Any:
        context = browser.new_context(**LOOKS[looks])
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        return page

    yield opened
    for context in contexts:
        for page in context.pages:
            assert page.evaluate("window.owned") is None
            assert page.locator("#app script, #app img, #app iframe").count() == 0
        context.close()
    assert problems == []


@pytest.fixture
def viewer(run: Path, tmp_path: Path) -> Iterator[Viewer]:
    with Viewer([run], tmp_path / "cache") as found:
        yield found


def go(page: Any, url: str, view: str) -> None:
    page.goto("about:blank")
    page.goto(f"{url}#{view}")
    page.wait_for_selector(f"body[data-ready={view.partition('?')[0]}]")


@pytest.mark.parametrize("looks", only("phone", of=LOOKS))
def test_every_view_fits_and_shows_hostile_text_as_text(looks: str, run: Path, viewer: Viewer, page_of: Open) -> None:
    page = page_of(looks)
    for url in (viewer.url, write_report(run).as_uri()):
        for view in VIEWS:
            go(page, url, view)
            assert page.evaluate("document.documentElement.scrollWidth") <= LOOKS[looks]["viewport"]["width"]
            assert page.evaluate("window.owned") is None
            shown = page.inner_text("#app")
            assert "\u202e" not in shown
            assert "\x1b" not in shown
            assert "cannot be shown" not in shown
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 27)"
        assert dark is (looks == "dark")
        go(page, url, "overview")
        assert "<script>window.owned = 1</script>" in page.inner_text("#app")
        assert r"\u202eevil\x1b[31m{{7*7}}" in page.inner_text("#app")


def test_every_view_can_be_reached_on_a_phone(run: Path, page_of: Open) -> None:
    page, url = page_of("phone"), write_report(run).as_uri()
    go(page, url, "overview")
    width = LOOKS["phone"]["viewport"]["width"]
    boxes = [link.bounding_box() for link in page.locator("nav .links a").all()]
    assert len(boxes) == len(VIEWS)
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)


def test_a_metric_that_is_constant_in_one_run_stays_beside_another_run(tmp_path: Path, page_of: Open) -> None:
    runs = {"still": [0.5, 0.5, 0.5], "moving": [0.1, 0.2, 0.3]}
    for name, rewards in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps({"algorithm": "grpo", "model": "org/model"}))
        lines = [json.dumps({"step": step, "train/reward": reward}) for step, reward in enumerate(rewards, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with Viewer([tmp_path / name for name in runs], tmp_path / "cache") as viewer:
        page = page_of("light")
        go(page, viewer.url, "curves")
        chart = page.locator("figure", has=page.locator("h3", has_text="Reward"))
        expect(chart.first).to_contain_text("still")
        expect(chart.first).to_contain_text("moving")


CURVES = """() => [...document.querySelectorAll(".plot")].filter(({ chart }) => chart.plot).map(({ chart }) =>
    chart.plot.series.slice(1).map(({ label, stroke, dash }) => [label, `${stroke()} ${dash ?? ""}`]))"""


def looks_of_curves(page: Any, runs: list[Path], cache: Path) -> list[dict[str, str]]:
    """Per card, the colour and dash of each curve."""
    with Viewer(runs, cache) as viewer:
        go(page, viewer.url, "curves")
        page.wait_for_selector(".u-legend")
        return [dict(card) for card in page.evaluate(CURVES)]


def test_a_run_keeps_its_colour_whichever_are_shown_beside_it(tmp_path: Path, page_of: Open) -> None:
    metrics = {"train/reward": 0.5, "train/loss": 2.0}
    # By their hashes, ppo, dapo and baseline have places 1, 3 and 2; grpo and small have both 0.
    runs = {name: tmp_path / name for name in ("ppo", "dapo", "baseline", "grpo", "small")}
    runs |= {f"run-{number}": tmp_path / f"run-{number}" for number in range(7)}
    for folder in runs.values():
        folder.mkdir()
        (folder / "config.yaml").write_text(json.dumps({"algorithm": "grpo", "model": "org/model"}))
        lines = [json.dumps({"step": step, **{n: v * step for n, v in metrics.items()}}) for step in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page, cache = page_of("light"), tmp_path / "cache"

    def looks(*names: str) -> dict[str, str]:
        cards = looks_of_curves(page, [runs[name] for name in names], cache)
        assert len(cards) == len(metrics)
        assert all(card == cards[0] for card in cards)
        return cards[0]

    few = looks("ppo", "dapo")
    assert looks("dapo", "ppo") == few
    assert few.items() < looks("baseline", "grpo", "dapo", "ppo").items()
    # The first of one place keeps it, and no third run has to make room for the second.
    crowded = looks("small", "ppo", "dapo", "grpo")
    assert few.items() < crowded.items()
    assert crowded["grpo"] == looks("grpo", "ppo")["grpo"]
    assert crowded["small"] not in (crowded["grpo"], *few.values())

    many = looks(*runs)
    assert len(set(many.values())) == len(runs)
    assert sum(look.endswith(" 8,4") for look in many.values()) == len(runs) - 8  # past the palette, dashed
    with Viewer(list(runs.values()), cache) as viewer:
        go(page, viewer.url, "curves")
        page.get_by_label("dapo", exact=True).uncheck()
        page.wait_for_selector(".u-legend")
        [left, *_] = [dict(card) for card in page.evaluate(CURVES)]
        assert left == {name: look for name, look in many.items() if name != "dapo"}


def test_metrics_and_phases_keep_their_colours_when_others_join_them(tmp_path: Path, page_of: Open) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps({"algorithm": "grpo", "model": "org/model"}))
    page, curves, phases = page_of("light"), [], []
    for ratios, names in (  # the phases' places: 6 and 4, then also 2
        (["probs_ratio_max"], ["generation", "logprobs"]),
        (["probs_ratio_max", "probs_ratio_min"], ["data_processing", "generation", "logprobs"]),
    ):
        fixed = {f"timing/train/{name}": 1.0 for name in names}
        moving = [{"step": step, **fixed, **{f"train/{name}": step / 8 for name in ratios}} for step in (1, 2)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in moving))
        url = write_report(tmp_path).as_uri()
        go(page, url, "curves")
        page.wait_for_selector(".u-legend")
        curves.append([look for _, look in page.evaluate(CURVES)[0]])
        go(page, url, "overview")
        page.wait_for_selector(".split .u-legend")
        colours = "all => all.map((row) => [row.innerText, row.querySelector('.dot').style.background])"
        rows = page.locator("table.timing tr:has(.dot)").evaluate_all(colours)
        phases.append({text.split("\t")[0]: colour for text, colour in rows})
    assert phases[0].items() < phases[1].items()
    assert len(set(phases[1].values())) == 3
    [alone], both = curves
    assert alone in both
    assert len(set(both)) == 2


def test_an_alert_is_in_a_list_and_marked_on_the_curve_that_it_is_about(run: Path, page_of: Open) -> None:
    page, url = page_of("dark"), write_report(run).as_uri()
    for view in ("overview", "events"):
        go(page, url, view)
        shown = " ".join(page.inner_text(".alert").split())
        assert shown.startswith("falls step 2 train/reward value 0.25 limit </script>")
        assert "action stop over not yet" in shown
    go(page, url, "curves")
    chart = page.locator("figure", has=page.locator("h3", has_text="Reward"))
    expect(chart.locator(".raised")).to_contain_text("step 2, falls: 0.25")
    # Pixels in the colour of errors, of which the inside of the triangle is made: none on the other chart.
    count = """figure => {
        const canvas = figure.querySelector("canvas");
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let found = 0;
        for (let at = 0; at < pixels.length; at += 4) {
            found += pixels[at] === 0xff && pixels[at + 1] === 0xa5 && pixels[at + 2] === 0x6b;
        }
        return found;
    }"""
    other = page.locator("figure", has_not=page.locator(".raised")).first
    assert chart.evaluate(count) > 10
    assert other.evaluate(count) == 0


@pytest.mark.parametrize("kind", ["live", "offline"])
def test_from_a_step_to_a_token_by_keys(kind: str, run: Path, viewer: Viewer, page_of: Open) -> None:
    page = page_of("light")
    go(page, viewer.url if kind == "live" else write_report(run).as_uri(), "samples")
    page.wait_for_selector(".turn")
    assert page.inner_text(".detail h3") == "train-2-0-0"
    assert page.locator(".group").count() == 2
    page.keyboard.press("j")
    expect(page.locator(".detail h3")).to_have_text("train-2-0-1")
    assert page.inner_text(".by-policy .text") == ATTACK.replace("\u202e", r"\u202e").replace("\x1b", r"\x1b")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".detail h3")).to_have_text("train-1-0-0")
    page.get_by_label("Heat").select_option("mismatch")
    assert page.locator(".by-policy .tok").all_inner_texts() == ["two", "<b>three"]
    assert page.locator(".tok.above").all_inner_texts() == ["<b>three"]  # 0.5 nats; the other agrees
    page.locator(".tok.above").hover()
    assert "trainer before -2.5" in page.inner_text(".readout")
    page.get_by_label("Heat").select_option("none")
    page.locator(".detail h3").click()
    page.keyboard.press("/")
    page.keyboard.type("needle1")
    expect(page.locator(".item")).to_have_count(1)
    page.wait_for_selector("mark")
    assert page.inner_text(".detail h3") == "train-1-1-3"
    assert page.inner_text("mark") == "needle1"
    assert "q=needle1" in page.url  # the address can be sent to somebody


def test_filters_and_orders(viewer: Viewer, page_of: Open) -> None:
    page = page_of("light")
    go(page, viewer.url, "samples?all=1&only=all_wrong")
    page.wait_for_selector(".item")
    assert page.locator(".item").count() == 4  # group 1 of both steps
    page.get_by_label("Sort by").select_option("gradient")
    page.get_by_label("group all wrong").uncheck()
    expect(page.locator(".item")).to_have_count(8)
    expect(page.locator(".item .marks").first).to_have_text("0.5")  # (0.5 + 0.5) * |1.0 - 0.5|


def test_the_timeline_is_by_time_where_there_are_times(run: Path, tmp_path: Path, page_of: Open) -> None:
    # From -1 to 4 s: the answer from -1 to 1 has the first 40 % of the width, the environment from 1 to 2 the next
    # 20 %, the second answer from 3 to 4 the last 20 %.
    slow = timed(row(3, 0, 0, "a", 1.0), -1.0, ("policy", -1, 1), ("environment", 1, 2), ("policy", 3, 4), ended_s=4.0)
    quick = timed(row(3, 0, 1, "b", 0.0), 0.0, ("policy", 0, 0.5), ended_s=1.0)
    write_records(run, [slow, quick])
    page = page_of("light")
    with Viewer([run], tmp_path / "cache") as viewer:
        for url in (viewer.url, write_report(run).as_uri()):
            go(page, url, "timeline?step=3")
            page.wait_for_selector("a.lane i.whole")  # a page that is live first draws the steps that it knows
            parts = page.locator("a.lane").first.locator("i")
            drawn = parts.evaluate_all("all => all.map((part) => [part.className, part.style.left, part.style.width])")
            assert drawn == [
                ["whole", "0%", "100%"], ["own", "0%", "40%"], ["asked", "40%", "20%"], ["own", "80%", "20%"]
            ]  # fmt: skip
            assert page.locator(".tick").all_inner_texts() == ["-1 s", "step begins", "1 s", "2 s", "3 s", "4 s"]
            page.get_by_label("Sort by").select_option("seconds")
            expect(page.locator("a.lane").first).to_have_attribute("title", re.compile("from -1 to 4 s"))
            page.get_by_label("Sort by").select_option("")
            go(page, url, "timeline?step=1")
            expect(page.get_by_text("Left to right are tokens")).to_be_visible()


def test_what_the_run_adds_appears(run: Path, viewer: Viewer, page_of: Open) -> None:
    page = page_of("light")
    go(page, viewer.url, "samples")
    page.wait_for_selector(".turn")
    add_step(run, 3)
    expect(page.locator(".stepper output")).to_have_text("step 3 of 3")
    go(page, viewer.url, "curves")
    page.wait_for_selector(".u-legend")
    add_step(run, 4)
    expect(page.locator(".u-legend .u-value").first).to_have_text("4")
    go(page, viewer.url, "overview")
    expect(page.locator(".alert")).to_have_count(1)
    raised = {"time": 104.0, "event": "alert", "rule": "rises", "metric": "train/reward", "step": 4, "value": 0.5}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(raised) + "\n")
    expect(page.locator(".alert b").filter(has_text="rises")).to_have_count(1)


@pytest.mark.full
def test_what_is_added_while_a_view_is_read_appears(run: Path, viewer: Viewer, page_of: Open) -> None:
    page = page_of("light")
    go(page, viewer.url, "events")

    def late(route: Any) -> None:
        """An answer of before the addition comes after the page was told of it and has waited to look again."""
        answer = route.fetch()
        add_step(run, 3)
        page.wait_for_timeout(5_000)
        route.fulfill(response=answer)

    page.route(re.compile("/api/runs/0/steps"), late, times=1)
    page.evaluate("location.hash = 'samples'")
    expect(page.locator(".stepper output")).to_have_text("step 3 of 3")


@pytest.mark.full
def test_runs_over_each_other(run: Path, tmp_path: Path, page_of: Open) -> None:
    page = page_of("light")
    with Viewer([run, run], tmp_path / "cache") as viewer:
        go(page, viewer.url, "curves")
        page.wait_for_selector(".u-legend")
        card = page.locator("figure.card", has_text="mean reward, as the environment gave it").first
        expect(card.locator(".u-series:not(.faint)")).to_have_count(3)  # steps, and one curve of each run
        expect(card.locator(".raised")).to_have_count(2)
        plots = "[...document.querySelectorAll('.plot')].map((place) => place.chart.plot).filter(Boolean)"
        page.evaluate(f"{plots}[0].setScale('x', {{min: 1, max: 1.5}})")
        ends = f"{plots}.map((plot) => [plot.scales.x.min, plot.scales.x.max])"
        assert set(map(tuple, page.evaluate(ends))) == {(1, 1.5)}  # all charts zoom together
        page.locator(".runs input").first.uncheck()
        expect(card.locator(".u-series:not(.faint)")).to_have_count(2)


@pytest.mark.parametrize("looks", LOOKS)
def test_images_stand_beside_their_text_and_their_tokens_are_one_chip(
    looks: str, tmp_path: Path, page_of: Open
) -> None:
    records = EvaluationRecords(tmp_path / "seen", decode)
    shown = ["see ", (picture(1, 700, 420), 6), "and ", (tone(), 3), "now"]
    records.add("drawings", 0, [episode(shown)])  # type: ignore[list-item]
    records.flush()
    with Viewer([tmp_path / "seen"], tmp_path / "cache") as viewer:
        page = page_of(looks)
        for url in (viewer.url, write_report(tmp_path / "seen").as_uri()):
            go(page, url, "samples")
            picked = page.locator(".turn .thumb")
            expect(picked).to_have_count(1)
            assert page.wait_for_function("document.querySelector('.turn .thumb').naturalWidth").json_value() == 256
            assert page.locator(".turn .shown-item .chip").all_inner_texts() == ["[image 6 tokens]", "[audio 3 tokens]"]
            assert page.locator(".turn audio").count() == 1
            assert page.locator(".group-head .thumb").count() == 1
            page.select_option("[aria-label=Heat]", "logprob")
            assert page.locator(".turn .shown-item .chip").all_inner_texts() == ["[image 6 tokens]", "[audio 3 tokens]"]
            assert page.evaluate("document.documentElement.scrollWidth") <= LOOKS[looks]["viewport"]["width"]
            page.goto("about:blank")
