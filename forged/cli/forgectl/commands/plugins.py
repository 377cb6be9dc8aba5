"""`forgectl plugins`: the daemon's plugins."""

from __future__ import annotations

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options, Parser, positional, verb, verbs_of
from forged.cli.forgectl.values import settings
from forged.cli.process import EXIT_OK
from forged.errors import RequestRefused
from forged.plain_client.connection import PlainConnection

COLUMNS = ("name", "version", "state", "handled", "failed", "published", "origin", "reason")
ACTIVE = "active"


def fill(plugins: Parser) -> None:
    """Add the verbs."""
    verbs = verbs_of(plugins, _list)
    verb(verbs, "ls", _list, "list plugins", aliases=["list"])
    positional(verb(verbs, "show", _show, "show a plugin with its parts and commands"), "plugin", "PLUGIN")
    positional(verb(verbs, "enable", _enable, "enable a plugin, also after a quarantine"), "plugin", "PLUGIN")
    positional(verb(verbs, "disable", _disable, "disable a plugin"), "plugin", "PLUGIN")
    use = verb(verbs, "run", _run, "run a command of a plugin")
    positional(use, "plugin", "PLUGIN")
    positional(use, "command", "COMMAND")
    positional(use, "settings", "KEY=VALUE", nargs="*")


def listed(daemon: PlainConnection) -> list[Row]:
    """All plugins."""
    return answers.several(daemon, "ListPlugins", field="plugins", key="name")


def commands_of(plugin: Row) -> list[Row]:
    """The commands of a plugin; an older daemon sends only their names."""
    commands = plugin.get("commands")
    if not isinstance(commands, list):
        return []
    return [one if isinstance(one, dict) else {"name": one} for one in commands]


def inactive(daemon: PlainConnection) -> Row:
    """The status line of plugins that are not active; empty if all are."""
    try:
        plugins = listed(daemon)
    except RequestRefused:
        return {}  # an old daemon without plugins, or a role that may not see them
    idle = [f"{one.get('name')} ({one.get('state')})" for one in plugins if one.get("state", ACTIVE) != ACTIVE]
    return {"inactive plugins": ", ".join(idle)} if idle else {}


def _list(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        plugins = listed(daemon)
        answer(options, {"plugins": plugins}, lambda: tables.table(plugins, COLUMNS, "no plugins"))
    return EXIT_OK


def _show(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        plugins = listed(daemon)
    found = next((one for one in plugins if one.get("name") == options.plugin), None)
    if found is None:
        raise RequestRefused("plugin_unknown", f"unknown plugin {options.plugin!r}", "see `forgectl plugins`")
    answer(options, found, lambda: _print_plugin(found))
    return EXIT_OK


def _print_plugin(plugin: Row) -> None:
    tables.pairs({key: value for key, value in plugin.items() if key != "commands"})
    if commands := commands_of(plugin):
        print()
        tables.table(commands, _columns(commands), "")


def _columns(commands: list[Row]) -> list[str]:
    return [key for key in ("name", "arguments", "help") if any(one.get(key) for one in commands)]


def _enable(options: Options) -> int:
    return _switch(options, "EnablePlugin", "enabled")


def _disable(options: Options) -> int:
    return _switch(options, "DisablePlugin", "disabled")


def _switch(options: Options, method: str, done: str) -> int:
    with DaemonConnection(options) as daemon:
        reply = answers.one(daemon, method, plugin=options.plugin)
        answer(options, reply, lambda: print(f"{done} {options.plugin}"))
    return EXIT_OK


def _run(options: Options) -> int:
    arguments = settings(options.settings)
    with DaemonConnection(options) as daemon:
        fields = {"plugin": options.plugin, "command": options.command, "arguments": arguments}
        result = daemon.request("RunPluginCommand", **fields)
        answer(options, {"result": result}, lambda: tables.anything(result))
    return EXIT_OK
