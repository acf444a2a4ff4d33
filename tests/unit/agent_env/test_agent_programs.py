"""A program per episode: how it is started, heard and scored, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from agent_world import Programs, Script, ScriptedPolicy, TinyGateway, play, prompt_of
from nemorl.errors import BackendError, UsageError
from nemorl_agents.programs import AgentConfig
from nemorl_agents.programs.build import environment_of
from nemorl_agents.programs.environment import Agent
from nemorl_agents.programs.program import Program, clean_environment
from recorded_messages import Raises

OUTCOMES = ("finished", "crashed", "timeout", "no_calls", "stopped")


def outcome_of(score: object) -> str:
    metrics = score.metrics  # type: ignore[attr-defined]
    [found] = [name for name in OUTCOMES if metrics[f"outcome_{name}"]]
    return found


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


def ends(pid: int) -> bool:
    """A process that has been killed is gone a moment later."""
    until = time.monotonic() + 30.0
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_alive(pid)


def pid_in(path: Path) -> int:
    """What a program writes there, once it has."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        if path.exists() and path.read_text().endswith("."):
            return int(path.read_text().rstrip("."))
        time.sleep(0.01)
    raise AssertionError(f"nothing wrote {path}")


# What it is given


def test_a_program_gets_its_task_calls_the_policy_and_is_scored_by_its_last_line(
    program: Programs, script: Script
) -> None:
    agent = program(script("print('thinking'); print(ask(sys.stdin.read())); print()"))
    policy = ScriptedPolicy("42")
    score = play(agent, policy)
    assert (score.reward, outcome_of(score)) == (1.0, "finished")
    assert policy.heard == [[{"role": "user", "content": "6*7="}]]
    assert score.metrics["gateway_requests"] == 1.0, "what the gateway counted is logged"
    agent.close()


def test_the_task_stands_in_the_command_and_in_a_file_without_what_is_hidden(
    program: Programs, script: Script, tmp_path: Path
) -> None:
    source = """
    task = json.load(open(os.environ["NEMORL_TASK"]))
    json.dump([sys.argv[1:], task, os.environ["NEMORL_EPISODE"], sorted(os.listdir())], open(sys.argv[1], "w"))
    """
    seen, extra = tmp_path / "seen.json", tmp_path / "notes.txt"
    extra.write_text("n")
    agent = program(
        script(source),
        str(seen),
        "q={prompt}",
        "{row[level]}",
        '{"kept": 1}',
        files={"data/in.csv": "table", "more.json": "numbers"},
        copy_in=[extra],
    )
    prompt = prompt_of(level=3, table="a,b", numbers=[1, 2], answer="42")
    assert outcome_of(play(agent, ScriptedPolicy(), prompt)) == "no_calls"
    arguments, task, episode, listing = json.loads(seen.read_text())
    assert arguments == [str(seen), "q=6*7=", "3", '{"kept": 1}']
    assert task == {"prompt": "6*7=", "messages": [], "row": {"level": 3, "table": "a,b", "numbers": [1, 2]}}
    assert (episode, listing) == ("episode 3.1", ["data", "more.json", "notes.txt"])
    agent.close()


def test_a_program_sees_no_variable_of_ours_but_harmless_ones(
    program: Programs, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    seen = tmp_path / "seen.json"
    agent = program(script("json.dump(dict(os.environ), open(sys.argv[1], 'w'))"), str(seen), env={"MODE": "fast"})
    play(agent, ScriptedPolicy())
    found = json.loads(seen.read_text())
    assert "WANDB_API_KEY" not in found
    assert found["MODE"] == "fast"
    assert found["OPENAI_BASE_URL"] == found["ANTHROPIC_BASE_URL"] + "/v1"
    assert found["OPENAI_API_KEY"] == found["ANTHROPIC_API_KEY"] == found["ANTHROPIC_AUTH_TOKEN"]
    assert Path(found["HOME"]).parent == Path(found["NEMORL_TASK"]).parent
    agent.close()


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("stdout", "ask('x'); print('no'); print('42')"),
        ("last_message", "ask('x'); ask('y'); print('no')"),
        ("file:out/answer.txt", "ask('x'); os.mkdir('out'); open('out/answer.txt', 'w').write(' 42 ')"),
    ],
)
def test_the_answer_is_where_the_config_says(program: Programs, script: Script, where: str, source: str) -> None:
    agent = program(script(source), answer=where)
    assert play(agent, ScriptedPolicy("17", "42")).reward == 1.0
    agent.close()


