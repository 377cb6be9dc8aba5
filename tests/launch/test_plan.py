"""What is launched: checks and environments."""

from __future__ import annotations

from typing import Any

import pytest

from forged.errors import ConfigError
from forged.launch.plan import WORKERS_MAX, LaunchPlan, worker_environment
from forged.launch.restarts import RestartLimits


def plan(**options: Any) -> LaunchPlan:
    given: dict[str, Any] = {"command": ("train",), "job": "llm", "workers": 4, "limits": RestartLimits()}
    return LaunchPlan(**given | options)


def environment(plan: LaunchPlan, local_rank: int, **options: Any) -> dict[str, str]:
    given: dict[str, Any] = {"restarts": 0, "endpoint": "unix:///s", "token": None, "group": "g", "given": {}}
    return worker_environment(plan, local_rank, **given | options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, f"-n must be in [1, {WORKERS_MAX}], got 0"),
        ({"workers": WORKERS_MAX + 1}, f"-n must be in [1, {WORKERS_MAX}], got {WORKERS_MAX + 1}"),
        ({"hosts": 0}, "--nnodes must be in"),
        ({"hosts": 2, "host_number": 2}, "--node-rank must be in [0, 1], got 2"),
        ({"group_size": 8}, "--group-size must be in [1, 4], got 8"),
        ({"group_size": 3}, "--group-size must divide the 4 workers of a host, got 3"),
    ],
)
def test_impossible_plan_is_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(**options)
    assert said in str(raised.value)


def test_worker_of_the_second_host_has_the_variables_of_torchrun() -> None:
    found = environment(
        plan(hosts=3, host_number=1, master_addr="a", master_port=7), 2, restarts=5, token="t", given={"PATH": "/bin"}
    )
    assert found == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "RANK": "6",
        "LOCAL_RANK": "2",
        "ROLE_RANK": "6",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "ROLE_WORLD_SIZE": "12",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "7",
        "TORCHELASTIC_RESTART_COUNT": "5",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "llm",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "FORGED_ENDPOINT": "unix:///s",
        "FORGED_JOB": "llm",
        "FORGED_TOKEN": "t",
    }


def test_variables_of_the_user_are_kept_where_the_launch_has_only_a_default() -> None:
    found = environment(plan(), 0, given={"OMP_NUM_THREADS": "6", "RANK": "99"})
    assert (found["OMP_NUM_THREADS"], found["RANK"]) == ("6", "0")


def test_token_for_another_daemon_is_not_passed_on() -> None:
    assert environment(plan(), 0, given={"FORGED_TOKEN": "another"})["FORGED_TOKEN"] == ""


def test_single_worker_may_use_all_cores() -> None:
    assert "OMP_NUM_THREADS" not in environment(plan(workers=1), 0)


def test_members_of_a_group_have_its_name_and_their_ranks_in_it() -> None:
    groups = plan(group_size=2)
    assert [list(groups.members(group)) for group in range(groups.groups)] == [[0, 1], [2, 3]]
    found = environment(groups, 3, group="host-1")
    assert (found["FORGED_GROUP"], found["FORGED_GROUP_RANK"], found["FORGED_GROUP_SIZE"]) == ("host-1", "1", "2")
    assert "FORGED_GROUP" not in environment(plan(), 3)
