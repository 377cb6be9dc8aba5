"""webhook and event_log in real daemons, loaded from `plugin_dir`, under `kill -9`."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forged.client import EARLIEST, ForgedClient
from forged.kernel.messages import Record
from forged.plugins.model import ListPlugins, PluginView, RunPluginCommand
from forged.registry.messages import ModelPolicy
from tests.dropins.webhook_receiver import SECRET, WebhookReceiver, listening
from tests.processes.daemon import DaemonProcess

PLUGINS = Path(__file__).parents[2] / "plugins"
NOTES = 60
DELIVERED_BEFORE_THE_KILL = 20


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    directory = tmp_path / "plugins"
    directory.mkdir(0o755)
    for path in (PLUGINS / "webhook.py", PLUGINS / "event_log.py"):
        copy = directory / path.name
        shutil.copy(path, copy)
        copy.chmod(0o644)
    return directory


class DaemonDirectory:
    """A directory in which daemons are started one after the other."""

    def __init__(self, directory: Path, plugins: Path, url: str, secret: Path) -> None:
        self.directory = directory
        self.log = directory / "events.jsonl"
        self._settings = directory / "all.toml"
        self._settings.write_text(
            f"plugin_dir = {str(plugins)!r}\n"
            f"[plugins.webhook]\nurl = {url!r}\nsecret_file = {str(secret)!r}\nbatch_max = 5\n"
            f"[plugins.event_log]\npath = {str(self.log)!r}\nbytes_max = 4096\nfiles_max = 1000\n"
        )

    def daemon(self) -> DaemonProcess:
        return DaemonProcess(self.directory, "--config", str(self._settings))

    def forgectl(self, *arguments: str) -> Any:
        command = [
            sys.executable,
            "-m",
            "forged.cli.forgectl.main",
            "--socket",
            str(self.directory / "forged.sock"),
            "--json",
        ]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def check(self) -> None:
        """Run `forged check-config`."""
        command = [sys.executable, "-m", "forged.cli.forged", "check-config", str(self._settings)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    @property
    def client(self) -> ForgedClient:
        return ForgedClient(f"unix://{self.directory / 'forged.sock'}")

    def written(self) -> list[int]:
        """The ids in the event log's files, in the order of writing."""
        rotated = sorted(self.directory.glob("events.jsonl.*"), key=lambda one: -int(one.suffix[1:]))
        lines = b"".join(one.read_bytes() for one in (*rotated, self.log)).splitlines()
        return [json.loads(line)["id"] for line in lines]


async def caught_up(client: ForgedClient, plugin: str, last: int) -> None:
    """Wait until a plugin has delivered up to this fact."""
    while (await client.request(RunPluginCommand(plugin, "status")))["position"] < last:
        """It is asked again."""


async def test_kill_9_loses_no_fact_and_duplicates_none_in_the_event_log(
    tmp_path: Path, plugins: Path, secret: Path
) -> None:
    async with listening(WebhookReceiver()) as receiver:
        directory = DaemonDirectory(tmp_path, plugins, receiver.url, secret)
        receiver.judge = lambda body: 503
        with directory.daemon():
            async with directory.client as client:
                await client.create_job("a")
                for number in range(NOTES):
                    await client.note("a", f"{number}")
            await receiver.until(lambda: len(receiver.deliveries) > 0)
        receiver.judge = lambda body: 200
        with directory.daemon():
            await receiver.until(lambda: len(receiver.accepted_ids) >= DELIVERED_BEFORE_THE_KILL)
        with directory.daemon() as daemon:
            async with directory.client as client:
                await client.note("a", "the last one")
                facts = [item async for item in client.past_facts(since=EARLIEST)]
                for plugin in ("webhook", "event_log"):
                    await caught_up(client, plugin, facts[-1].id if isinstance(facts[-1], Record) else 0)
                views = await client.request(ListPlugins())
            assert daemon.end(signal.SIGTERM)[0] == 0
    _check(directory, receiver, [fact.id for fact in facts if isinstance(fact, Record)], views)


def _check(directory: DaemonDirectory, receiver: WebhookReceiver, expected: list[int], views: list[PluginView]) -> None:
    assert all(delivery.signed for delivery in receiver.deliveries)
    assert set(expected) <= set(receiver.accepted_ids)
    first = list(dict.fromkeys(receiver.accepted_ids))
    assert first == sorted(first)
    written = directory.written()
    assert written == sorted(set(written))
    assert set(expected) <= set(written)
    assert {view.name: (view.state, view.failed) for view in views} == {
        "event_log": ("active", 0),
        "webhook": ("active", 0),
    }


async def test_operator_sees_plugin_status_and_runs_commands(tmp_path: Path, plugins: Path, secret: Path) -> None:
    directory = DaemonDirectory(tmp_path, plugins, "http://127.0.0.1:1/hook", secret)
    directory.check()
    with directory.daemon():
        async with directory.client as client:
            await client.create_job("a")
            while not (await client.request(RunPluginCommand("webhook", "status")))["last_error"]:
                """It has not tried yet."""
            await caught_up(client, "event_log", 1)
        [log, webhook] = directory.forgectl("plugins")["plugins"]
        assert (log["state"], log["reason"]) == ("active", None)
        assert webhook["state"] == "active"
        assert "127.0.0.1:1" in webhook["reason"]
        assert directory.forgectl("plugins", "run", "event_log", "rotate")["result"] == {"rotated": True}
        # What is checked is used by a daemon at that moment.
        directory.check()
    assert directory.log.with_name("events.jsonl.1").exists()


async def test_webhook_delivers_the_facts_of_the_model_registry(tmp_path: Path, plugins: Path, secret: Path) -> None:
    async with listening(WebhookReceiver()) as receiver:
        directory = DaemonDirectory(tmp_path, plugins, receiver.url, secret)
        with directory.daemon():
            async with directory.client as client:
                await _release_and_roll_back(client)

            def delivered() -> list[Any]:
                return [fact for one in receiver.deliveries for fact in one.body["facts"] if "Model" in fact["type"]]

            await receiver.until(lambda: bool(delivered()) and delivered()[-1]["type"] == "ModelRolledBack")
    assert all(delivery.signed for delivery in receiver.deliveries)
    rolled_back = delivered()[-1]
    assert (rolled_back["fact"]["version"], rolled_back["fact"]["to"]) == ([1, 1, 0], [1, 0, 0])
    assert rolled_back["fact"]["reason"] == "wrong labels"
    assert {fact["type"] for fact in delivered()} == {
        "ModelRegistered", "ModelPolicyChanged", "ModelTransitioned", "ModelRolledBack",
    }  # fmt: skip


async def _release_and_roll_back(client: ForgedClient) -> None:
    """Two versions go into production, and the second one out of it."""
    for version in ("1.0.0", "1.1.0"):
        await client.register_model("resnet", version=version, checksum=version)
        await client.set_model_policy("resnet", ModelPolicy(requires_validation=False))
        for _ in range(4):
            await client.promote_model("resnet", version)
    await client.roll_back_model("resnet", reason="wrong labels")