def test_a_link_out_of_the_folder_is_no_answer(program: Programs, script: Script, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("42")
    source = "ask('x'); os.symlink(sys.argv[1], 'direct'); os.symlink(os.path.dirname(sys.argv[1]), 'folder')"
    for name in ("direct", "folder/secret", "../task.json", str(tmp_path / "secret")):
        agent = program(script(source), str(tmp_path / "secret"), answer=f"file:{name}")
        assert play(agent, ScriptedPolicy("17")).reward == 0.0, name
        agent.close()


def test_a_reward_is_told_of_the_episode(program: Programs, script: Script, tmp_path: Path) -> None:
    rewards = tmp_path / "more.py"
    rewards.write_text(
        "def looks(prompt, response, answer, episode):\n"
        "    assert episode.returncode == 0 and episode.stderr == 'hm' and episode.files == {'made.txt': 3}\n"
        "    assert episode.read('made.txt') == 'abc' and episode.last_message == '17' and answer == '42'\n"
        "    assert episode.folder.is_dir()\n"
        "    return {'told': 0.5, 'form': 0.25}\n"
    )
    source = "ask('x'); open('made.txt', 'w').write('abc'); sys.stderr.write('hm'); print('z')"
    agent = program(script(source), reward=f"{rewards}:looks")
    score = play(agent, ScriptedPolicy("17"), prompt_of(answer="42"))
    assert (score.reward, dict(score.components)) == (0.75, {"told": 0.5, "form": 0.25})
    assert [*agent.rehearsals()] == [], "there is no episode before the run to try it on"
    agent.close()


# How it ends


@pytest.mark.parametrize(
    ("outcome", "source", "answers"),
    [
        ("finished", "print(ask('x'))", ["42"]),
        ("crashed", "ask('x'); sys.exit(3)", ["42"]),
        ("crashed", "import no_such_module", []),
        ("no_calls", "print('42')", []),
        ("stopped", "ask('x'); ask('y')", ["42"]),
        ("finished", "try: ask('x'); ask('y')\nexcept OSError: print('42')", ["42"]),
    ],
)
def test_each_end_has_its_outcome_and_score(
    program: Programs, script: Script, outcome: str, source: str, answers: list[str]
) -> None:
    agent = program(script(source), outcomes={"crashed": -1.0, "no_calls": -0.5})
    score = play(agent, ScriptedPolicy(*answers))
    worth = {"finished": 1.0, "crashed": -1.0, "no_calls": -0.5, "stopped": 0.0}
    assert (outcome_of(score), score.reward) == (outcome, worth[outcome])
    assert score.correct is (None if outcome == "finished" else False)
    agent.close()


def test_an_outcome_may_say_nothing_be_scored_all_the_same_or_end_the_run(
    program: Programs, script: Script, raises: Raises
) -> None:
    source = "print(ask('x')); sys.stderr.write('no_such_tool'); sys.exit(3)"
    agent = program(script(source), outcomes={"crashed": None})
    assert not play(agent, ScriptedPolicy("42")).valid
    agent = program(script(source), outcomes={"crashed": "reward"})
    assert play(agent, ScriptedPolicy("42")).reward == 1.0
    agent = program(script(source), outcomes={"crashed": "error"})
    with raises(UsageError, 3, "no_such_tool"):
        play(agent, ScriptedPolicy("42"))


def test_a_program_is_ended_at_the_deadline_and_what_it_said_is_kept(program: Programs, script: Script) -> None:
    agent = program(
        script("print(ask('x')); import time; time.sleep(600)"), timeout_s=4.0, outcomes={"timeout": "reward"}
    )
    score = play(agent, ScriptedPolicy("42"))
    assert (outcome_of(score), score.reward) == ("timeout", 1.0)
    agent.close()


@pytest.mark.parametrize("source", ["ask('x')", "try: ask('x')\nexcept OSError: pass"])
def test_an_error_of_the_engine_is_not_the_agents(
    program: Programs, script: Script, source: str, raises: Raises
) -> None:
    agent = program(script(source))
    with raises(BackendError, "engine"):
        play(agent, ScriptedPolicy(BackendError("the engine is gone")))


def test_an_agent_that_asks_again_and_is_answered_goes_on(program: Programs, script: Script) -> None:
    agent = program(script("try: ask('x')\nexcept OSError: print(ask('x'))"))
    assert play(agent, ScriptedPolicy(BackendError("the engine is gone"), "42")).reward == 1.0


def test_output_is_bounded_and_its_end_is_kept(program: Programs, script: Script, tmp_path: Path) -> None:
    source = "ask('x')\nfor _ in range(20): sys.stdout.write('y' * 100_000 + '\\n')\nprint('42')"
    agent = program(script(source), output_kib=1, keep_folders=tmp_path / "kept")
    assert play(agent, ScriptedPolicy("17")).reward == 1.0
    [kept] = (tmp_path / "kept").glob("*/stdout.txt")
    assert len(kept.read_text()) == 1024
    assert kept.read_text().endswith("y\n42\n")
    agent.close()


def test_the_key_is_nowhere_in_what_is_kept(
    program: Programs, script: Script, gateway: TinyGateway, tmp_path: Path, logged: io.StringIO
) -> None:
    source = "print(os.environ['OPENAI_API_KEY']); sys.stderr.write(os.environ['ANTHROPIC_API_KEY']); sys.exit(1)"
    agent = program(script(source), give_up_after=2, keep_folders=tmp_path / "kept")
    play(agent, ScriptedPolicy())
    with pytest.raises(UsageError) as caught:
        play(agent, ScriptedPolicy())
    for key in gateway.keys:
        assert key not in logged.getvalue() + str(caught.value)
        assert all(key not in path.read_text() for path in (tmp_path / "kept").glob("*/std*"))
    assert "key of the episode" in str(caught.value)


# Mistakes


def test_agents_that_never_reach_the_policy_end_the_run_with_what_they_said(
    program: Programs, script: Script, raises: Raises
) -> None:
    agent = program(script("import no_such_module"), give_up_after=3)
    assert [play(agent, ScriptedPolicy()).reward for _ in range(2)] == [0.0, 0.0]
    with raises(UsageError, "no_such_module", 3, "OPENAI_BASE_URL"):
        play(agent, ScriptedPolicy())


@pytest.mark.slow
def test_one_that_reached_it_shows_that_the_command_works(program: Programs, script: Script) -> None:
    agent = program(script("print(ask('x') if len(sys.stdin.read()) > 3 else 1/0)"), give_up_after=2)
    play(agent, ScriptedPolicy(), prompt_of("7="))
    play(agent, ScriptedPolicy("42"), prompt_of("6*7="))
    for _ in range(4):
        assert outcome_of(play(agent, ScriptedPolicy(), prompt_of("7="))) == "crashed"
    agent.close()


def test_a_command_that_cannot_be_started_is_an_error_at_once(
    gateway: TinyGateway, tmp_path: Path, raises: Raises
) -> None:
    path = tmp_path / "agent"
    path.write_bytes(b"\0neither a script nor a program")
    path.chmod(0o755)
    agent = environment_of(AgentConfig(command=(str(path),), reward="exact_match"), lambda: gateway)
    assert isinstance(agent, Agent)
    with raises(UsageError, "OSError", "environment.command"):
        play(agent, ScriptedPolicy())


# Nothing is left

STUBBORN = """
import signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        open(sys.argv[1], "w").write(f"{os.getpid()}.")
        time.sleep(600)
    os._exit(0)
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read().endswith("."):
    time.sleep(0.01)
"""
"""A grandchild in a session of its own that ignores what asks it to end, and holds the program's pipes."""


def test_a_program_that_ends_leaves_no_process(program: Programs, script: Script, tmp_path: Path) -> None:
    agent = program(script(STUBBORN + "ask('x'); print('42')"), str(tmp_path / "pid"))
    assert play(agent, ScriptedPolicy("17")).reward == 1.0
    assert not is_alive(pid_in(tmp_path / "pid"))
    agent.close()


def test_a_program_at_its_deadline_leaves_no_process(program: Programs, script: Script, tmp_path: Path) -> None:
    agent = program(script(STUBBORN + "time.sleep(600)"), str(tmp_path / "pid"), timeout_s=4.0)
    assert outcome_of(play(agent, ScriptedPolicy())) == "timeout"
    assert not is_alive(pid_in(tmp_path / "pid"))
    agent.close()


def test_a_cancelled_episode_leaves_no_process_no_folder_and_no_key(
    program: Programs, script: Script, gateway: TinyGateway, tmp_path: Path
) -> None:
    agent = program(
        script(STUBBORN + "open(sys.argv[2], 'w').write(os.getcwd()); time.sleep(600)"),
        str(tmp_path / "pid"),
        str(tmp_path / "cwd"),
    )

    async def cancel() -> None:
        task = asyncio.ensure_future(agent.rollout(prompt_of(), ScriptedPolicy()))
        while not (tmp_path / "cwd").exists() or not (tmp_path / "cwd").read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not is_alive(pid_in(tmp_path / "pid"))
    assert not Path((tmp_path / "cwd").read_text()).exists()
    assert not gateway.open_policies
    agent.close()


@pytest.mark.slow
def test_many_episodes_that_end_in_any_way_leave_nothing(
    program: Programs, script: Script, gateway: TinyGateway, tmp_path: Path
) -> None:
    source = """
    import random, subprocess, time
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    for pid in (left.pid, os.getpid()):
        open(os.path.join(sys.argv[1], str(pid)), "w").close()
    ask("x")
    choice = int(sys.stdin.read())
    if choice == 0: time.sleep(600)
    if choice == 1: sys.exit(1)
    if choice == 2: os.kill(os.getpid(), 9)
    print("42")
    """
    started = tmp_path / "started"
    started.mkdir()
    agent = program(script(source), str(started))
    play(agent, ScriptedPolicy("17"), prompt_of("3"))
    before = len(os.listdir("/proc/self/fd"))

    async def episode(number: int) -> str:
        task = asyncio.ensure_future(agent.rollout(prompt_of(str(number % 4)), ScriptedPolicy("17")))
        if number % 4:
            return outcome_of(await task)
        while len([*started.iterdir()]) < 8:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return "cancelled"

    async def many() -> list[str]:
        return await asyncio.gather(*(episode(number) for number in range(12)))

    assert asyncio.run(many()) == ["cancelled", "crashed", "crashed", "finished"] * 3
    assert not any(is_alive(int(path.name)) for path in started.iterdir())
    assert not gateway.open_policies
    assert len(os.listdir("/proc/self/fd")) <= before
    agent.close()


@pytest.mark.slow
def test_a_program_may_be_cancelled_at_any_moment_of_its_start(script: Script, tmp_path: Path) -> None:
    path = script(
        """
        import subprocess, time
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        time.sleep(600)
        """
    )

    async def cancelled_after(turns: int) -> None:
        command = [sys.executable, "-S", str(path)]
        program = Program(command, folder=tmp_path, environment=clean_environment(), output_bytes=9, limits={})
        running = asyncio.create_task(program.run("", 60.0))
        for _ in range(turns):  # of the loop
            await asyncio.sleep(0)
        time.sleep(0.2)  # the loop is busy, and the program gets further than its start is known here
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=20.0)
        assert done, f"cancelled after {turns} turns it does not end"

    for turns in range(10):
        asyncio.run(cancelled_after(turns))


