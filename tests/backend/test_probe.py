"""The probe believes what it sees."""

import sys
import threading

import pytest

from tensorstore_ck.backend import Backend, Buffer, Created, ProbeResult, open_backend, probe, probe_create
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import BackendUnavailableError, PermissionDeniedError, UnsafeBackendError
from tests.servers import BUCKET, S3Server


@pytest.fixture(autouse=True)
def little_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tensorstore_ck.backend.probe"], "SPEED_BYTES", 16 << 20)


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


def test_moto_passes(moto_server: S3Server) -> None:
    check_good(open_backend(f"s3://{BUCKET}/probed", moto_server.storage_options))


@pytest.mark.s3
def test_seaweedfs_passes(seaweedfs_server: S3Server) -> None:
    check_good(open_backend(f"s3://{BUCKET}/probed", seaweedfs_server.storage_options))


def test_a_server_that_ignores_conditions_is_found_out(rclone_server: S3Server) -> None:
    backend = open_backend(f"s3://{BUCKET}/probed", rclone_server.storage_options)
    assert not probe_create(backend)
    result = probe(backend)
    assert not result.exclusive_create
    assert result.read_after_write
    assert result.list_after_write
    assert "ignores the condition" in result.problems[0]
    assert list(backend.list("")) == []


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
    assert "were each told that they won" in probe(backend).problems[0]


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


def test_a_backend_without_create_is_told_apart() -> None:
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


def test_what_could_not_be_removed_is_told() -> None:
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
