"""What is to be launched: the checks of the command line, the command of a worker, and its environment.

Invariants:
- The environment has what torchrun sets, with the ranks that hold if all hosts start equally many workers. In an
  elastic world ranks and sizes change; the library tells them, the environment does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forged.errors import ConfigError
from forged.launch.restarts import RestartLimits

WORKERS_MAX = 1024
MASTER_PORT = 29500
"""torchrun's, where several hosts must agree on one without asking each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The workers of one host."""

    command: tuple[str, ...]
    """What each worker runs."""
    job: str
    workers: int
    hosts: int = 1
    host_number: int = 0
    group_size: int = 1
    """How many workers live and die together."""
    master_addr: str = ""
    master_port: int = 0
    limits: RestartLimits
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _check("-n", self.workers, 1, WORKERS_MAX)
        _check("--nnodes", self.hosts, 1, WORKERS_MAX)
        _check("--node-rank", self.host_number, 0, self.hosts - 1)
        _check("--group-size", self.group_size, 1, self.workers)
        if self.workers % self.group_size:
            raise ConfigError(
                "option_invalid",
                f"--group-size must divide the {self.workers} workers of a host, got {self.group_size}",
                "choose another -n or --group-size",
            )

    @property
    def groups(self) -> int:
        """How many groups this host has; of single workers as many as workers."""
        return self.workers // self.group_size

    def members(self, group: int) -> range:
        """The local ranks of a group."""
        return range(group * self.group_size, (group + 1) * self.group_size)

    def rank(self, local_rank: int) -> int:
        """The initial rank of a worker."""
        return self.host_number * self.workers + local_rank


def worker_environment(
    plan: LaunchPlan,
    local_rank: int,
    *,
    restarts: int,
    endpoint: str,
    token: str | None,
    group: str,
    given: Mapping[str, str],
) -> dict[str, str]:
    """The environment of a worker on top of `given`; `group` names its group, differently after each restart."""
    rank, world_size = plan.rank(local_rank), plan.hosts * plan.workers
    environment = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": plan.host_number,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": plan.workers,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": plan.hosts,
        "ROLE_NAME": "default",
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": plan.master_port,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": plan.limits.restarts_max,
        "TORCHELASTIC_RUN_ID": plan.job,
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "FORGED_ENDPOINT": endpoint,
        "FORGED_JOB": plan.job,
        # Empty: none, also where the launch itself has inherited one for another daemon.
        "FORGED_TOKEN": token or "",
    }
    if plan.group_size > 1:
        environment |= {
            "FORGED_GROUP": group,
            "FORGED_GROUP_RANK": local_rank % plan.group_size,
            "FORGED_GROUP_SIZE": plan.group_size,
        }
    # The workers of a host share its cores, and would else start a thread for each.
    defaults = {"OMP_NUM_THREADS": "1"} if plan.workers > 1 else {}
    # What a worker prints is to be seen at once.
    return defaults | dict(given) | {"PYTHONUNBUFFERED": "1"} | {key: str(value) for key, value in environment.items()}


def _check(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError("option_invalid", f"{option} must be in [{low}, {high}], got {value}", "see --help")
