from __future__ import annotations

from pathlib import Path

import pytest

from forged.paths import ROOT_DATA_DIR, ROOT_SOCKET, client_endpoints, client_socket, default_data_dir, default_socket

USER = 1000
HOME = {"HOME": "/home/me"}
RUNTIME = HOME | {"XDG_RUNTIME_DIR": "/run/user/1000"}


class TestTheDaemonsPlaces:
    @pytest.mark.parametrize("uid", [0, USER])
    def test_are_the_directories_that_systemd_made_for_it(self, uid: int) -> None:
        environment = HOME | {"STATE_DIRECTORY": "/var/lib/a", "RUNTIME_DIRECTORY": "/run/a"}
        assert default_data_dir(environment, uid) == "/var/lib/a"
        assert default_socket(environment, uid) == "/run/a/forged.sock"

    def test_are_the_first_where_there_are_several(self) -> None:
        environment = {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "RUNTIME_DIRECTORY": "/run/a/:/run/b"}
        assert (default_data_dir(environment, 0), default_socket(environment, 0)) == (
            "/var/lib/a",
            "/run/a/forged.sock",
        )

    def test_are_the_users_where_systemd_says_nothing(self) -> None:
        for empty in ({}, {"STATE_DIRECTORY": "", "RUNTIME_DIRECTORY": ""}):
            assert default_data_dir(HOME | empty, USER) == "/home/me/.local/state/forged"
            assert default_socket(HOME | empty, USER) == "/home/me/.local/state/forged/forged.sock"
            assert (default_data_dir(empty, 0), default_socket(empty, 0)) == (ROOT_DATA_DIR, ROOT_SOCKET)

    def test_are_together_where_there_is_no_run_time_directory(self) -> None:
        assert default_socket(HOME | {"STATE_DIRECTORY": "/var/lib/a"}, USER) == "/var/lib/a/forged.sock"

    def test_forged_socket_variable_has_precedence(self) -> None:
        assert default_socket({"FORGED_SOCKET": "/f", "RUNTIME_DIRECTORY": "/run/a"}, 0) == "/f"


class TestAClient:
    @pytest.mark.parametrize(
        ("environment", "uid", "there", "found"),
        [
            ({}, 0, [], ROOT_SOCKET),
            (RUNTIME, USER, [], "/run/user/1000/forged.sock"),
            (RUNTIME, USER, ["/run/user/1000/forged.sock", ROOT_SOCKET], "/run/user/1000/forged.sock"),
            (RUNTIME, USER, ["/run/user/1000/forged/forged.sock", ROOT_SOCKET], "/run/user/1000/forged/forged.sock"),
            (RUNTIME, USER, [ROOT_SOCKET], ROOT_SOCKET),
            (HOME, USER, [ROOT_SOCKET], ROOT_SOCKET),
            (HOME, USER, [], "/home/me/.local/state/forged/forged.sock"),
            (RUNTIME | {"FORGED_SOCKET": "/f"}, USER, [ROOT_SOCKET], "/f"),
        ],
    )
    def test_finds_the_users_own_daemon_or_else_the_machines(
        self, environment: dict[str, str], uid: int, there: list[str], found: str
    ) -> None:
        assert client_socket(environment, uid, there.__contains__) == found

    def test_does_not_take_another_services_directories_for_the_daemons(self) -> None:
        environment = HOME | {"STATE_DIRECTORY": "/var/lib/trainer", "RUNTIME_DIRECTORY": "/run/trainer"}
        assert client_socket(environment, USER, lambda path: False) == "/home/me/.local/state/forged/forged.sock"
        assert client_socket(environment, 0, lambda path: False) == ROOT_SOCKET

    def test_looks_at_the_files_of_this_machine(self, tmp_path: Path) -> None:
        socket = tmp_path / "forged" / "forged.sock"
        socket.parent.mkdir()
        socket.touch()
        assert client_socket({"XDG_RUNTIME_DIR": str(tmp_path)}, USER) == str(socket)

    @pytest.mark.parametrize(
        ("environment", "found"),
        [
            ({"FORGED_SOCKET": "/f"}, ("unix:///f",)),
            ({"FORGED_SOCKET": "/f", "FORGED_ENDPOINT": ""}, ("unix:///f",)),
            ({"FORGED_SOCKET": "/f", "FORGED_ENDPOINT": "tcp://a:1, tls://b:2,"}, ("tcp://a:1", "tls://b:2")),
        ],
    )
    def test_prefers_the_endpoints_of_the_environment_to_the_socket(
        self, environment: dict[str, str], found: tuple[str, ...]
    ) -> None:
        assert client_endpoints(environment, USER) == found
