"""The site's policy: who may do what, and what nobody can talk it out of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from nemorl.base.packages.plugin_policy import machine_policy
from nemorl.config import load_config
from nemorl.errors import ConfigError, UsageError
from nemorl.plugins import Index
from nemorl_trust import site_policy
from nemorl_trust.audit.recording import audit_folder, audit_log
from nemorl_trust.audit.verifying import entries_of
from nemorl_trust.site import require
from nemorl_trust.site_check import refuse
from nemorl_trust.site_policy import Person, links_out_of, names_of_path, read_site_policy, refusal
from recorded_messages import Raises

Policy = Callable[..., Path]
ALICE = Person("alice", frozenset({"research", "users"}))
BOB = Person("bob", frozenset({"students", "users"}))
TEAM = """
contact: ml-platform@example.org
rules:
  - name: students stay local
    groups: [students]
    deny: {clusters: ["*"], install: ["*"]}
  - name: engines of research
    groups: [research]
    allow: {engines: [hf, vllm, "https://*.example.org:*"]}
  - name: no personal data
    deny: {datasets: ["/data/pii/*", "org/pii-*"]}
  - name: eve
    users: [eve]
    deny: {models: ["*"]}
"""


def read(folder: Path, text: str) -> site_policy.SitePolicy:
    (folder / "policy.yaml").write_text(text)
    return read_site_policy(folder / "policy.yaml", owners=None)


# Deciding


@pytest.mark.parametrize(
    ("person", "kind", "name", "rule"),
    [
        (BOB, "clusters", "private", "students stay local"),
        (ALICE, "clusters", "private", None),  # nobody allows clusters: they are free
        (ALICE, "engines", "vllm", None),
        (ALICE, "engines", "megatron", "'engines of research'"),  # some rule allows engines: others are not
        (BOB, "engines", "vllm", "'engines of research'"),  # it is not his rule
        (ALICE, "engines", "https://node7.example.org:8000", None),
        (ALICE, "engines", "http://node7.example.org:8000", "'engines of research'"),
        (ALICE, "datasets", "/data/pii/a/b.jsonl", "no personal data"),
        (ALICE, "datasets", "/data/pii", "no personal data"),  # all of what is in it
        (ALICE, "datasets", "/data/pii2/a.jsonl", None),
        (BOB, "datasets", "org/pii-names", "no personal data"),
        (BOB, "models", "any", None),
        (Person("eve", frozenset()), "models", "any", "eve"),
    ],
)
def test_a_denial_wins_and_what_some_rule_allows_is_closed_to_others(
    tmp_path: Path, person: Person, kind: str, name: str, rule: str | None
) -> None:
    found = read(tmp_path, TEAM).refusal(kind, name, person=person)
    assert (None if found is None else found.rule) == rule


def test_a_refusal_says_who_what_which_rule_and_whom_to_ask(tmp_path: Path) -> None:
    found = read(tmp_path, TEAM).refusal("clusters", "private", person=BOB)
    assert found is not None
    assert found.message == (
        f"bob may not use the cluster 'private': rule 'students stay local' in {tmp_path / 'policy.yaml'} denies it"
    )
    assert found.fix == "ask ml-platform@example.org"


def test_a_denial_wins_over_a_permission_in_any_order(tmp_path: Path) -> None:
    allow, deny = "{name: a, allow: {models: ['*']}}", "{name: b, deny: {models: [x]}}"
    for rules in ([allow, deny], [deny, allow]):
        found = read(tmp_path, f"rules: [{', '.join(rules)}]").refusal("models", "x", person=BOB)
        assert found is not None


# Files that cannot be used


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rule: []", "has no key 'rule'. Did you mean"),
        ("rules: {}", "rules is a list"),
        ("rules: [{name: x}]", "rule 'x' neither allows nor denies"),
        ("rules: [{deny: {dataset: ['*']}}]", "has no key 'dataset'"),
        ("rules: [{deny: {datasets: '*'}}]", "datasets in deny of rule 'number 1' is a list of texts"),
        ("rules: [{user: [bob], deny: {datasets: ['*']}}]", "has no key 'user'"),
        ("rules: [{users: bob, deny: {datasets: ['*']}}]", "users of rule 'number 1' is a list"),
        ("contact: [a]", "contact is a text"),
        ("audit: logs", "audit is the path of a folder, from the root on"),
        ("rules: [", "policy.yaml"),
        ("- a", "the file is a mapping"),
    ],
)
def test_a_file_that_cannot_be_understood_admits_nothing(tmp_path: Path, text: str, said: str) -> None:
    policy = read(tmp_path, text)
    for kind in site_policy.KINDS:
        found = policy.refusal(kind, "x", person=ALICE)
        assert found is not None
        assert said in found.message


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_can_write_admits_nothing(tmp_path: Path, mode: int) -> None:
    read(tmp_path, TEAM)
    (tmp_path / "policy.yaml").chmod(mode)
    policy = read_site_policy(tmp_path / "policy.yaml", owners=None)
    assert "may write" in str(policy.trouble)
    assert policy.refusal("models", "x", person=ALICE) is not None


def test_a_folder_in_which_others_can_put_another_file_admits_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    read(folder, TEAM)
    folder.chmod(0o777)
    assert f"may write {folder}" in str(read_site_policy(folder / "policy.yaml", owners=None).trouble)


def test_a_link_to_a_file_of_somebody_else_admits_nothing(tmp_path: Path) -> None:
    read(tmp_path, TEAM)
    (tmp_path / "link.yaml").symlink_to(tmp_path / "policy.yaml")
    found = read_site_policy(tmp_path / "link.yaml", owners=frozenset({os.getuid() + 1}))
    assert "belongs to the user" in str(found.trouble)


def test_a_file_that_is_named_and_missing_admits_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy("{}").unlink()
    site_policy.site_policies.cache_clear()
    assert refusal("models", "x") is not None


def test_a_file_that_may_be_hidden_admits_nothing(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal("models", "x") is None, "there is none"
    (tmp_path / "round").symlink_to(
        tmp_path / "round"
    )  # as a folder that one may not enter: what is in it is not known
    monkeypatch.setattr(site_policy, "SITE_FILE", tmp_path / "round" / "policy.yaml")
    site_policy.site_policies.cache_clear()
    found = refusal("models", "x")
    assert found is not None
    assert "cannot be used" in found.message


# What a user may try


def test_the_variable_adds_to_the_file_of_the_machine_and_takes_nothing_back(policy: Policy) -> None:
    policy("rules: [{deny: {models: [secret]}}]", etc=True)
    policy("rules: [{allow: {models: ['*']}}]")
    assert refusal("models", "secret") is not None
    assert refusal("models", "other") is None
    policy("rules: [{deny: {models: [other]}}]")
    assert refusal("models", "secret") is not None
    assert refusal("models", "other") is not None


def test_names_of_users_and_groups_are_the_systems(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    me = Person.me()
    policy(f"rules: [{{users: [{me.name}], deny: {{models: ['*']}}}}]")
    for name in ("USER", "LOGNAME", "SUDO_USER"):
        monkeypatch.setenv(name, "alice")
    assert refusal("models", "x") is not None
    assert me.groups, "there is at least one"


def test_a_link_to_a_denied_file_is_denied_and_one_in_an_allowed_folder_allows_nothing(
    tmp_path: Path, policy: Policy
) -> None:
    secret, public = tmp_path / "pii", tmp_path / "public"
    for folder in (secret, public):
        folder.mkdir()
    (secret / "rows.jsonl").write_text("")
    (public / "rows.jsonl").symlink_to(secret / "rows.jsonl")
    policy(f"rules: [{{deny: {{datasets: ['{secret}/*']}}}}]")
    assert refusal("datasets", *names_of_path(str(public / "rows.jsonl"))) is not None
    assert refusal("datasets", *names_of_path(f"{public}/../pii/rows.jsonl")) is not None
    policy(f"rules: [{{allow: {{datasets: ['{public}/*']}}}}]")
    assert refusal("datasets", *names_of_path(str(public / "rows.jsonl"))) is not None
    (public / "own.jsonl").write_text("")
    assert refusal("datasets", *names_of_path(str(public / "own.jsonl"))) is None


def test_a_plugin_that_is_denied_is_not_loaded_whatever_the_run_says(policy: Policy, raises: Raises) -> None:
    policy("contact: the owner\nrules: [{name: no math, deny: {plugins: [nemorl-math-env]}}]")
    assert not machine_policy().admits("nemorl_math_env")
    assert machine_policy().admits("nemorl-cli"), "the toolkits are part of nemorl"
    stopped = {entry.distribution for entry in Index.installed().entries if entry.status == "blocked"}
    assert stopped == {"nemorl-math-env"}


SFT = {"algorithm": "sft", "model": "org/model", "data": {"name": "huggingface", "path": "org/pii-names"}}


def problems(**changes: Any) -> list[str]:
    try:
        refuse(load_config({**SFT, **changes}))
    except ConfigError as error:
        return [f"{problem.path}: {problem.message}" for problem in error.problems]
    return []


def test_a_run_is_asked_about_model_data_engine_and_cluster(policy: Policy) -> None:
    assert problems() == []
    policy(
        "rules: [{name: all, deny: {models: [org/*], datasets: [org/pii-*], engines: [dtensor], clusters: [local]}}]"
    )
    found = problems()
    assert {text.partition(":")[0] for text in found} == {"policy.model_name", "cluster", "policy.backend", "data.path"}
    assert all("rule 'all'" in text for text in found)


def test_addresses_of_servers_are_engines(policy: Policy) -> None:
    policy("rules: [{allow: {engines: [server, dtensor, 'https://ok:*']}}]")
    run = {"algorithm": "grpo", "data": "arithmetic", "environment": "math"}
    for url, count in (("https://ok:8000", 0), ("https://other:8000", 1)):
        assert len(problems(**run, generation={"backend": {"name": "server", "urls": [url]}})) == count


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("https://node7.example.org:8000", True),
        ("https://NODE7.Example.org:8000", True),
        ("https://node7.example.org.:8000/v1", True),
        ("https://evil.test:8000/x.example.org:8000", False),
        ("https://evil.test:443/.example.org:", False),
        ("https://node7.example.org.evil.test:8000", False),
    ],
)
def test_an_address_is_allowed_by_its_host_and_not_by_what_follows(policy: Policy, url: str, is_allowed: bool) -> None:
    policy("rules: [{allow: {engines: [server, dtensor, 'https://*.example.org:*']}}]")
    run = {"algorithm": "grpo", "data": "arithmetic", "environment": "math"}
    found = problems(**run, generation={"backend": {"name": "server", "urls": [url]}})
    assert (found == []) is is_allowed


@pytest.mark.parametrize("url", ["https://BAD", "https://bad.", "https://bad:443/v1", "HTTPS://Bad:8000"])
def test_another_spelling_leads_round_no_denial_of_a_host(policy: Policy, url: str) -> None:
    policy("rules: [{deny: {engines: ['https://bad:*'], clusters: ['bad:*']}}]")
    run = {"algorithm": "grpo", "data": "arithmetic", "environment": "math"}
    assert len(problems(**run, generation={"backend": {"name": "server", "urls": [url]}})) == 1
    address = {"address": url.partition("://")[2].partition("/")[0], "security": {"plaintext": True}}
    assert len(problems(**run, cluster=address)) == 1


def test_judges_and_their_like_are_engines(policy: Policy, raises: Raises) -> None:
    judge = {"name": "judge", "url": "https://elsewhere.test/v1", "model": "m", "rubric": "see https://paper.test"}
    run = {"algorithm": "grpo", "data": "arithmetic", "environment": judge}
    policy("rules: [{deny: {engines: ['https://elsewhere.test:*', '*paper*']}}]")
    assert len(problems(**run)) == 1, "of the rubric no rule is asked"
    policy("rules: [{deny: {unlock: [plaintext]}}]")
    plain = {**judge, "url": "http://elsewhere.test/v1", "plaintext": True}
    assert [*map(len, (problems(**run), problems(**{**run, "environment": plain})))] == [0, 1]
    with raises(ConfigError, path="environment.url"):
        load_config({**run, "model": "org/model", "environment": {**plain, "plaintext": False}})


def test_names_on_the_hub_and_files_that_are_elsewhere_are_denied_in_any_spelling(policy: Policy) -> None:
    policy("rules: [{deny: {models: [org/secret-*], datasets: [/data/pii/*]}}]")
    assert refusal("models", *names_of_path("Org/Secret-7B")) is not None
    for spelling in ("/data/open/../pii/a.jsonl", "/data//pii/a.jsonl", "/data/./pii/a.jsonl", "/DATA/pii/a.jsonl"):
        assert refusal("datasets", *names_of_path(spelling)) is not None


RL = {"algorithm": "grpo", "data": "arithmetic", "environment": "math"}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"policy": {"tokenizer": {"name": "secret/t"}}}, "policy.tokenizer.name"),
        ({"environment": {"name": "reward_model", "model": "secret/rm"}}, "environment.model"),
        ({"environment": {"name": "judge", "url": "https://ok", "model": "secret/j"}}, "environment.model"),
        ({"environment": {"name": "retriever", "corpus": "secret/wiki"}}, "environment.corpus"),
        ({"generation": {"backend": {"name": "vllm", "engine_args": {"tokenizer": "secret/t"}}}},
         "generation.backend.engine_args.tokenizer"),
        *(({"generation": {"backend": {"name": "vllm", "engine_args": {key: value}}}},
           f"generation.backend.engine_args.{key}{below}") for key, value, below in [
            ("scheduler_cls", "secret/x", ""), ("tool_parser_plugin", "secret/x.py", ""),
            ("logits_processors", ["secret/x"], ".0"), ("default_mm_loras", {"image": "secret/l"}, ".image"),
            ("kv_transfer_config", {"kv_connector_module_path": "secret/x"}, ".kv_connector_module_path"),
        ]),
        ({"algorithm": "opd", "teachers": {"t": {"model": "secret/t"}}}, "teachers.t.model"),
        ({"algorithm": "ppo", "critic": {"model_name": "secret/c"}}, "critic.model_name"),
        ({"policy": {"hf_config_overrides": {"auto_map": {"AutoModel": "secret/code--modeling.M"}}}},
         "policy.hf_config_overrides.auto_map.AutoModel"),
        ({"data": {"name": "gsm8k", "path": "secret/gsm8k"}}, "data.path"),
        ({"validation": {"data": {"name": "huggingface", "path": "secret/v"}}}, "validation.data.path"),
        ({"environment": {"name": "weighted", "parts": {"a": {"environment": {
            "name": "reward_model", "model": "secret/rm"}, "weight": 1}}}}, "environment.parts.a.environment.model"),
    ],
)  # fmt: skip
def test_what_is_named_by_any_key_is_asked_about(policy: Policy, changes: dict[str, Any], path: str) -> None:
    policy("rules: [{name: closed, deny: {models: ['secret/*'], datasets: ['secret/*'], code: ['secret/*']}}]")
    found = problems(**{**RL, **changes})
    assert [text.partition(":")[0] for text in found] == [path]


def test_a_dataset_under_a_name_of_ours_is_denied_by_the_repository_that_it_is_read_from(policy: Policy) -> None:
    policy("rules: [{deny: {datasets: [openai/gsm8k]}}]")
    assert len(problems(**{**RL, "data": "gsm8k"})) == 1
    policy("rules: [{deny: {datasets: [gsm8k]}}]")
    assert len(problems(**{**RL, "data": "GSM8K"})) == 1


@pytest.mark.parametrize("word", ["x" * 5_000, "x/" * 5_000, "~nobody-here/x"])
def test_a_word_that_can_be_no_path_is_asked_about_as_it_is(policy: Policy, word: str) -> None:
    policy(f"rules: [{{deny: {{code: ['{word[:4]}*'], models: [secret/*]}}}}]")
    agent = {"name": "agent", "command": ["python", word], "reward": "exact_match"}
    assert len(problems(**{**RL, "environment": agent})) == 1


def test_a_folder_of_links_is_what_the_links_lead_to(tmp_path: Path, policy: Policy) -> None:
    hidden, shown = tmp_path / "hidden", tmp_path / "shown"
    (shown / "deep").mkdir(parents=True)
    hidden.mkdir()
    (hidden / "model.safetensors").write_text("x")
    (shown / "config.json").write_text("{}")
    (shown / "deep" / "model.safetensors").symlink_to(hidden / "model.safetensors")
    for rule in (f"deny: {{models: ['{hidden}/*']}}", f"allow: {{models: ['{shown}/*']}}"):
        policy(f"rules: [{{{rule}}}]")
        assert len(problems(**RL, model=str(shown))) == 1
    policy(f"rules: [{{allow: {{models: ['{tmp_path}/*']}}}}]")
    assert problems(**RL, model=str(shown)) == []


def test_links_are_followed_through_the_folders_that_they_lead_to(
    tmp_path: Path, policy: Policy, raises: Raises
) -> None:
    hidden, between, shown = (tmp_path / name for name in ("hidden", "between", "shown"))
    for folder in (hidden, between, shown):
        folder.mkdir()
    (hidden / "rows.jsonl").write_text("{}")
    (between / "rows.jsonl").symlink_to(hidden / "rows.jsonl")
    (between / "back").symlink_to(shown)
    (shown / "part").symlink_to(between)
    policy(f"rules: [{{deny: {{models: ['{hidden}/*']}}}}]")
    assert len(problems(**RL, model=str(shown))) == 1
    with raises(UsageError):
        [*links_out_of(tmp_path / "nowhere")]


def test_files_that_a_run_reads_besides_are_denied_as_data_are(tmp_path: Path, policy: Policy) -> None:
    agent = {"name": "agent", "command": ["cat"], "reward": "exact_match", "copy_in": [str(tmp_path)]}
    policy(f"rules: [{{deny: {{datasets: ['{tmp_path}']}}}}]")
    assert len(problems(**{**RL, "environment": agent})) == 1
    policy("rules: [{allow: {datasets: [arithmetic]}}]")
    assert problems(**{**RL, "environment": agent}) == [], "what is no dataset needs no leave"


@pytest.mark.parametrize(
    ("url", "denied"),
    [
        ("https://denied。example", "https://denied.example:*"), ("https://ｄｅｎｉｅｄ.example", "https://denied.example:*"),
        ("https://DENIED.example.:443/v1", "https://denied.example:443"),
        ("https://[::1]", "https://localhost:*"), ("https://127.0.0.1", "https://localhost:*"),
        ("https://localhost", "https://127.0.0.1:*"), ("https://2130706433", "https://127.0.0.1:*"),
        ("https://0x7f.1", "https://127.0.0.1:*"), ("https://[::ffff:10.0.0.7]", "https://10.0.0.7:*"),
        ("https://167772167", "https://10.0.0.7:*"),
    ],
)  # fmt: skip
def test_a_host_is_denied_however_it_is_written(policy: Policy, url: str, denied: str) -> None:
    policy(f"rules: [{{deny: {{engines: ['{denied}']}}}}]")
    assert len(problems(**RL, generation={"backend": {"name": "server", "urls": [url]}})) == 1
    judge = {"name": "judge", "url": f"{url}/x", "model": "m"}
    assert len(problems(**{**RL, "environment": judge})) == 1


@pytest.mark.parametrize(
    "address", ["node9", "node9.", "node9.:6379", "NODE9:6379", "ray://node9:6379", "ray://node9.:6379"]
)
@pytest.mark.parametrize("denied", ["node9", "node9:6379"])
def test_a_cluster_is_denied_however_its_address_is_written(policy: Policy, address: str, denied: str) -> None:
    policy(f"rules: [{{deny: {{clusters: ['{denied}']}}}}]")
    cluster = {"address": address, "security": {"plaintext": True}}
    assert len(problems(**RL, cluster=cluster)) == 1


@pytest.mark.parametrize(
    ("cluster", "path"),
    [
        ({"runtime_env": {"pip": ["Acme_Env==1.0"]}}, "cluster.runtime_env.pip"),
        ({"runtime_env": {"uv": {"packages": ["acme-env"]}}}, "cluster.runtime_env.uv"),
        ({"runtime_env": {"conda": {"dependencies": ["python", {"pip": ["acme.env"]}]}}}, "cluster.runtime_env.conda"),
        ({"runtime_env": {"py_modules": ["/evil"]}}, "cluster.runtime_env.py_modules"),
        ({"runtime_env": {"working_dir": "/evil"}}, "cluster.runtime_env.working_dir"),
        ({"runtime_env": {"mpi": {"worker_entry": "/evil"}}}, "cluster.runtime_env.mpi"),
        ({"runtime_env": {"plugin_of_theirs": ["/evil"]}}, "cluster.runtime_env.plugin_of_theirs"),
        ({"env_vars": {"PYTHONPATH": "/good:/evil"}}, "cluster.env_vars.PYTHONPATH"),
        ({"env_vars": {"LD_PRELOAD": "/evil"}}, "cluster.env_vars.LD_PRELOAD"),
        ({"env_vars": {"HF_ENDPOINT": "https://evil.test"}}, "cluster.env_vars.HF_ENDPOINT"),
    ],
)
def test_code_and_packages_that_workers_get_are_asked_about(policy: Policy, cluster: dict[str, Any], path: str) -> None:
    policy("rules: [{deny: {install: [acme-env], code: [/evil], engines: ['https://evil.test:*']}}]")
    found = problems(**RL, cluster={"launcher": "ray", **cluster})
    assert [text.partition(":")[0] for text in found] == [path]


def test_where_plugins_have_to_be_signed_other_code_in_their_place_needs_leave(policy: Policy, tmp_path: Path) -> None:
    brought = {"launcher": "ray", "env_vars": {"PYTHONPATH": str(tmp_path)}, "runtime_env": {"pip": ["acme"]}}
    signed = "signed_plugins: {keys: [/etc/k], sets: [/etc/s]}"
    policy(signed)
    found = [text for text in problems(**RL, cluster=brought) if text.startswith("cluster.")]
    assert len(found) == 2
    assert all("signed plugins" in text for text in found)
    policy(f"{signed}\nrules: [{{allow: {{code: ['{tmp_path}'], install: [acme]}}}}]")
    assert not [text for text in problems(**RL, cluster=brought) if text.startswith("cluster.")]


def test_a_server_that_joins_a_run_later_is_asked_about(tmp_path: Path, policy: Policy, nemorl: Command) -> None:
    policy("rules: [{deny: {engines: ['https://bad:*'], unlock: [plaintext]}}]")
    for options in (["https://BAD:8000"], ["http://good:8000", "--plaintext"]):
        done = nemorl("engines", "add", tmp_path, *options)
        assert done.code == 2
        assert "may not" in done.err


def test_parts_inside_parts_are_asked_about(policy: Policy) -> None:
    policy("rules: [{deny: {datasets: [org/pii-*]}}]")
    parts = [{"data": "arithmetic", "weight": 1}, {"data": SFT["data"], "weight": 1}]
    assert len(problems(data={"name": "mixture", "parts": parts})) == 1


def test_a_user_config_cannot_block_the_check(policy: Policy) -> None:
    policy("rules: [{deny: {datasets: ['*']}}]")
    names = {"nemorl-cli", "nemorl-ops", "nemorl-core"}
    config = load_config({**SFT, "plugins": {"block": sorted(names)}})
    assert "nemorl-trust:site" in config.registry.index.launch_checks


# Commands


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("generate", "hello", "--model", "org/model"), "models"),
        (("generate", "hello", "--model", "org/model", "--backend", "hf"), "engines"),
        (("plugins", "install", "acme-env"), "install"),
        (("plugins", "install", "Acme_Env==1.0", "--isolated"), "install"),
        (("serve", "org/model"), "models"),
        (("eval", "--model", "org/model", "--data", "arithmetic", "environment=math"), "datasets"),
        (("eval", "--model", "org/model", "--data", "arithmetic", "environment=math"), "models"),
    ],
)
def test_commands_are_refused_and_the_audit_log_says_so(
    tmp_path: Path, policy: Policy, nemorl: Command, monkeypatch: pytest.MonkeyPatch, arguments: Any, kind: str
) -> None:
    monkeypatch.setenv("NEMORL_AUDIT", str(tmp_path / "audit"))
    policy(f"contact: ml@example.org\nrules: [{{name: closed, deny: {{{kind}: ['*']}}}}]")
    done = nemorl(*arguments)
    assert done.code == 2
    assert "rule 'closed'" in done.err
    assert "ask ml@example.org" in done.err
    log = audit_log()
    assert log is not None
    assert [(e.event, e.facts["kind"]) for e in entries_of(log.path) if e.event == "denied"] == [("denied", kind)]


def test_launching_is_refused(tmp_path: Path, policy: Policy, nemorl: Command) -> None:
    policy("rules: [{name: closed, deny: {clusters: [slurm]}}]")
    (tmp_path / "run.yaml").write_text("algorithm: sft\nmodel: org/model\ndata: arithmetic\n")
    done = nemorl("launch", tmp_path / "run.yaml", "--on", "slurm", "--dry-run")
    assert done.code == 2
    assert "use the cluster 'slurm'" in done.err


# The audit log that a site demands


def test_a_log_that_the_site_demands_cannot_be_moved_or_switched_off(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    policy(f"audit: {tmp_path / 'logs'}", etc=True)
    for value in ("off", str(tmp_path / "elsewhere")):
        monkeypatch.setenv("NEMORL_AUDIT", value)
        assert audit_folder() == tmp_path / "logs"
    assert problems() == []
    for file in (tmp_path / "logs").glob("*"):
        file.unlink()
    (tmp_path / "logs").rmdir()
    (tmp_path / "logs").write_text("a file in its place")
    assert "the site demands an audit log" in problems()[0]


def test_a_permission_is_required(policy: Policy, raises: Raises) -> None:
    require("models", "x")
    policy("contact: ml@example.org\nrules: [{name: closed, deny: {models: [x]}}]")
    with raises(UsageError, "closed", "ml@example.org", varies=r"\S+(?= may not)"):
        require("models", "x")
