"""A server that takes the connection and never answers: a line on stderr says so, in a command and in Python."""

import json
import logging
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import tensorstore_ck
from tensorstore_ck import Store
from tensorstore_ck.backend import s3_requests
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.events import KINDS, Event
from tests.backend.chaos import Fault, chaos_proxy, once, silent_server
from tests.cli.conftest import Tsck
from tests.servers import BUCKET, S3Server, storage_options

ONE_TRY = {"connect_timeout": 0.3, "read_timeout": 0.3, "retries": {"max_attempts": 0}}


def say_after(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes five seconds is said soon."""
    assert S3Backend.__module__ in sys.modules, "it is loaded, and refers to the class"
    monkeypatch.setattr(s3_requests, "RetryTiming", partial(s3_requests.RetryTiming, notice_seconds=seconds))


AT_ONCE = 1e-6
"""Before the first look whether there is an answer, so that no timeout can come first."""
SLOW_COMMANDS = ["fsck", "gc", "probe", "salvage"]
COMMANDS = ["log", "put model.safetensors --ref runs/gpt", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW_COMMANDS)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_it_waits_for(
    command: str, tsck: Tsck, model: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    say_after(AT_ONCE, monkeypatch)
    url = f"s3://{BUCKET}/runs"
    with silent_server() as endpoint:
        given = {**storage_options(endpoint), "config_kwargs": ONE_TRY}
        result = tsck(*command.split(), "-s", url, *(f"--storage-option={name}={json.dumps(value)}" for name, value in given.items()))
    lines = result.err.splitlines()
    waits = [line for line in lines if line.startswith("tsck: warning: still waiting after ")]
    assert any(f"in {url} (try 1)" in line for line in waits)
    assert result.code
    assert url in lines[-1]
    assert "warning" not in lines[-1], "the error comes last"
    assert not result.out
    assert not logging.getLogger("tensorstore_ck").handlers, "what the command added is gone"


def test_open_says_what_it_waits_for(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    say_after(AT_ONCE, monkeypatch)
    with silent_server() as endpoint, pytest.raises(tensorstore_ck.BackendUnavailableError):
        tensorstore_ck.open(
            f"s3://{BUCKET}/runs", storage_options={**storage_options(endpoint), "config_kwargs": ONE_TRY}, cache_dir=tmp_path
        )
    assert "to read store.json in s3://bucket/runs (try 1)" in caplog.text
    assert {record.name for record in caplog.records if "still waiting" in record.getMessage()} == {"tensorstore_ck"}


ACTS: dict[str, tuple[str, str, Callable[[Store], object]]] = {
    "put": ("PUT", "/packs/", lambda store: store.put_snapshot({"w": torch.ones(9)}, ref="job", step=2)),
    "async put": ("PUT", "/packs/", lambda store: store.put_snapshot_async({"w": torch.zeros(9)}, ref="job", step=3).wait()),
    "commit": ("PUT", "/log/", lambda store: store.put_snapshot({"w": torch.ones(9)}, ref="job", step=4)),
    "checkout": ("GET", "/packs/", lambda store: store.checkout("job@3")),
    "log": ("GET", "/log/", lambda store: list(store.log("job"))),
    "gc": ("GET", "list-type=2", lambda store: store.gc()),
}


@pytest.mark.slow
def test_programs_get_an_event(
    moto_server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server hangs until the event has come; then it closes the connection, and the next try succeeds."""
    say_after(0.01, monkeypatch)
    url = f"s3://{BUCKET}/{uuid.uuid4()}"
    with (
        chaos_proxy(moto_server.port) as proxy,
        tensorstore_ck.open(url, create=True, storage_options=storage_options(proxy.url), cache_dir=tmp_path) as store,
    ):
        waits: list[Event] = []

        def note(event: Event) -> None:
            if event.kind == "waiting":
                waits.append(event)
                proxy.hang_up()

        store.on_event(note)
        store.put_snapshot({"w": torch.arange(1000)}, ref="job", step=1)
        for name, (method, marker, run) in ACTS.items():
            waits.clear()
            caplog.clear()
            proxy.plan = once(Fault.HANG, method, marker)
            run(store)
            assert waits, name
            assert all(event.fields.keys() == KINDS["waiting"].keys() and url in str(event.fields["what"]) for event in waits), name
            assert sum("still waiting" in record.getMessage() for record in caplog.records) >= len(waits), "each is logged, too"
        assert store.fsck(read_data=True).ok
