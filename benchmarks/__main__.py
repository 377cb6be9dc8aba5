"""Run all benchmarks, or the named ones, and write their rows into benchmarks/RESULTS.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import hosts, torch_training

BENCHMARKS = (
    "bus",
    "rpc",
    "bulk",
    "store",
    "footprint",
    "rank_stability",
    "recovery",
    "join",
    "scale",
    "plan",
    "movement",
    "sampler",
    "transfer",
    "ckpt_save",
    "ckpt_stall",
    "ckpt_load",
    "ckpt_reshard",
    "ckpt_small",
    "incremental",
    "catalog",
    "catalog_daemon",
    "registry",
    "memory_service",
    "packing",
    "slots",
    "restore_estimate",
    "pool",
    "eviction",
)
WITH_HOSTS = ("gone_host",)
"""Benchmarks that need network namespaces and so root; left out on machines without them."""
WITH_TORCH = ("torch_recovery", "torch_overhead", "torch_join", "torch_state", "torch_ckpt")
"""Benchmarks of `forged.torch`, which need the environment that `make bench-torch` makes; left out without it."""
ALL = (*BENCHMARKS, *WITH_TORCH, *WITH_HOSTS)
RESULTS = Path(__file__).parent / "RESULTS.md"
HEADER = """# Results

Written by `make bench`, or by `python -m benchmarks NAME`. Every figure stands beside a reference that was measured in
the same run, in turns with forged; a larger ratio is always better. A figure without a reference has no ratio.

Machine: {machine}.

| benchmark | figure | unit | ours | reference | ratio | aim | |
|---|---|---|---:|---:|---:|---:|---|
"""


def _machine() -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _row(benchmark: str, figure: dict[str, Any]) -> str:
    met = {True: "met", False: "**missed**", None: ""}[figure["met"]]
    numbers = (_number(figure[key]) for key in ("ours", "reference", "ratio", "aim"))
    return f"| `{benchmark}` | {figure['name']} | {figure['unit']} | {' | '.join(numbers)} | {met} |\n"


def _measured(benchmark: str, *, quick: bool) -> list[str]:
    """Run one benchmark in a process of its own; returns its rows."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--json", *(["--quick"] if quick else [])]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [_row(benchmark, figure) for figure in json.loads(output)["figures"]]


def replaced(page: str, header: str, rows: dict[str, list[str]]) -> str:
    """The page with the rows of these benchmarks replaced, in the order of `ALL`."""
    kept = {name: [line for line in page.splitlines(keepends=True) if line.startswith(f"| `{name}` |")] for name in ALL}
    return header + "".join(line for name in ALL for line in rows.get(name, kept[name]))


def main() -> None:
    """Run the benchmarks one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--quick", action="store_true", help="less work; results are not written")
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"only these, of {', '.join(ALL)}")
    options = parser.parse_args()
    if unknown := [name for name in options.only if name not in ALL]:
        parser.error(f"unknown benchmark {unknown[0]!r}; known: {', '.join(ALL)}")
    skipped: set[str] = set()
    for names, why in ((WITH_TORCH, torch_training.why_not()), (WITH_HOSTS, hosts.why_not())):
        if why:
            sys.stderr.write(f"skipped {', '.join(names)}: {why}\n")
            skipped.update(names)
    rows: dict[str, list[str]] = {}
    for name in ALL:
        if name in (options.only or ALL) and name not in skipped:
            rows[name] = _measured(name, quick=options.quick)
            sys.stdout.writelines(rows[name])
            sys.stdout.flush()
    if not options.quick:
        RESULTS.write_text(replaced(RESULTS.read_text(), HEADER.format(machine=_machine()), rows))


if __name__ == "__main__":
    main()
