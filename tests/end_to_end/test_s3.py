"""The whole store on S3 servers: what comes back, how many requests it takes, and what bad replies do to it."""

import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.s3_multipart_writer import PIECE_BYTES
from tests.backend.chaos import ChaosProxy, Fault, Plan, Request, chaos_proxy, first, once
from tests.effort import effort
from tests.end_to_end.test_fencing import run_in_child
from tests.servers import S3Server, storage_options

Open = Callable[..., tsck.Store]
Tensors = dict[str, torch.Tensor]

MIB = 1 << 20
MANY = 1000
FEW_TRIES = {"config_kwargs": {"retries": {"max_attempts": 1, "mode": "legacy"}}}
"""botocore's: one repetition, after less than a second."""


@pytest.fixture(scope="module", params=["moto", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(f"{request.param}_server")
    return found


@pytest.fixture
def url(server: S3Server) -> str:
    """A prefix that nobody else uses."""
    return f"{server.url}/{uuid.uuid4()}"


@pytest.fixture(scope="module")
def proxied(server: S3Server) -> Iterator[ChaosProxy]:
    with chaos_proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxied: ChaosProxy) -> Iterator[ChaosProxy]:
    proxied.seen.clear()
    yield proxied
    proxied.plan = lambda _: Fault.NONE


@pytest.fixture
def open_store(server: S3Server, url: str, tmp_path: Path) -> Iterator[Open]:
    """Opens the store as one more host would; `endpoint` leads past a proxy."""
    opened: list[tsck.Store] = []

    def open_one(endpoint: str = server.endpoint, **options: Any) -> tsck.Store:
        place = {**storage_options(endpoint), **options}
        opened.append(tsck.open(url, create=True, storage_options=place, cache_dir=tmp_path / f"cache-{len(opened)}"))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def tensors(seed: int, count: int = 40, rows: int = 300) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{number}": torch.randn(rows + number, 100, generator=generator) for number in range(count)}


def equal(left: Tensors, right: Tensors) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def count(requests: list[Request], *methods: str, folder: str = "/") -> int:
    """How many of the requests have one of the methods, and the folder in their path; without the writer record (no save waits for it)."""
    paths = [request.path.partition("?")[0] for request in requests if request.method in methods]
    return sum(folder in path and ("/writers/" not in path or folder == "/writers/") for path in paths)


# --- what comes back ------------------------------------------------------------------------------------------------------


def test_end_to_end(open_store: Open) -> None:
    store = open_store()
    state: dict[str, Any] = {**tensors(0), "big": torch.arange(100_000), "step": 1, "rng": bytes(range(256)) * 300}
    first_put = store.put_snapshot(state, ref="runs/a", step=1, metrics={"loss": 2.0}, metadata={"lr": 0.1}, codec="raw")
    state["layer.3"] = state["layer.3"] * 2
    second = store.put_snapshot({**state, "step": 2}, ref="runs/a", step=2, codec="raw")
    assert second.parent == first_put.root
    assert second.new_bytes < 1 * MIB < 4 * MIB < first_put.new_bytes

    other = open_store()
    restored = other.checkout("runs/a")
    assert list(restored) == list(state)
    assert restored["step"] == 2
    assert restored["rng"] == state["rng"]
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items() if isinstance(tensor, torch.Tensor))
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
    other.checkout("runs/a@1", into=target, select=["layer.*"])
    assert equal(target, tensors(0))

    store.branch("runs/b", at="runs/a@1")
    store.tag("v1", at="runs/a")
    assert [snapshot.step for snapshot in other.log("runs/a")] == [2, 1]
    assert list(other.branches()) == ["runs/a", "runs/b"]
    assert other.tags()["v1"].root == second.root
    difference = other.diff("runs/a~1", "v1")
    assert [change.name for change in difference.tensors] == ["layer.3"]
    assert [change.path for change in difference.values] == ["step"]
    assert other.show("runs/b").metadata == {"lr": 0.1}
    usage = other.usage()
    assert usage.snapshots == 2
    assert usage.unreferenced_bytes == 0
    report = other.fsck(read_data=True)
    assert report.ok, report.findings
    assert report.snapshots == 2
    assert report.data_bytes > 4 * MIB


