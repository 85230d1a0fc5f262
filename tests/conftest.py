"""Fixtures for servers: each is started once per session, when a test first asks for it."""

from collections.abc import Iterator

import pytest

from tests import servers


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
