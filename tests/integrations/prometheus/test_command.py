"""The command `tsck exporter`, as a service runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorstore_ck.cli import main
from tensorstore_ck.common.extras import EXTRAS
from tensorstore_ck.store import Store
from tests.effort import PATIENCE_SECONDS
from tests.integrations.prometheus.conftest import Served, get, samples

MakeStore = Callable[..., Store]


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the URL that it prints."""
    environment = {**os.environ, "TMPDIR": str(folder), "TSCK_CACHE_DIR": str(folder / "cache"), "TSCK_STATE_DIR": str(folder / "state")}
    command = [sys.executable, "-m", "tensorstore_ck.cli", "exporter", *arguments, "--json", "--listen", "127.0.0.1:0"]
    with (
        (folder / "err").open("w") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_it_answers_until_it_is_ended(make_store: MakeStore, tmp_path: Path, how: signal.Signals) -> None:
    make_store().put_snapshot({"step": 1}, ref="runs/a", step=1)
    run = tmp_path / "run"
    run.mkdir()
    with running(run, str(tmp_path / "ck"), str(tmp_path / "dead"), "--interval", "1s") as (process, url):
        found = samples(get(url))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while ("tsck_unreferenced_bytes", str(tmp_path / "ck")) not in found and time.monotonic() < deadline:
            found = samples(get(url))
        assert found["tsck_unreferenced_bytes", str(tmp_path / "ck")] == 0
        assert found["tsck_saves_total", str(tmp_path / "ck"), "runs/a"] == 1
        assert found["tsck_up", str(tmp_path / "dead")] == 0
        process.send_signal(how)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert "tsck: warning: " in (run / "err").read_text()
    assert list(run.glob("tsck-*")) == []
    assert list((run / "cache" / "catalogs").glob("*.sqlite"))


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from tensorstore_ck.cli import main
sys.exit(main(["exporter", "-s", "nowhere"]))
"""


@pytest.mark.parametrize("package", ["prometheus_client", pytest.param("sqlalchemy", marks=pytest.mark.slow)])
def test_one_command_installs_all_that_is_missing(package: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, package], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert "run `pip install " + " ".join(f"'{each}'" for each in EXTRAS["exporter"]) + "`" in done.stderr


@pytest.fixture
def exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs the command in this process, which must end with an error; its exit code and what it says."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["exporter", *arguments], env={"TSCK_CACHE_DIR": str(tmp_path / "cache")}, catch_exceptions=False)
        assert result.exit_code != 0
        return result.exit_code, result.stderr

    return run


@pytest.mark.parametrize("address", ["9464", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "::1:9464", ":9464"])
def test_addresses_that_are_none(exporter: Callable[..., tuple[int, str]], address: str) -> None:
    code, err = exporter("-s", "nowhere", "--listen", address)
    assert code == 2
    assert "127.0.0.1:9464" in err


def test_an_address_that_is_taken(exporter: Callable[..., tuple[int, str]], tmp_path: Path, serve: Callable[..., Served]) -> None:
    taken = serve().url.removeprefix("http://").removesuffix("/metrics")
    assert taken.replace(":", " port ") in exporter(str(tmp_path), "--listen", taken)[1]


@pytest.mark.parametrize(
    "arguments", [["s3://key:sekret123@bucket/ck"], ["--db", "postgresql://me:sekret123@127.0.0.1:1/tsck"]], ids=["store", "catalog"]
)
def test_secrets_are_in_no_error(exporter: Callable[..., tuple[int, str]], arguments: list[str]) -> None:
    assert "sekret123" not in exporter(*arguments)[1]


def test_a_catalog_that_does_not_exist(exporter: Callable[..., tuple[int, str]]) -> None:
    assert "tsck catalog sync" in exporter("--db", "none.sqlite")[1]
