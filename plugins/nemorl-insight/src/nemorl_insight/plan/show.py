"""A plan for people: tables in the terminal."""

from __future__ import annotations

import typer
from nemorl.plugins import registry
from nemorl_cli.terminal import print_table, say
from nemorl_rl.planning.memory.budgets import budgets
from nemorl_rl.planning.memory.layouts import MODE, keeps_learning
from nemorl_rl.planning.memory.parts import GIB, count, total
from nemorl_rl.planning.memory.scene import Scene

from nemorl_insight.plan.candidates import Candidate
from nemorl_insight.plan.plan import Plan, words


def show(plan: Plan, *, top: int, explain: bool) -> None:
    """Print a plan: what was assumed, memory, seconds, the verdict, and the best layouts."""
    scene, now = plan.scene, plan.now
    g, work, device = scene.policy.geometry, scene.work, scene.fleet.device
    counted = "" if g.is_exact else " (counted as if built like Llama)"
    backend = registry().name_of("training_backends", type(scene.policy.policy.backend))
    say(
        f"{g.model_type or 'model'} of {count(g.parameters())} parameters{counted}, {backend}, on "
        f"{scene.fleet.nodes} x {scene.fleet.per_node} {device.name} ({device.memory_gib:.1f} GiB, "
        f"{device.speed.bfloat16:g} TFLOP/s)"
    )
    say(
        f"{work.sequences} sequences a step, {work.prompt_tokens:.0f} + {work.response_tokens:.0f} tokens each, "
        f"the longest response {work.longest_response:.0f} (--prompt-tokens, --response-tokens, --longest-response)"
    )
    say()
    _memory(scene, now, explain)
    say()
    _phases(scene)
    say()
    _seconds(now, explain)
    say()
    colour = typer.colors.GREEN if now.fits else typer.colors.RED
    say(plan.verdict, lead=typer.style("memory ", fg=colour))
    say()
    _ranked(plan, top)


def _memory(scene: Scene, one: Candidate, explain: bool) -> None:
    rows = [(part.name, f"{part.gib:.2f}", part.formula) for part in one.memory.parts]
    rows.append(
        ("all", f"{one.memory.needed / GIB:.2f}", f"of {one.memory.capacity / GIB:.2f}, at: {one.memory.moment}")
    )
    columns = ("MEMORY OF THE FULLEST DEVICE", "GIB", "FORMULA")
    kept = 3 if explain else 2
    print_table(columns[:kept], [row[:kept] for row in rows], numbers=("GIB",))
    if on_host := sum(model.moments.moved.on_host for model in scene.models):
        node = on_host * scene.fleet.per_node
        say(f"in the host's memory: {on_host / GIB:.2f} GiB a device, {node / GIB:.1f} GiB a node (backend.offload)")


def _phases(scene: Scene) -> None:
    """Who is in memory in each phase; a tenant without a figure is asleep."""
    found = budgets(scene).values()
    tenants = list(dict.fromkeys(name for budget in found for name in budget.held))
    rows = []
    for budget in found:
        sizes = [total(budget.held.get(name, ())) / GIB for name in tenants]
        held = [f"{size:.2f}" if size else "-" for size in sizes]
        rows.append((str(budget.phase), *held, f"{total(budget.work) / GIB:.2f}", f"{budget.free / GIB:.2f}"))
    columns = ("GIB IN EACH PHASE", *(name.upper() for name in tenants), "WORK", "FREE")
    print_table(columns, rows, numbers=columns[1:])
    say("models take turns: who is not at work is asleep" if scene.takes_turns else "all models stay in memory")


def _seconds(one: Candidate, explain: bool) -> None:
    rows = [(phase.name, f"{phase.seconds:.3g}", phase.bound, phase.formula) for phase in one.time.phases]
    overlap = "sampling beside training" if one.time.is_async else "one after the other"
    rows.append(("step", f"{one.time.seconds:.3g}", f"{one.time.tokens_per_device:,.0f} tokens/s per device", overlap))
    columns = ("PHASE", "SECONDS", "BOUND BY", "FORMULA")
    kept = 4 if explain else 3
    print_table(columns[:kept], [row[:kept] for row in rows], numbers=("SECONDS",))
    say(f"training reaches {one.time.mfu:.0%} of the devices' peak (MFU: what its tokens need, forward and backward)")


def _ranked(plan: Plan, top: int) -> None:
    rows = []
    for place, one in enumerate(plan.shown(top), 1):
        verdict = f"{one.memory.free / GIB:.1f} free" if one.fits else f"{-one.memory.free / GIB:.1f} too much"
        changes = " ".join(words(plan.scene, one)) or "as it is"
        rows.append((str(place), f"{one.time.seconds:.3g}", f"{one.time.tokens_per_device:,.0f}", verdict, changes))
    columns = ("BEST", "SECONDS", "TOKENS/S/DEVICE", "GIB", "CHANGES")
    print_table(columns, rows, numbers=("BEST", "SECONDS", "TOKENS/S/DEVICE"), whole=("GIB",))
    say(f"{len(plan.ranked)} layouts judged; rewards and validation are not counted")
    if any(not keeps_learning(plan.scene, one.choice) for one in plan.shown(top)) and MODE not in plan.allowed:
        say(f"a layout that changes {MODE} changes what is learnt: --write takes one with --allow {MODE} only")
