"""The diagram of a version's states in docs/registry.md: `python -m tests.registry.state_diagram` draws it anew."""

from __future__ import annotations

import re
from pathlib import Path

from forged.registry import TRANSITIONS, DeploymentState

PAGE = Path(__file__).parents[2] / "docs" / "registry.md"
_DIAGRAM = re.compile(r"(?<=^```mermaid\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
_WHY = {
    (DeploymentState.VALIDATING, DeploymentState.REGISTERED): "failure",
    (DeploymentState.STAGING, DeploymentState.REGISTERED): "failure",
    (DeploymentState.CANARY, DeploymentState.STAGING): "rollback",
}


def diagram() -> str:
    """The table of transitions as a mermaid diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {DeploymentState.REGISTERED}"]
    for state in DeploymentState:
        following = [one for one in DeploymentState if one in TRANSITIONS[state]]
        lines += [f"    {state} --> {one}{_label(state, one)}" for one in sorted(following, key=_order, reverse=True)]
    lines += [f"    {state} --> [*]" for state in DeploymentState if not TRANSITIONS[state]]
    return "".join(f"{line}\n" for line in lines)


def _label(state: DeploymentState, following: DeploymentState) -> str:
    why = _WHY.get((state, following))
    return f" : {why}" if why else ""


def _order(state: DeploymentState) -> int:
    return list(DeploymentState).index(state)


def drawn() -> str:
    """The diagram that the page has."""
    found = _DIAGRAM.search(PAGE.read_text())
    assert found is not None, f"{PAGE} has no diagram"
    return found[0]


if __name__ == "__main__":
    PAGE.write_text(_DIAGRAM.sub(diagram(), PAGE.read_text(), count=1))
