"""Tests of the loops of other frameworks: `make test-frameworks` runs them where the frameworks are installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

HAS_FRAMEWORKS = all(find_spec(name) for name in ("torch", "transformers", "accelerate", "pytorch_lightning"))

if not HAS_FRAMEWORKS:
    collect_ignore_glob = ["*"]
else:
    from multiprocessing import forkserver

    import torch

    from tests.client.threaded_daemon import ThreadedDaemon
    from tests.torch.torch_cluster import TorchCluster

    # Several test processes share the machine, and each would take all of its cores.
    torch.set_num_threads(1)

    @pytest.fixture(scope="session", autouse=True)
    def _imported() -> None:
        """Workers are forked from a server that has imported the frameworks: that takes many times a test."""
        forkserver.set_forkserver_preload(
            [
                "tests.frameworks.trainer_script",
                "tests.frameworks.lightning_script",
                "forged.torch.frameworks.lightning",
                "forged.torch.frameworks.trainer",
            ]
        )
        forkserver.ensure_running()

    @pytest.fixture(scope="session")
    def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        daemon = ThreadedDaemon(tmp_path_factory.mktemp("daemon"))
        yield daemon.runner.endpoint
        daemon.close()

    @pytest.fixture
    def cluster(endpoint: str) -> Iterator[TorchCluster]:
        cluster = TorchCluster(endpoint)
        yield cluster
        cluster.close()


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of the frameworks about their own code are no errors."""
    config.addinivalue_line("filterwarnings", "default")
