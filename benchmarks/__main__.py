"""Runs every benchmark and writes benchmarks/RESULTS.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import hosts

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
)
WITH_HOSTS = ("gone_host",)
"""Those that need network namespaces, and with them root; left out where there are none."""
RESULTS = Path(__file__).parent / "RESULTS.md"
HEADER = """# Results

Written by `make bench`. Every figure stands beside a reference that was measured in the same run, taking turns with
ours; a larger ratio is always better. What was not there to be compared with has no ratio.

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


def main() -> None:
    """Run them one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--quick", action="store_true", help="less work, and nothing is written")
    options = parser.parse_args()
    text = HEADER.format(machine=_machine())
    why = hosts.why_not()
    if why:
        sys.stderr.write(f"without {', '.join(WITH_HOSTS)}: {why}\n")
    for benchmark in (*BENCHMARKS, *(() if why else WITH_HOSTS)):
        command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--json", *(["--quick"] if options.quick else [])]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        figures = json.loads(output)["figures"]
        rows = [_row(benchmark, figure) for figure in figures]
        sys.stdout.writelines(rows)
        text += "".join(rows)
    if not options.quick:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