def test_a_forked_child_uses_the_store(open_store: Open) -> None:
    torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads, and would wait for them
    store = open_store()
    store.put_snapshot(tensors(1, count=2), ref="job", step=1)

    def put_in_child() -> str:
        assert equal(store.checkout("job"), tensors(1, count=2))
        return str(store.put_snapshot(tensors(2, count=2), ref="job", step=2).step)

    assert run_in_child(put_in_child) == "2"
    assert equal(store.checkout("job"), tensors(2, count=2))


# --- how many requests ----------------------------------------------------------------------------------------------------


def test_a_save_writes_the_pack_and_three_objects_and_a_process_its_record(open_store: Open, proxy: ChaosProxy) -> None:
    store, state = open_store(proxy.url), tensors(0, rows=30)
    records = list[Request]()

    def forget() -> None:
        records.extend(proxy.seen)
        proxy.seen.clear()

    forget()
    store.put_snapshot(state, ref="job", step=1)
    assert count(proxy.seen, "PUT", "POST", folder="/packs/") == 1
    assert count(proxy.seen, "PUT", "POST", "DELETE") == 4

    state["layer.7"] = state["layer.7"] + 1
    forget()
    store.put_snapshot(state, ref="job", step=2)
    assert count(proxy.seen, "PUT", "POST", "DELETE") == 4
    assert count(proxy.seen, "GET", "HEAD") <= 6, "the log's newest entry and the next, the parent's record, and whether its pack is there"

    forget()
    store.put_snapshot(state, ref="job", step=3, unchanged="ok")
    assert count(proxy.seen, "PUT", "POST", folder="/packs/") == 0
    assert count(proxy.seen, "PUT", "POST", "DELETE") == 3

    forget()
    large = tensors(0, count=10, rows=10_000)
    store.put_snapshot(large, ref="large")
    pieces = sum(tensor.nbytes for tensor in large.values()) // PIECE_BYTES + 1
    assert pieces > 1
    assert count(proxy.seen, "PUT", folder="/packs/") == pieces
    assert count(proxy.seen, "POST", folder="/packs/") == 2, "begun and completed"
    assert count(proxy.seen, "PUT", "POST", "DELETE") == pieces + 2 + 3

    store.close()
    forget()
    assert count(records, "PUT", folder="/writers/") == 1, "one a process, taken away at its end"
    assert not list(open_store().engine.backend.list("writers/"))


def test_a_checkout_reads_merged_ranges_and_a_slice_its_blocks(open_store: Open, proxy: ChaosProxy) -> None:
    writer, state = open_store(), tensors(0, count=100, rows=30)
    sliced = {"before": torch.zeros(MIB), "wanted": torch.randn(20_000, 100), "after": torch.ones(MIB)}
    writer.put_snapshot(sliced, ref="sliced")
    writer.put_snapshot(state, ref="job", step=1)
    for number in range(20):
        state[f"layer.{number}"] = state[f"layer.{number}"] + 1
    writer.put_snapshot(state, ref="job", step=2)
    size = sum(tensor.nbytes for tensor in state.values())
    store = open_store(proxy.url)
    proxy.seen.clear()
    assert equal(store.checkout("job"), state)
    packs, layout = 2, 1
    assert count(proxy.seen, "GET", folder="/packs/") <= size // (8 * MIB) + 2 * packs + layout
    assert count(proxy.seen, "GET", folder="/snapshots/") == count(proxy.seen, "GET", folder="/parts/") == 1
    assert count(proxy.seen, "PUT", "POST", "DELETE", "HEAD") == 0
    with store.open_snapshot("sliced") as lazy:
        proxy.seen.clear()
        assert torch.equal(lazy["wanted"][10_000:10_100], sliced["wanted"][10_000:10_100])
        assert [request.method for request in proxy.seen] == ["GET"]


# --- bad days -------------------------------------------------------------------------------------------------------------


quick_server = pytest.mark.parametrize("server", ["moto"], indirect=True)


