"""Seconds and bytes of the stages of a save, counted from several threads."""

import threading

import pytest

from tensorstore_ck.common.save_progress import STAGES, SaveMeter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> SaveMeter:
    return SaveMeter(clock)


def test_seconds_are_those_in_which_at_least_one_thread_was_at_it_and_bytes_those_that_did_not_fail(meter: SaveMeter, clock: Clock) -> None:
    first, second = meter.timed("hash", 10), meter.timed("hash", 20)
    first.__enter__()
    clock.now += 1
    second.__enter__()
    clock.now += 1
    first.__exit__(None, None, None)
    assert (meter.snapshot().stage_seconds["hash"], meter.snapshot().stage_bytes["hash"]) == (2.0, 10), "one is still at it"
    clock.now += 1
    second.__exit__(None, None, None)
    clock.now += 100
    with meter.timed("hash", 30):
        clock.now += 4
    assert (meter.snapshot().stage_seconds["hash"], meter.snapshot().stage_bytes["hash"]) == (7.0, 60)
    assert meter.snapshot().stage_seconds["write"] == 0.0

    def fail() -> None:
        clock.now += 2
        raise OSError("full")

    with pytest.raises(OSError, match="full"), meter.timed("write", 10):
        fail()
    assert (meter.snapshot().stage_seconds["write"], meter.snapshot().stage_bytes["write"]) == (2.0, 0)


def test_stages_go_forward_only_and_show_the_bytes_that_are_known(meter: SaveMeter, clock: Clock) -> None:
    progress = meter.snapshot()
    assert (progress.stage, progress.done_bytes, progress.total_bytes, progress.fraction) == ("queued", 0, 0, 0.0)
    assert progress.seconds_fields() == {f"{stage}_seconds": 0.0 for stage in STAGES}
    meter.expect("hash", 100)
    with meter.timed("capture", 70):
        assert meter.snapshot().stage == "capture"
        clock.now += 0.5
    assert (meter.snapshot().stage, meter.snapshot().total_bytes) == ("queued", 0)
    clock.now += 10
    with meter.timed("hash", 20):
        clock.now += 2
    with meter.timed("write", 15):
        with meter.timed("hash", 20):
            clock.now += 1
        clock.now += 2
        progress = meter.snapshot()
    assert (progress.stage, progress.done_bytes, progress.total_bytes, progress.fraction) == ("write", 40, 100, 0.4)
    assert progress.bytes_per_second == 40 / 5  # since the first block, whatever stage caused the delay
    meter.expect("upload", 15)
    for _ in range(2):  # a second try
        with meter.timed("upload", 15):
            clock.now += 0.5
    assert meter.snapshot().fraction == 1.0
    with meter.timed("commit"):
        progress = meter.snapshot()
        assert (progress.stage, progress.done_bytes, progress.total_bytes) == ("commit", 15, 15)
    assert dict(progress.stage_seconds) == {"capture": 0.5, "hash": 3.0, "encode": 0.0, "write": 3.0, "upload": 1.0, "commit": 0.0}


def test_many_threads_lose_nothing(meter: SaveMeter) -> None:
    def work() -> None:
        for _ in range(1000):
            with meter.timed("hash", 1):
                pass
            with meter.timed("write", 2):
                meter.snapshot()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (meter.snapshot().stage_bytes["hash"], meter.snapshot().stage_bytes["write"]) == (4000, 8000)
