"""`forgectl plugins`: what was plugged into the daemon, and how it fares.

Law: a plugin is named by its name alone, and what it answers is shown as it comes. A daemon that knows nothing of
plugins has none that are in trouble.
"""

from __future__ import annotations

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import Connection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options, Parser, positional, verb, verbs_of
from forged.cli.forgectl.values import settings
from forged.cli.process import EXIT_OK
from forged.errors import RequestRefused
from forged.plain_client.connection import Wire

COLUMNS = ("name", "version", "state", "handled", "failed", "published", "origin", "reason")
ACTIVE = "active"


def fill(plugins: Parser) -> None:
    """What can be done with plugins."""
    verbs = verbs_of(plugins, _list)
    verb(verbs, "ls", _list, "all plugins", aliases=["list"])
    positional(verb(verbs, "show", _show, "one plugin, with its parts and commands"), "plugin", "PLUGIN")
    positional(verb(verbs, "enable", _enable, "let it work, also after a quarantine"), "plugin", "PLUGIN")
    positional(verb(verbs, "disable", _disable, "let it work no more"), "plugin", "PLUGIN")
    use = verb(verbs, "run", _run, "have it do one of its commands")
    positional(use, "plugin", "PLUGIN")
    positional(use, "command", "COMMAND")
    positional(use, "settings", "KEY=VALUE", nargs="*")


def listed(wire: Wire) -> list[Row]:
    """Every plugin."""
    return answers.several(wire, "ListPlugins", field="plugins", key="name")


def commands_of(plugin: Row) -> list[Row]:
    """What it can be told to do; a list of names will do."""
    commands = plugin.get("commands")
    if not isinstance(commands, list):
        return []
    return [one if isinstance(one, dict) else {"name": one} for one in commands]


def inactive(wire: Wire) -> Row:
    """A line for the status about those that do not work; none when all do."""
    try:
        plugins = listed(wire)
    except RequestRefused:
        return {}  # it has none, or they are not ours to see
    idle = [f"{one.get('name')} ({one.get('state')})" for one in plugins if one.get("state", ACTIVE) != ACTIVE]
    return {"inactive plugins": ", ".join(idle)} if idle else {}


def _list(options: Options) -> int:
    with Connection(options) as wire:
        plugins = listed(wire)
        answer(options, {"plugins": plugins}, lambda: tables.table(plugins, COLUMNS, "no plugins"))
    return EXIT_OK


def _show(options: Options) -> int:
    with Connection(options) as wire:
        plugins = listed(wire)
    found = next((one for one in plugins if one.get("name") == options.plugin), None)
    if found is None:
        raise RequestRefused("plugin_unknown", f"there is no plugin {options.plugin!r}", "see `forgectl plugins`")
    answer(options, found, lambda: _show_whole(found))
    return EXIT_OK


def _show_whole(plugin: Row) -> None:
    tables.pairs({key: value for key, value in plugin.items() if key != "commands"})
    if commands := commands_of(plugin):
        print()
        tables.table(commands, _shown(commands), "")


def _shown(commands: list[Row]) -> list[str]:
    return [key for key in ("name", "arguments", "help") if any(one.get(key) for one in commands)]


def _enable(options: Options) -> int:
    return _switch(options, "EnablePlugin", "is enabled")


def _disable(options: Options) -> int:
    return _switch(options, "DisablePlugin", "is disabled")


def _switch(options: Options, method: str, done: str) -> int:
    with Connection(options) as wire:
        said = answers.one(wire, method, plugin=options.plugin)
        answer(options, said, lambda: print(f"{options.plugin} {done}"))
    return EXIT_OK


def _run(options: Options) -> int:
    arguments = settings(options.settings)
    with Connection(options) as wire:
        fields = {"plugin": options.plugin, "command": options.command, "arguments": arguments}
        result = wire.request("RunPluginCommand", **fields)
        answer(options, {"result": result}, lambda: tables.anything(result))
    return EXIT_OK