WRITES_AND_FAULTS = [
    ("/packs/", Fault.LOSE_REQUEST),
    ("/parts/", Fault.STATUS_503),
    ("/snapshots/", Fault.LOSE_REPLY),
    ("/log/", Fault.LOSE_REPLY),
    ("/log/", Fault.LOSE_REQUEST),
]
"""What is sent again and how: tests/backend/test_s3_faults.py."""


@quick_server
@pytest.mark.slow
@pytest.mark.parametrize(("folder", "fault"), WRITES_AND_FAULTS)
def test_a_save_survives_one_fault(open_store: Open, proxy: ChaosProxy, folder: str, fault: Fault) -> None:
    store, state = open_store(proxy.url, **FEW_TRIES), tensors(0, count=3)
    proxy.plan = once(fault, "PUT", folder)
    done = store.put_snapshot(state, ref="job", step=1)
    assert count(proxy.seen, "GET", folder="/packs/") == 0
    other = open_store()
    assert [snapshot.root for snapshot in other.log("job")] == [done.root]
    assert done.entry == 1
    assert equal(other.checkout("job"), state)


@quick_server
@pytest.mark.slow
@pytest.mark.parametrize(("folder", "fault"), WRITES_AND_FAULTS)
def test_a_fault_that_stays_is_reported(
    open_store: Open, proxy: ChaosProxy, monkeypatch: pytest.MonkeyPatch, folder: str, fault: Fault
) -> None:
    monkeypatch.setattr("tensorstore_ck.log.entry.RESEND_DELAYS", (0.0, 0.0))
    store, old, new = open_store(proxy.url, **FEW_TRIES), tensors(0, count=3), tensors(1, count=3)
    before = store.put_snapshot(old, ref="job", step=1)
    proxy.plan = first(MANY, fault, "PUT", folder)
    if folder == "/log/" and fault is Fault.LOSE_REPLY:
        store.put_snapshot(new, ref="job", step=2)  # the entry is there, and was read back
    else:
        expected = tsck.UndecidedError if folder == "/log/" else tsck.BackendUnavailableError
        with pytest.raises(expected):
            store.put_snapshot(new, ref="job", step=2)
        assert equal(open_store().checkout("job"), old)
        proxy.plan = lambda _: Fault.NONE
        assert store.put_snapshot(new, ref="job", step=2).parent == before.root
    other = open_store()
    assert [snapshot.step for snapshot in other.log("job")] == [2, 1]
    assert equal(other.checkout("job"), new)
    assert other.fsck(read_data=True).ok


