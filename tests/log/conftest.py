"""A user's view of one store, which is built once."""

import json
import shutil
from pathlib import Path

import pytest

from tensorstore_ck.common.folder_identity import folder_identity
from tests.log.test_rollback import Host


@pytest.fixture(scope="session")
def saved_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    host = Host(tmp_path_factory.mktemp("host") / "it")
    host.put(*range(1, 7))
    return host.folder


@pytest.fixture
def host(tmp_path: Path, saved_host: Path) -> Host:
    """Six saves to a branch; the files of the test's own host."""
    shutil.copytree(saved_host, tmp_path, dirs_exist_ok=True)
    copied = Host(tmp_path)
    (file,) = copied.state.iterdir()
    seen = json.loads(file.read_text())
    file.write_text(json.dumps({**seen, "url": str(copied.store), "inode": folder_identity(str(copied.store))}) + "\n")
    return copied