def test_nothing_is_left_of_a_program_whose_watcher_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemorl_agents.programs.program.DRAIN_S", 0.5)
    started = tmp_path / "started"
    command = [sys.executable, "-S", "-c", f"import time; open({str(started)!r}, 'w'); time.sleep(600)"]

    async def stop_the_watcher() -> list[int]:
        program = Program(command, folder=tmp_path, environment=clean_environment(), output_bytes=9, limits={})
        running = asyncio.create_task(program.run("", 600.0))
        while not started.exists():
            await asyncio.sleep(0.01)
        family = [
            child.pid for child in psutil.Process().children(recursive=True) if started.name in str(child.cmdline())
        ]
        os.kill(family[0], signal.SIGSTOP)
        running.cancel()
        await asyncio.wait({running})
        return family

    family = asyncio.run(stop_the_watcher())
    assert len(family) == 2
    assert all(map(ends, family))


def test_when_we_are_killed_nothing_is_left_either(script: Script, tmp_path: Path) -> None:
    path = script(STUBBORN + "time.sleep(600)")
    ours = f"""
import asyncio, pathlib, sys
from nemorl_agents.programs.program import Program, clean_environment
command = [sys.executable, "-S", {str(path)!r}, {str(tmp_path / "pid")!r}]
folder = pathlib.Path({str(tmp_path)!r})
program = Program(command, folder=folder, environment=clean_environment(), output_bytes=1000, limits={{}})
asyncio.run(program.run("", 600.0))
"""

    async def kill() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", ours)
        pid = await asyncio.to_thread(pid_in, tmp_path / "pid")
        process.kill()
        await process.wait()
        return pid

    pid = asyncio.run(kill())
    assert ends(pid)


def test_a_program_runs_where_a_thousand_files_are_open(program: Programs, script: Script) -> None:
    """Its keeper has a descriptor by the number that it has here, and `select` takes none from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1024:
            opened.append(os.dup(opened[0]))
        agent = program(script("print(ask('x'))"))
        assert play(agent, ScriptedPolicy("42")).reward == 1.0
        agent.close()
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