@pytest.mark.slow
@quick_server
@pytest.mark.timeout(effort(600, 3000))
def test_many_faults(open_store: Open, proxy: ChaosProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that resumes after each error: the ref is at the old or the new snapshot, and what was acknowledged stays."""
    monkeypatch.setattr("tensorstore_ck.log.entry.RESEND_DELAYS", (0.0, 0.0))
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    proxy.plan = _unreliable(random.Random(seed))
    acknowledged: list[str] = []
    count = 0
    for number in range(effort(6, 60)):
        plan, proxy.plan = proxy.plan, lambda _: Fault.NONE
        store = open_store(proxy.url, **FEW_TRIES)
        if store.branches():
            restored = store.checkout("job")
            assert restored["count"] in (count, count + 1)
            count = restored["count"]
        proxy.plan = plan
        for _ in range(2):
            try:
                state = {**tensors(number, count=3), "count": count + 1}
                done = store.put_snapshot(state, ref="job", step=count + 1, unchanged="ok")
            except tsck.RetryableError:
                break
            count += 1
            acknowledged.append(done.root)
    proxy.plan = lambda _: Fault.NONE
    final = open_store()
    history = [snapshot.root for snapshot in final.log("job")]
    assert len(set(history)) == len(history) == final.checkout("job")["count"]
    assert set(acknowledged) <= set(history)
    assert final.fsck(read_data=True).ok


def _unreliable(source: random.Random) -> Plan:
    def plan(_: Request) -> Fault:
        return source.choice([Fault.LOSE_REPLY, Fault.LOSE_REQUEST, Fault.STATUS_503]) if source.random() < 0.25 else Fault.NONE

    return plan


def test_no_bucket(server: S3Server, tmp_path: Path) -> None:
    with pytest.raises(tsck.InvalidUrlError, match="make the bucket, or correct the URL"):
        tsck.open("s3://nobody-made-this/store", create=True, storage_options=server.storage_options, cache_dir=tmp_path)


def test_no_store(server: S3Server, url: str, tmp_path: Path) -> None:
    with pytest.raises(tsck.NotAStoreError, match="create=True"):
        tsck.open(url, storage_options=server.storage_options, cache_dir=tmp_path)


@pytest.mark.s3
@pytest.mark.parametrize("wrong", [{"secret": "guess"}, {"key": "AKIANOBODY"}], ids=lambda wrong: next(iter(wrong)))
def test_wrong_credentials(seaweedfs_server: S3Server, wrong: dict[str, str], tmp_path: Path) -> None:
    options = {**seaweedfs_server.storage_options, **wrong}
    with pytest.raises(tsck.PermissionDeniedError, match="check the credentials") as caught:
        tsck.open(f"{seaweedfs_server.url}/{uuid.uuid4()}", create=True, storage_options=options, cache_dir=tmp_path)
    assert not any(secret in str(caught.value) for secret in ("guess", seaweedfs_server.storage_options["secret"]))


@pytest.mark.s3
def test_a_server_that_ignores_conditions(rclone_server: S3Server, tmp_path: Path) -> None:
    url, options = f"{rclone_server.url}/{uuid.uuid4()}", rclone_server.storage_options
    with pytest.raises(tsck.UnsafeBackendError, match="single_writer_unsafe=True"):
        tsck.open(url, create=True, storage_options=options, cache_dir=tmp_path / "a")
    with pytest.raises(tsck.NotAStoreError):
        tsck.open(url, storage_options=options, cache_dir=tmp_path / "a")
    state = tensors(0, count=3)
    with tsck.open(url, create=True, single_writer_unsafe=True, storage_options=options, cache_dir=tmp_path / "a") as alone:
        for step in (1, 2, 3):
            state["layer.0"] = state["layer.0"] + 1
            alone.put_snapshot(state, ref="job", step=step)
        assert equal(alone.checkout("job"), state)
    with tsck.open(url, storage_options=options, cache_dir=tmp_path / "b") as reader:
        assert equal(reader.checkout("job"), state)
        assert [snapshot.step for snapshot in reader.log("job")] == [3, 2, 1]
        with pytest.raises(tsck.UnsafeBackendError, match="only process that writes"):
            reader.put_snapshot(state, ref="job")
        assert reader.fsck(read_data=True).ok


@quick_server
@pytest.mark.slow
def test_old_packs_go_to_another_prefix_and_storage_class(server: S3Server, url: str, open_store: Open) -> None:
    """Through a storage class of S3's, read by a host that knows nothing but the store's URL."""
    store = open_store()
    put = {f"run@{step}": tensors(step) for step in range(2)}
    for step, state in enumerate(put.values()):
        store.put_snapshot(state, ref="run", step=step)
    store.set_policy("run", move_after=("1s", f"{url}-cold?storage_class=STANDARD_IA"))
    clock = store.engine.clock
    store.engine.clock = lambda: clock() + 60 * 10**9
    assert store.migrate_tiers().packs
    store.gc(tsck.GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1))
    prefix = url.removeprefix("s3://bucket/")
    listed = server.client().list_objects_v2(Bucket="bucket", Prefix=f"{prefix}-cold/{store.engine.config.uuid}/packs/")["Contents"]
    assert {found["StorageClass"] for found in listed} == {"STANDARD_IA"}
    assert "Contents" not in server.client().list_objects_v2(Bucket="bucket", Prefix=f"{prefix}/packs/")
    other = open_store()
    assert all(torch.equal(other.checkout(address)[name], each) for address, state in put.items() for name, each in state.items())
    assert other.fsck(read_data=True).ok
