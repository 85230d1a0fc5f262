"""A server that takes the connection and never answers: a line on stderr says so, in a command and in Python."""

import logging
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import tensorstore_ck
from tensorstore_ck import Store
from tensorstore_ck.backend import s3_requests
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.events import KINDS, Event
from tests.backend.chaos import ChaosProxy, Fault, chaos_proxy, once, silent_server
from tests.cli.conftest import Tsck
from tests.servers import BUCKET, KEY, SECRET, S3Server, storage_options

TIMEOUTS = {"connect_timeout": 0.3, "read_timeout": 0.3, "retries": {"max_attempts": 1}}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes five seconds is said at once."""
    assert S3Backend.__module__ in sys.modules, "it is loaded, and refers to the class"
    monkeypatch.setattr(s3_requests, "RetryTiming", partial(s3_requests.RetryTiming, notice_seconds=0.01))


COMMANDS = ["log", "show runs/gpt", "usage", "fsck", "gc", "put model.safetensors --ref runs/gpt", "probe", "salvage"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_it_waits_for(command: str, history: Tsck) -> None:
    options = [f"--storage-option=key={KEY}", f"--storage-option=secret={SECRET}", '--storage-option=client_kwargs={"region_name": "x"}']
    options += ['--storage-option=config_kwargs={"connect_timeout": 0.3, "read_timeout": 0.3, "retries": {"max_attempts": 1}}']
    url = f"s3://{BUCKET}/runs"
    with silent_server() as endpoint:
        result = history(*command.split(), "-s", url, *options, f"--storage-option=endpoint_url={endpoint}")
    lines = result.err.splitlines()
    waits = [line for line in lines if line.startswith("tsck: warning: still waiting after ")]
    assert any(f"in {url} (try 1)" in line for line in waits)
    assert result.code
    assert url in lines[-1]
    assert "warning" not in lines[-1], "the error comes last"
    assert not result.out
    assert not logging.getLogger("tensorstore_ck").handlers, "what the command added is gone"


def test_open_says_what_it_waits_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with silent_server() as endpoint, pytest.raises(tensorstore_ck.BackendUnavailableError):
        tensorstore_ck.open(
            f"s3://{BUCKET}/runs", storage_options={**storage_options(endpoint), "config_kwargs": TIMEOUTS}, cache_dir=tmp_path
        )
    assert "to read store.json in s3://bucket/runs (try 1)" in caplog.text
    assert {record.name for record in caplog.records if "still waiting" in record.getMessage()} == {"tensorstore_ck"}


@pytest.fixture
def proxy(moto_server: S3Server) -> Iterator[ChaosProxy]:
    with chaos_proxy(moto_server.port) as proxy:
        yield proxy


STATE = {"w": torch.arange(1000)}
ACTS: dict[str, tuple[str, str, Callable[[Store], object]]] = {
    "put": ("PUT", "/packs/", lambda store: store.put_snapshot({"w": torch.ones(9)}, ref="job", step=2)),
    "async put": ("PUT", "/packs/", lambda store: store.put_snapshot_async({"w": torch.ones(9)}, ref="job", step=2).wait()),
    "commit": ("PUT", "/log/", lambda store: store.put_snapshot({"w": torch.ones(9)}, ref="job", step=2)),
    "checkout": ("GET", "/packs/", lambda store: store.checkout("job")),
    "log": ("GET", "/log/", lambda store: list(store.log("job"))),
    "gc": ("GET", "list-type=2", lambda store: store.gc()),
}


@pytest.mark.parametrize("act", ACTS)
def test_programs_get_an_event(act: str, proxy: ChaosProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    method, marker, run = ACTS[act]
    options = {**storage_options(proxy.url), "config_kwargs": {"connect_timeout": 0.5, "read_timeout": 0.5}}
    url = f"s3://{BUCKET}/{uuid.uuid4()}"
    with tensorstore_ck.open(url, create=True, storage_options=options, cache_dir=tmp_path) as store:
        store.put_snapshot(STATE, ref="job", step=1)
        events: list[Event] = []
        store.on_event(events.append)
        proxy.plan = once(Fault.HANG, method, marker)
        run(store)
        waits = [event for event in events if event.kind == "waiting"]
        assert waits
        assert all(event.fields.keys() == KINDS["waiting"].keys() and url in str(event.fields["what"]) for event in waits)
        assert sum("still waiting" in record.getMessage() for record in caplog.records) >= len(waits), "each is logged, too"
        assert store.fsck(read_data=True).ok
