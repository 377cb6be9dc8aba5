"""Train `train.py` twice, once undisturbed and once under kills, and draw both losses as an SVG.

python examples/torch_tutorial/compare.py [--steps 400] [--workers 4] [--picture loss.svg]
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")
LAUNCH = [sys.executable, "-m", "forged.cli.forged", "launch"]
STEP = re.compile(r"\[(\d+)\]: step (\d+) loss (\S+) workers (\d+)")
PROCESS = re.compile(r"\[(\d+)\]: process (\d+)")


@dataclass
class Training:
    """What a launch has printed."""

    losses: dict[int, float] = field(default_factory=dict)
    workers: dict[int, int] = field(default_factory=dict)
    kills: dict[int, str] = field(default_factory=dict)
    """By step, what was killed."""


def train(options: argparse.Namespace, kills: Mapping[int, str]) -> Training:
    """Train once; `kills` says at which steps rank 0, or another worker, is killed."""
    training, pids = Training(), dict[str, int]()
    due = dict(kills)
    with tempfile.TemporaryDirectory() as folder:
        script = [str(TRAIN), "--steps", str(options.steps), "--checkpoints", folder]
        command = [*LAUNCH, "-n", str(options.workers), "--max-restarts", "10", *script]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launch:  # noqa: S603
            assert launch.stdout is not None
            for line in launch.stdout:
                if process := PROCESS.match(line):
                    pids[process[1]] = int(process[2])
                elif found := STEP.match(line):
                    rank_0, step = found[1], int(found[2])
                    training.losses[step], training.workers[step] = float(found[3]), int(found[4])
                    has_enough = training.workers[step] >= max(2, options.workers - 1)
                    if has_enough and due and step >= min(due):
                        victim = due.pop(min(due))
                        number = rank_0 if victim == "rank 0" else next(one for one in pids if one != rank_0)
                        os.kill(pids.pop(number), signal.SIGKILL)
                        training.kills[step] = victim
    if launch.returncode != 0:
        sys.exit(f"the launch ended with exit code {launch.returncode}; its messages are above")
    return training


WIDTH, HEIGHT, LEFT, TOP, BELOW = 860, 300, 60, 40, 70


def picture(plain: Training, killed: Training, steps: int) -> str:
    """Both losses, the marks of the kills, and below them the number of workers."""
    highest = max(plain.losses.values())
    most = max(killed.workers.values())

    def x(step: float) -> float:
        return LEFT + WIDTH * step / steps

    def curve(values: Mapping[int, float], top: float, height: float, most: float, style: str) -> str:
        points = " ".join(f"{x(step):.1f},{top + height * (1 - value / most):.1f}" for step, value in values.items())
        return f'<polyline fill="none" {style} points="{points}"/>'

    bottom, floor = TOP + HEIGHT, TOP + HEIGHT + 30 + BELOW
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {floor + 45}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{LEFT} {TOP}V{bottom}H{LEFT + WIDTH}M{LEFT} {bottom + 30}V{floor}H{LEFT + WIDTH}" '
        'fill="none" stroke="#444"/>',
    ]
    for step, victim in killed.kills.items():
        color = "#c62828" if victim == "rank 0" else "#ef6c00"
        drawn.append(f'<path d="M{x(step):.1f} {TOP}V{floor}" stroke="{color}" stroke-dasharray="4 3"/>')
        drawn.append(f'<text x="{x(step):.1f}" y="{TOP - 6}" text-anchor="middle" fill="{color}">{victim}</text>')
    drawn += [
        curve(plain.losses, TOP, HEIGHT, highest, 'stroke="#bbdefb" stroke-width="7"'),
        curve(killed.losses, TOP, HEIGHT, highest, 'stroke="#0d47a1" stroke-width="1.5"'),
        curve(killed.workers, bottom + 30, BELOW, most, 'stroke="#2e7d32" stroke-width="2"'),
    ]
    for value in range(int(highest) + 1):
        drawn.append(
            f'<text x="{LEFT - 8}" y="{bottom - HEIGHT * value / highest + 4:.1f}" text-anchor="end">{value}</text>'
        )
    for value in (0, most):
        drawn.append(
            f'<text x="{LEFT - 8}" y="{floor - BELOW * value / most + 4:.1f}" text-anchor="end">{value}</text>'
        )
    for step in range(0, steps + 1, max(1, steps // 6)):
        drawn.append(f'<text x="{x(step):.1f}" y="{floor + 18}" text-anchor="middle">{step}</text>')
    legend = [("#bbdefb", 7, "loss, undisturbed"), ("#0d47a1", 1.5, "loss, with kills"), ("#2e7d32", 2, "workers")]
    for row, (color, width, name) in enumerate(legend):
        y, start = TOP + 20 + 20 * row, LEFT + WIDTH - 190
        drawn.append(f'<path d="M{start} {y}h30" stroke="{color}" stroke-width="{width}"/>')
        drawn.append(f'<text x="{start + 40}" y="{y + 4}">{name}</text>')
    drawn.append(f'<text x="{LEFT + WIDTH / 2}" y="{floor + 38}" text-anchor="middle">step</text></svg>')
    return "\n".join(drawn) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--picture", type=Path, default=Path("loss.svg"))
    options = parser.parse_args()
    kills = {options.steps * part // 6: "rank 0" if part % 2 == 0 else "a worker" for part in (1, 2, 3, 4)}
    plain, killed = train(options, {}), train(options, kills)
    assert plain.losses.keys() == killed.losses.keys() == set(range(options.steps))
    furthest = max(abs(plain.losses[step] - killed.losses[step]) for step in plain.losses)
    options.picture.write_text(picture(plain, killed, options.steps))
    print(f"{options.steps} steps, {len(killed.kills)} kills: the losses differ by at most {furthest:.1e}")


if __name__ == "__main__":
    main()
