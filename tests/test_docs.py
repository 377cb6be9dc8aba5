"""The documentation is correct: examples run, links exist, tables match the code."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from forged import checkpoint
from forged.cli.forgectl import main
from forged.cli.forgectl.parser import understood
from forged.config import Config
from forged.data import ShardCorrupt, ShardStore, Stamp, StoreFailed
from forged.errors import RequestRefused
from forged.plugins import PluginContext
from forged.registry.messages import ModelPolicy
from plugins import event_log, mlflow, tensorboard, wandb_offline, webhook

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLUGINS = ROOT / "docs" / "plugins.md"
BIN = Path(sys.executable).parent
HANGS_S = 300
"""Ends what hangs; a busy machine takes its time."""
STEPS_TRAINED = "steps(100)"
"""Instead of the hundreds of steps of an example, each of which waits for its turn on a busy machine."""
RESUMES = "checkpoints.resume(state)\n    for step in worker.steps"
"""In the training example that resumes from a checkpoint."""


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@contextmanager
def a_daemon(directory: Path, *flags: str) -> Iterator[dict[str, str]]:
    """A daemon started as in the README; yields the environment for its clients."""
    socket = str(directory / "forged.sock")
    command = [str(BIN / "forged"), "run", "--data-dir", str(directory / "data"), "--socket", socket]
    command += ["--listen", "127.0.0.1:0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        try:
            yield os.environ | {"FORGED_SOCKET": socket, "PATH": f"{BIN}:{os.environ['PATH']}"}
        finally:
            process.terminate()


def test_the_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    [example] = [block for block in blocks(ROOT / "README.md", "python") if "asyncio" in block]
    with a_daemon(tmp_path) as environment:
        done = subprocess.run(
            [sys.executable, "-c", example], env=environment, capture_output=True, text=True, timeout=HANGS_S
        )
    assert done.returncode == 0, done.stderr
    assert "JobCreated" in done.stdout
    assert "warm-up is over" in done.stdout


def events_of_training(example: str, directory: Path) -> str:
    """Run a training example with a daemon; returns the recorded events."""
    commands = ["jobs create run stability_window_ms=0", "events --since 0 --job run --json"]
    with a_daemon(directory) as environment:
        endpoint = f"unix://{environment['FORGED_SOCKET']}"
        script = example.replace("tcp://127.0.0.1:7433", endpoint).replace("time.sleep(0.1)", "time.sleep(0)")
        script = re.sub(r"steps\(\d{3,}\)", STEPS_TRAINED, script)
        training = [sys.executable, "-c", script]
        for command in (["forgectl", *commands[0].split()], training, ["forgectl", *commands[1].split()]):
            done = subprocess.run(
                command, cwd=directory, env=environment, capture_output=True, text=True, timeout=HANGS_S
            )
            assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("page", "joins"),
    [
        *(
            (page, "forged.join")
            for page in ("README.md", *(f"docs/{page}.md" for page in ("elastic", "data", "checkpoint", "memory")))
        ),
        ("docs/slots.md", RESUMES),
        ("docs/elastic.md", "ElasticWorker"),
        ("docs/elastic.md", "standstill"),
        ("docs/elastic.md", "world_over"),
        ("docs/elastic.md", "step.commit()"),
        ("docs/elastic.md", "begin_step"),
        ("docs/elastic.md", '["part"]'),
        ("docs/checkpoint.md", RESUMES),
    ],
)
def test_training_example_of_a_page_trains(page: str, joins: str, tmp_path: Path) -> None:
    others = {"drain", "JobEnded", "standstill", "world_over", "begin_step", '["part"]', RESUMES} - {joins}
    others |= set() if joins in ("step.commit()", '["part"]') else {"step.commit()"}
    examples = [block for block in blocks(ROOT / page, "python") if joins in block]
    [example] = [block for block in examples if not any(other in block for other in others)]
    assert "JobCompleted" in events_of_training(example, tmp_path)


def test_drained_worker_of_an_example_has_saved_its_state(tmp_path: Path) -> None:
    [example] = [block for block in blocks(ROOT / "docs" / "elastic.md", "python") if "drain" in block]
    told = events_of_training(example, tmp_path)
    assert "WorkerLeft" in told
    assert "the host is taken away" in told
    [saved] = (tmp_path / "checkpoints").glob("*.metadata.json")
    prefix = saved.name.removesuffix(".metadata.json")
    steps = int(prefix.rpartition("-")[2])
    assert steps > 20
    assert checkpoint.load(saved.with_name(prefix))["w"].tolist() == [steps] * 8


def test_aborted_worker_of_an_example_has_saved_its_state(tmp_path: Path) -> None:
    [example] = [block for block in blocks(ROOT / "docs" / "elastic.md", "python") if "JobEnded" in block]
    with a_daemon(tmp_path) as environment:

        def ctl(line: str) -> str:
            done = subprocess.run(["forgectl", *line.split()], env=environment, capture_output=True, timeout=HANGS_S)
            return done.stdout.decode()

        ctl("jobs create run stability_window_ms=0")
        script = example.replace("tcp://127.0.0.1:7433", f"unix://{environment['FORGED_SOCKET']}")
        follow = ["forgectl", "events", "--follow", "--since", "0", "--type", "RescaleCompleted"]
        with (
            subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE) as worker,
            subprocess.Popen(follow, env=environment, stdout=subprocess.PIPE) as followed,
        ):
            assert followed.stdout is not None
            assert b"RescaleCompleted" in followed.stdout.readline()
            followed.terminate()
            ctl("jobs abort run --reason enough")
            assert b"the job was aborted: enough" in worker.communicate(timeout=HANGS_S)[1]
    [saved] = (tmp_path / "checkpoints").glob("*.metadata.json")
    prefix = saved.name.removesuffix(".metadata.json")
    assert checkpoint.load(saved.with_name(prefix))["w"].tolist() == [int(prefix.rpartition("-")[2])] * 8


def test_plans_of_the_data_page_are_valid() -> None:
    [example] = [block for block in blocks(ROOT / "docs" / "data.md", "python") if "DataRedistributionPlan(" in block]
    named: dict[str, Any] = {}
    exec(example, named)
    assert [len(named[plan].for_worker(named["c"])) for plan in ("second", "own")] == [2, 2]


def test_shard_store_of_the_data_page_passes_the_contract() -> None:
    [example] = [block for block in blocks(ROOT / "docs" / "data.md", "python") if "ShardStore" in block]
    named: dict[str, Any] = {}
    exec(example, named)
    store: ShardStore = named["DictStore"]()
    stamp = store.put(7, [b"by", b"tes"])
    assert store.held() == {7: stamp} == {7: Stamp.of(b"bytes")}
    with store.open(7) as opened:
        assert (os.pread(opened.fd, 9, 0), opened.stamp, opened.has_changed()) == (b"bytes", stamp, False)
    with store.receive(8, stamp) as arriving:
        with pytest.raises(StoreFailed):
            store.receive(8, stamp)
        arriving.write(b"wrong")
        with pytest.raises(ShardCorrupt):
            arriving.commit()
    late = store.receive(8, None)
    late.close()
    store.put(8, [b"another's"])
    with pytest.raises(StoreFailed):
        late.commit()
    store.drop(7)
    assert list(store.held()) == [8]
    with pytest.raises(RequestRefused):
        store.open(7)


def test_examples_of_the_catalogue_print_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "catalog.md"
    named: dict[str, Any] = {}
    for example in blocks(page, "python"):
        exec(example, named)
    printed = capsys.readouterr().out
    outputs = re.findall(
        r"^```\n(.*?)^```", re.sub(r"^```python\n.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M | re.S
    )
    assert len(outputs) == 2
    assert all(output in printed for output in outputs)


def test_commands_of_the_catalogue_page_run(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        checkpoint.save(tmp_path / "checkpoints" / f"step-{step}", {"step": step}, step=step)
    [shell] = blocks(ROOT / "docs" / "catalog.md", "sh")
    with a_daemon(tmp_path) as environment:

        def output_of(command: str) -> str:
            done = subprocess.run(shlex.split(command), env=environment, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}: {done.stderr}"
            return done.stdout

        for command in shell.splitlines():
            output_of(command)
        kept = json.loads(output_of("forgectl ckpt ls --job run --json"))["checkpoints"]
    assert [meta["step"] for meta in kept] == [400, 300, 100]


def run_in(directory: Path, environment: dict[str, str], command: list[str]) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def test_examples_of_the_traces_page_print_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "memory-traces.md"
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first, served, _, pictures = blocks(page, "python")
    for example, of in ((first, names), (served, {})):
        exec(example, of)
        assert f"```\n{capsys.readouterr().out}```" in page.read_text()
    exec(pictures, names)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_examples_of_the_registry_page_run_one_after_the_other(tmp_path: Path) -> None:
    page = ROOT / "docs" / "registry.md"
    imports, *examples = [block for block in blocks(page, "python") if "BlockingClient" in block]
    [printed] = re.findall(r"^```\n(resnet .*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    with a_daemon(tmp_path) as environment:
        assert run_in(tmp_path, environment, [sys.executable, "-c", imports]) == printed
        for example in examples:
            client = f"from forged.client import BlockingClient\n{example}"
            run_in(tmp_path, environment, [sys.executable, "-c", client])


def test_commands_of_the_registry_page_bring_its_example_into_production(tmp_path: Path) -> None:
    page = ROOT / "docs" / "registry.md"
    first, [shell] = blocks(page, "python")[0], blocks(page, "sh")
    with a_daemon(tmp_path) as environment:
        run_in(tmp_path, environment, [sys.executable, "-c", first])
        for command in shell.splitlines():
            run_in(tmp_path, environment, shlex.split(command))
        shown = run_in(tmp_path, environment, ["forgectl", "models", "show", "resnet@serving", "--json"])
    assert json.loads(shown)["metadata"]["state"] == "production"
    assert (tmp_path / "resnet-0.1.0.safetensors").exists()


def test_registry_in_memory_of_the_page_runs() -> None:
    [example] = [block for block in blocks(ROOT / "docs" / "registry.md", "python") if "ModelRegistry" in block]
    exec(example, {})


def test_pool_in_memory_of_the_page_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "memory.md"
    [example] = [block for block in blocks(page, "python") if "MemoryPool" in block]
    exec(example, {"__name__": "example"})
    assert capsys.readouterr().out in page.read_text()


def test_policy_keys_of_the_registry_page_match_the_code() -> None:
    _, section = (ROOT / "docs" / "registry.md").read_text().split("| key of the policy |")
    rows = re.findall(r"^\| `(\w+)` \| `?([\w. ]+)`? \|", section.split("\n\n")[0], re.MULTILINE)
    assert [name for name, _ in rows] == list(ModelPolicy.__struct_fields__)
    policy = ModelPolicy()
    assert policy.evidence_max_age_s == float(dict(rows)["evidence_max_age_s"].split()[0]) * 86_400
    assert (dict(rows)["canary"], float(dict(rows)["rollback_threshold"])) == (policy.canary, policy.rollback_threshold)


def test_model_of_the_readme_is_registered(tmp_path: Path) -> None:
    saves, registers = (
        next(block for block in blocks(ROOT / "README.md", "python") if text in block)
        for text in ("forged.checkpoint.save(", "register_model(")
    )
    with a_daemon(tmp_path) as environment:
        run_in(tmp_path, environment, [sys.executable, "-c", saves])
        assert run_in(tmp_path, environment, [sys.executable, "-c", registers]) == "0.1.0\n"


@pytest.mark.parametrize("page", ["README.md", "docs/checkpoint.md"])
def test_checkpoint_of_the_short_example_is_loaded_by_the_layout_example(page: str, tmp_path: Path) -> None:
    [saves] = [block for block in blocks(ROOT / page, "python") if "forged.checkpoint.save(" in block]
    [reads] = blocks(ROOT / "docs" / "checkpoint-format.md", "python")
    for example in (saves, reads):
        done = subprocess.run(
            [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == "model/w float32 (1000, 8)\n"


@pytest.mark.parametrize(
    ("page", "folder", "steps"), [("README.md", "run-7", 2000), ("docs/checkpoint.md", "checkpoints", 2200)]
)
def test_example_that_resumes_continues_from_its_newest_checkpoint(
    page: str, folder: str, steps: int, tmp_path: Path
) -> None:
    [example] = [block for block in blocks(ROOT / page, "python") if ".resume(" in block and "join" not in block]
    script = f"{example}\nassert (state['w'] == {steps}).all()"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S
        )
        assert done.returncode == 0, done.stderr
    found = checkpoint.latest(tmp_path / folder)
    assert found is not None
    assert found.step == (steps - 1) // 500 * 500


def test_the_forgectl_examples_of_the_readme_run(tmp_path: Path) -> None:
    shell = "".join(blocks(ROOT / "README.md", "sh"))
    commands = [line for line in shell.splitlines() if line.startswith("forgectl") and "--follow" not in line]
    assert len(commands) >= 6
    with a_daemon(tmp_path) as environment:
        for command in commands:
            done = subprocess.run(shlex.split(command), env=environment, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.fixture
def welcome(tmp_path: Path) -> Path:
    """A directory with the example of the page on plugins in it."""
    directory = tmp_path / "plugins"
    directory.mkdir(0o755)
    example = blocks(PLUGINS, "python")[0]
    assert len([line for line in example.splitlines() if line]) < 10
    (directory / "welcome.py").write_text(example)
    (directory / "welcome.py").chmod(0o644)
    return directory


def test_ten_line_plugin_works_as_described(welcome: Path, tmp_path: Path) -> None:
    commands = [shlex.split(line) for line in blocks(PLUGINS, "sh")[0].splitlines()]
    assert commands[1][:2] == ["forgectl", "events"]
    with a_daemon(tmp_path, "--plugin-dir", str(welcome)) as environment:
        subprocess.run(commands[0], env=environment, check=True, capture_output=True)
        following = [*commands[1], "--follow", "--since", "0", "--json"]
        with subprocess.Popen(following, env=environment, stdout=subprocess.PIPE) as follower:
            assert follower.stdout is not None
            greeting = json.loads(follower.stdout.readline())
            follower.terminate()
        shown = subprocess.run([*commands[2], "--json"], env=environment, check=True, capture_output=True)
    assert greeting["fact"]["text"] == "welcome, resnet"
    assert greeting["origin"] == "plugin welcome"
    assert json.loads(shown.stdout)["state"] == "active"


def test_test_of_the_ten_line_plugin_passes(welcome: Path) -> None:
    test = blocks(PLUGINS, "python")[1] + "\ntest_a_new_job_is_welcomed()\n"
    done = subprocess.run([sys.executable, "-c", test], cwd=welcome, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_receiver_example_tells_valid_from_invalid_signatures() -> None:
    names: dict[str, Any] = {}
    exec(blocks(PLUGINS, "python")[2], names)
    now, is_from_forged = int(time.time()), names["is_from_forged"]
    signature = webhook.sign(b"key", now, b"body")
    assert is_from_forged(b"key", signature, b"body")
    assert not is_from_forged(b"another", signature, b"body")
    assert not is_from_forged(b"key", signature, b"another")
    assert not is_from_forged(b"key", webhook.sign(b"key", now - 3600, b"body"), b"body")


@pytest.mark.parametrize(
    "plugin", [webhook, event_log, tensorboard, mlflow, wandb_offline], ids=lambda plugin: plugin.__name__
)
def test_documented_plugin_settings_match_the_code(plugin: ModuleType) -> None:
    _, section = PLUGINS.read_text().split(f"## `{plugin.__name__.rpartition('.')[2]}`")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|([^|]*)\|", section.split("\n## ")[0], re.MULTILINE)
    told = {name: default.strip().strip("`") for names, default in rows for name in re.findall(r"\w+", names)}
    settings = {field.name: field for field in msgspec.structs.fields(plugin.Settings)}
    assert told.keys() == settings.keys()
    for name, field in settings.items():
        if not field.required and isinstance(field.default, (int, float)):
            assert json.loads(told[name]) == field.default


def test_every_member_of_plugin_context_is_documented() -> None:
    told = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", PLUGINS.read_text()))
    given = {name for name in dir(PluginContext) if not name.startswith("_")} - {"close"}
    assert given <= told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


# The tokens of mermaid's sequence diagrams that are words; a participant of such a name breaks the diagram.
MERMAID_WORDS = {
    *("loop", "alt", "else", "opt", "par", "par_over", "and", "end", "critical", "option", "break", "rect", "box"),
    *("participant", "actor", "create", "destroy", "as", "note", "over", "activate", "deactivate"),
    *("link", "links", "properties", "details", "title", "autonumber", "off"),
}
MERMAID_DIAGRAMS = [
    pytest.param(diagram, id=f"{page.name}-{number}")
    for page in PAGES
    for number, diagram in enumerate(blocks(page, "mermaid"), 1)
]


@pytest.mark.parametrize("diagram", MERMAID_DIAGRAMS)
def test_no_participant_of_a_diagram_is_a_mermaid_keyword(diagram: str) -> None:
    names = re.findall(r"^ *(?:participant|actor) (\S+)", diagram, re.MULTILINE)
    assert MERMAID_WORDS.isdisjoint(map(str.lower, names))


@pytest.mark.parametrize("diagram", MERMAID_DIAGRAMS)
def test_messages_of_a_diagram_are_between_declared_participants(diagram: str) -> None:
    declared = set(re.findall(r"^ *participant (\w+)", diagram, re.MULTILINE))
    messages = re.findall(r"^ *(\w+) *--?>>[+-]?(\w+):", diagram, re.MULTILINE)
    assert bool(messages) == diagram.startswith("sequenceDiagram")
    assert {name for pair in messages for name in pair} <= declared


@pytest.mark.parametrize("diagram", MERMAID_DIAGRAMS)
def test_texts_of_a_diagram_are_free_of_signs_that_end_a_statement(diagram: str) -> None:
    assert not set("#;") & set(diagram)


def named_in(page: str, pattern: str) -> list[str]:
    return sorted(set(re.findall(pattern, (ROOT / page).read_text())))


@pytest.mark.parametrize("name", named_in("docs/glossary.md", r"`(forged\.[\w.]+)`"))
def test_the_glossary_names_modules_and_types_that_exist(name: str) -> None:
    pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_a_page_names_paths_that_exist(page: Path) -> None:
    path = r"`((?:tests|forged|benchmarks|docs|config|plugins|systemd|examples)/[\w./*-]+)`"
    assert [name for name in re.findall(path, page.read_text()) if not list(ROOT.glob(name))] == []


@pytest.mark.parametrize("name", named_in("ARCHITECTURE.md", r"`((?:[a-z_]+/)+[a-z_]+\.py)`"))
def test_the_architecture_names_modules_that_exist(name: str) -> None:
    assert any((ROOT / "forged").rglob(name)) or (ROOT / name).exists()


def words_in_code() -> set[str]:
    sources = [path.read_text() for path in (ROOT / "forged").rglob("*.py")]
    modules = [path.name for path in (ROOT / "forged").rglob("*.py")]
    return {*modules, *(word for source in sources for word in re.findall(r"\w+", source))}


def named_in_the_architecture() -> list[str]:
    """The modules, functions and classes that the text and the diagrams of ARCHITECTURE.md name."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    text = "\n".join([*re.findall(r"`([^`\n]+)`", page), *blocks(ROOT / "ARCHITECTURE.md", "mermaid")])
    identifier = r"\b(?:_?[a-z]+_\w+|[A-Z][a-z]+[A-Z]\w+)\b"
    return sorted({*re.findall(r"\b\w+\.py\b", page), *re.findall(rf"(?<![\w./]){identifier}(?![./]\w)", text)})


def test_the_architecture_names_modules_functions_and_classes_that_exist() -> None:
    named = named_in_the_architecture()
    assert len(named) > 100
    assert sorted(set(named) - words_in_code()) == []


def test_the_table_of_settings_names_every_setting() -> None:
    named = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert [setting.name for setting in fields(Config)] == [name for name in named if name in Config.__slots__]


@pytest.mark.parametrize("target", ["demo", "test", "check", "bench", "soak"])
def test_documented_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def commands_written_about() -> list[str]:
    """Every `forgectl ...` in the pages, and in the texts of the code that tell people what to do."""
    blocks_of_shell = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    sources = [page.read_text() for page in (*PAGES, *(ROOT / "forged").rglob("*.py"), *ROOT.glob("*/README.md"))]
    quoted = [text for source in sources for text in re.findall(r"`(forgectl [^`\n]+)`", source)]
    return sorted({*quoted, *(line for line in blocks_of_shell if line.startswith("forgectl "))})


def spelt_out(command: str) -> list[str]:
    """The arguments of a command as somebody would type them: optional ones given, names put in."""
    plain = re.sub(r"[\[\]]|\.\.\.", "", command)
    put_in = {
        "ROLE": "viewer",
        "role": "viewer",
        "S": "60",
        "ID": "7",
        "STATE": "staging",
        "state": "staging",
        "SIZE": "1GiB",
    }
    return [put_in.get(word.strip("{}"), word) for word in shlex.split(re.sub(r"\{[^}]*bound[^}]*\}", "", plain))[1:]]


def test_documents_mention_commands() -> None:
    assert len(commands_written_about()) >= 10


@pytest.mark.parametrize("command", commands_written_about())
def test_every_documented_command_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = spelt_out(command)
    # Where a text names a command without its arguments, it is the command that has to exist.
    try:
        assert understood(words, main._parsed)
    except SystemExit:
        error = capsys.readouterr().err
        assert "the following arguments are required" in error, f"{command}: {error}"
        assert "COMMAND" not in error.splitlines()[-1], f"{command}: {error}"


@pytest.mark.parametrize("package", ["catalog", "checkpoint", "data", "elastic", "memory", "registry"])
def test_each_public_class_has_a_docstring(package: str) -> None:
    module = import_module(f"forged.{package}")
    classes = [found for name in module.__all__ if isinstance(found := getattr(module, name), type)]
    assert classes
    assert [found for found in classes if not vars(found).get("__doc__")] == []
