"""Staged saves to an S3 server through a proxy that does what networks do: published once, and every byte is right."""

import random
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend import s3_multipart_writer
from tensorstore_ck.common import retry
from tensorstore_ck.log import entry
from tests.backend.chaos import ChaosProxy, Fault, Request, chaos_proxy, first
from tests.servers import BUCKET, S3Server, storage_options

MIB = 1 << 20
STEPS_PUT = (0, 1)
pytestmark = pytest.mark.s3
FAULTS = (Fault.STATUS_503, Fault.LOSE_REPLY, Fault.LOSE_REQUEST)
FEW_TRIES = {"retries": {"max_attempts": 1, "mode": "legacy"}}
MORE_THAN_ONE_REQUEST_IS_TRIED = 5
STEPS = [
    ("POST", "?uploads"),
    ("PUT", "partNumber=1"),
    ("PUT", "partNumber=2"),
    ("POST", "uploadId="),
    ("PUT", "/parts/"),
    ("PUT", "/snapshots/"),
    ("PUT", "/log/"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_multipart_writer, "PIECE_BYTES", 5 * MIB)  # the smallest that S3 takes
    monkeypatch.setattr(random, "uniform", lambda *_: 0.01)
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(entry, "RESEND_DELAYS", (0.01,) * 16)


def opened(path: Path, url: str, endpoint: str, **options: Any) -> tsck.Store:
    options |= {"storage_options": {**storage_options(endpoint), "config_kwargs": FEW_TRIES}}
    return tsck.open(url, create=True, cache_dir=path / "cache", **options)


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randint(0, 256, (6 * MIB,), dtype=torch.uint8, generator=generator), "step": step}


def test_faults_at_each_step(tmp_path: Path, seaweedfs_server: S3Server) -> None:
    """Saves through faults; then another host looks, past the proxy."""
    with chaos_proxy(seaweedfs_server.port) as proxy:
        run(tmp_path, seaweedfs_server.endpoint, proxy)


def run(path: Path, endpoint: str, proxy: ChaosProxy) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4()}"
    opened(path, url, proxy.url).close()
    plans = [first(MORE_THAN_ONE_REQUEST_IS_TRIED, fault, *step) for fault in FAULTS for step in STEPS]

    def plan(request: Request) -> Fault:
        return next((found for each in plans if (found := each(request)) is not Fault.NONE), Fault.NONE)

    proxy.plan = plan
    with opened(path, url, proxy.url, staging=tsck.Staging(path / "stage")) as store:
        kinds: list[str] = []
        store.on_event(lambda event: kinds.append(event.kind))
        for step in STEPS_PUT:
            store.put_snapshot_async(state_of(step), ref="job", step=step)
        store.drain()
        proxy.plan = lambda _: Fault.NONE
        assert kinds.count("published") == len(STEPS_PUT)
        assert "retried" in kinds
    with opened(path / "elsewhere", url, endpoint) as store:
        assert [snapshot.step for snapshot in store.log("job")] == [1, 0]
        for step in STEPS_PUT:
            found = store.checkout(f"job@{step}")
            assert torch.equal(found["w"], state_of(step)["w"])
        assert store.pins() == ()
        report = store.fsck(read_data=True)
        assert report.ok, report.findings
