"""The probe believes what it sees."""

import sys
import threading

import pytest

from tensorstore_ck.backend import Backend, Buffer, Created, ProbeResult, open_backend, probe, probe_create
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import ObjectWriter
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.backend.save_duration import SaveEstimate, estimate_save
from tensorstore_ck.common.free_space import Space
from tensorstore_ck.errors import BackendUnavailableError, InvalidOptionError, NoSpaceError, PermissionDeniedError, UnsafeBackendError
from tests.backend.chaos import ChaosProxy, Fault
from tests.servers import BUCKET, S3Server


@pytest.fixture(autouse=True)
def little_to_measure(small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPEED_BYTES", "SECOND_UPLOAD_BYTES"):
        monkeypatch.setattr(sys.modules["tensorstore_ck.backend.probe"], name, 8 << 20)
    monkeypatch.setattr(sys.modules["tensorstore_ck.backend.probe"], "ROUNDS", 2)
    monkeypatch.setattr(sys.modules["tensorstore_ck.backend.save_duration"], "QUICK_BYTES", 8 << 20)
    monkeypatch.setattr(sys.modules["tensorstore_ck.backend.save_duration"], "SAMPLE_BYTES", 32 << 20)


def check_good(backend: Backend) -> ProbeResult:
    assert probe_create(backend)
    result = probe(backend)
    assert result.exclusive_create
    assert result.read_after_write
    assert result.list_after_write
    assert result.problems == ()
    assert min(result.write_bytes_per_second, result.read_bytes_per_second, result.create_seconds) > 0
    assert list(backend.list("")) == []
    assert list(backend.list_uploads()) == []
    return result


def test_good_backends_pass(tmp_path: object) -> None:
    check_good(MemoryBackend())
    check_good(LocalBackend(str(tmp_path)))
    check_good(open_backend("memory://test-probe"))


@pytest.mark.parametrize("server", ["moto", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def test_a_good_server_passes(server: str, place: str, request: pytest.FixtureRequest) -> None:
    found: S3Server = request.getfixturevalue(f"{server}_server")
    result = check_good(open_backend(f"s3://{BUCKET}/{place}", found.storage_options))
    assert result.refuses_second_put
    assert result.refuses_second_upload


def test_a_server_that_ignores_conditions_is_found_out(rclone_server: S3Server, place: str) -> None:
    backend = open_backend(f"s3://{BUCKET}/{place}", rclone_server.storage_options)
    assert not probe_create(backend)
    result = probe(backend)
    assert (result.exclusive_create, result.refuses_second_put, result.refuses_second_upload) == (False, False, False)
    assert result.read_after_write
    assert result.list_after_write
    assert "ignores the condition" in result.problems[0]
    assert list(backend.list("")) == []


def test_a_server_that_honours_the_condition_on_puts_only_is_found_out(backend: S3Backend, proxy: ChaosProxy) -> None:
    proxy.plan = lambda request: Fault.STATUS_501 if request.method == "POST" and "If-None-Match" in request.headers else Fault.NONE
    result = probe(backend)
    assert (result.exclusive_create, result.refuses_second_put, result.refuses_second_upload) == (True, True, False)
    assert not list(backend.list(""))


class ExistsThenWrite(MemoryBackend):
    """Refuses the second of two creates, but not of two at once: all racers look before any writes."""

    def __init__(self) -> None:
        super().__init__()
        self._racers = threading.Barrier(4)

    def create(self, name: str, data: Buffer) -> Created:
        there = name in {found.name for found in self.list("")}
        if "race" in name:
            self._racers.wait()
        if there:
            return Created.EXISTS
        self.replace(name, data)
        return Created.CREATED


def test_a_check_before_the_write_is_found_out() -> None:
    backend = ExistsThenWrite()
    assert not probe_create(backend)
    assert "each got a success" in probe(backend).problems[0]


class RefusesButWrites(MemoryBackend):
    def create(self, name: str, data: Buffer) -> Created:
        outcome = super().create(name, data)
        self.replace(name, data)
        return outcome


def test_a_refusal_that_writes_is_found_out() -> None:
    assert not probe_create(RefusesButWrites())


class NoCreate(MemoryBackend):
    def create(self, name: str, data: Buffer) -> Created:
        raise UnsafeBackendError("no hard links", object_id=name)


def test_a_backend_without_create_is_recognised() -> None:
    assert not probe_create(NoCreate())
    result = probe(NoCreate())
    assert not result.exclusive_create
    assert result.read_after_write
    assert result.problems == ("no hard links",)


class NoAnswer(MemoryBackend):
    def create(self, name: str, data: Buffer) -> Created:
        super().create(name, data)
        return Created.UNKNOWN


def test_no_answer_is_no_verdict() -> None:
    backend = NoAnswer()
    with pytest.raises(BackendUnavailableError):
        probe_create(backend)
    assert list(backend.list("")) == []


class NoDelete(MemoryBackend):
    def delete(self, names: object) -> None:
        raise PermissionDeniedError("writers may not delete")


def test_what_could_not_be_removed_is_reported() -> None:
    result = probe(NoDelete())
    assert result.exclusive_create
    assert "could not remove probe/" in result.problems[0]


class Forgetful(MemoryBackend):
    def put(self, name: str, data: Buffer) -> None:
        """Acknowledges what is lost."""


def test_lost_writes_are_found_out() -> None:
    result = probe(Forgetful())
    assert not result.read_after_write
    assert not result.list_after_write


# --- forecast ------------------------------------------------------------------------------------------------------


def check_forecast(backend: Backend, size_bytes: int, ranks: int) -> SaveEstimate:
    found = estimate_save(backend, size_bytes, ranks)
    assert found.save_seconds == pytest.approx(size_bytes / found.write_bytes_per_second + found.commit_seconds)
    assert found.restore_seconds == pytest.approx(size_bytes / found.read_bytes_per_second)
    assert 0 < found.commit_seconds < found.save_seconds_elsewhere <= found.save_seconds
    assert 0 < found.restore_seconds_elsewhere <= found.restore_seconds
    assert list(backend.list("")) == []
    assert list(backend.list_uploads()) == []
    return found


def test_a_forecast_is_what_was_measured_scaled(tmp_path: object) -> None:
    size_bytes = 100 << 20
    found = check_forecast(LocalBackend(str(tmp_path)), size_bytes, 1)
    assert (found.size_bytes, found.ranks, found.measured_ranks, found.sample_bytes) == (size_bytes, 1, 1, size_bytes // 10)
    assert found.write_bytes_per_second == found.rank_write_bytes_per_second
    assert found.read_bytes_per_second == found.rank_read_bytes_per_second
    assert found.save_seconds_elsewhere == found.save_seconds
    assert found.free_bytes is not None
    assert found.fits is True


def test_ranks_on_other_hosts_are_each_as_fast_as_one_alone() -> None:
    found = check_forecast(MemoryBackend(), 10 << 30, 100)
    assert (found.ranks, found.measured_ranks, found.sample_bytes) == (100, 8, 32 << 20)
    assert found.save_seconds_elsewhere == pytest.approx((10 << 30) / (100 * found.rank_write_bytes_per_second) + found.commit_seconds)
    assert (found.free_bytes, found.fits) == (None, None)


def test_a_forecast_of_an_object_store(direct: S3Backend) -> None:
    check_forecast(direct, 1 << 20, 3)


class Disk(MemoryBackend):
    """Notes how many objects are written at once."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__()
        self.free_bytes, self.most = free_bytes, 0

    def space(self) -> Space:
        return Space(self.free_bytes, 1 << 40)

    def open_writer(self, name: str) -> ObjectWriter:
        writer = super().open_writer(name)
        self.most = max(self.most, len([*self.list_uploads()]))
        return writer


@pytest.mark.parametrize(("ranks", "at_once"), [(1, 1), (3, 3), (20, 8)])
def test_each_rank_writes_an_object_of_its_own(ranks: int, at_once: int) -> None:
    backend = Disk(1 << 30)
    assert check_forecast(backend, 1 << 20, ranks).fits
    assert backend.most == at_once


def test_what_does_not_fit_is_reported_and_what_cannot_be_tried_refused() -> None:
    found = check_forecast(Disk(1 << 30), 1 << 30, 2)
    assert (found.free_bytes, found.fits) == (1 << 30, False)
    with pytest.raises(NoSpaceError, match=r"a trial write needs 40\.0 MiB, .* 1\.0 MiB of 1\.0 TiB are free"):
        estimate_save(Disk(1 << 20), 1 << 30, 2)


class SlowPlace(MemoryBackend):
    """Takes a minute for a megabyte, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        super().read_into(name, offset, target)
        self.now += len(target) * 60e-6

    def create(self, name: str, data: Buffer) -> Created:
        self.now += 1.0
        return super().create(name, data)

    def open_writer(self, name: str) -> ObjectWriter:
        self.now += 480.0  # for all that one will write
        return super().open_writer(name)


def test_a_slow_backend_is_probed_with_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SlowPlace()
    monkeypatch.setattr("time.perf_counter", lambda: backend.now)
    found = check_forecast(backend, 10 << 30, 2)
    assert found.sample_bytes == 8 << 20
    assert found.commit_seconds == 1.0


class GoneWhenRead(MemoryBackend):
    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        raise BackendUnavailableError("gone")


class GoneWhenWritten(MemoryBackend):
    def open_writer(self, name: str) -> ObjectWriter:
        if name.endswith("every-1"):
            raise BackendUnavailableError("gone")
        return super().open_writer(name)


@pytest.mark.parametrize("backend", [GoneWhenRead(), GoneWhenWritten()])
def test_a_forecast_that_fails_leaves_nothing_behind(backend: Backend) -> None:
    with pytest.raises(BackendUnavailableError, match="gone"):
        estimate_save(backend, 1 << 20, 2)
    assert list(backend.list("")) == []
    assert list(backend.list_uploads()) == []


@pytest.mark.parametrize(("size_bytes", "ranks", "wrong"), [(0, 1, "size"), (-5, 1, "size"), (1, 0, "ranks")])
def test_a_snapshot_has_bytes_and_ranks(size_bytes: int, ranks: int, wrong: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"{wrong} must be above 0"):
        estimate_save(MemoryBackend(), size_bytes, ranks)
