"""`on_full="newest"`: of the captures in memory the newest is stored next; a ref never goes back, and what did not ask for it stays."""

from itertools import product
from typing import Final

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.errors import NoSpaceError, SnapshotDroppedError
from tests.effort import effort
from tests.session.save.places import MIB, SECONDS, Scene, Stop, check, put_beside, scene

SIZE: Final = 3000
COPY: Final = 2 * MIB
"""What a capture takes."""
SAVES: Final = {"n": ("job", "newest"), "o": ("other", "newest"), "b": ("job", "block"), "r": ("job", "replace")}
"""Letter -> ref and policy; `f` finishes the save in work."""


class Model:
    """What is in memory, and what becomes of it."""

    def __init__(self, place: Scene, copies: int) -> None:
        self.place = place
        self.copies = copies
        self.made: dict[int, tuple[str, tsck.PendingSnapshot]] = {}
        """Step -> the letter of the save, and the save."""
        self.in_work: int | None = None
        self.waiting: list[int] = []
        self.published: list[int] = []
        self.stop: Stop | None = None

    def save(self, letter: str) -> None:
        if len(self.waiting) + (self.in_work is not None) == self.copies:
            if letter == "b" or not self.waiting:
                self.finish()
            else:
                self.waiting.remove(min(self.waiting, key=lambda step: (not self.is_obsolete(step, letter), step)))
        step = len(self.made) + 1
        if self.in_work is None:
            self.stop = self.place.gate.stop("put parts/")
        ref, on_full = SAVES[letter]
        self.made[step] = letter, put_beside(self.place.store, step, size_bytes=SIZE, ref=ref, on_full=on_full)
        self.waiting = [*(other for other in self.waiting if not self.is_obsolete(other, letter)), step]
        self.begin()

    def is_obsolete(self, step: int, letter: str) -> bool:
        return self.made[step][0] == letter and SAVES[letter][1] == "newest"

    def begin(self) -> None:
        if self.in_work is None and self.waiting:
            assert self.stop is not None
            self.in_work = self.waiting.pop(0)
            self.stop.await_reached()

    def finish(self) -> None:
        if self.in_work is None:
            return
        before, self.stop = self.stop, self.place.gate.stop("put parts/")
        assert before is not None
        before.let_go()
        self.made[self.in_work][1].wait(SECONDS)
        self.published.append(self.in_work)
        self.in_work = None
        if self.waiting:
            self.begin()
        else:
            self.place.store.session.queue.wait_idle()
            self.stop.let_go()
            self.place.gate.open()

    def check(self) -> None:
        assert self.place.in_use_bytes == COPY * (len(self.waiting) + (self.in_work is not None))

    def end(self) -> None:
        while self.in_work is not None:
            self.finish()
        self.place.store.drain()
        for ref in ("job", "other"):
            assert self.place.steps(ref) == [step for step in self.published if SAVES[self.made[step][0]][0] == ref]
        for step, (letter, pending) in self.made.items():
            if step in self.published:
                check(self.place.store, step, size_bytes=SIZE, ref=SAVES[letter][0])
            else:
                with pytest.raises(SnapshotDroppedError, match="was replaced"):
                    pending.wait(0)


@pytest.mark.race
@pytest.mark.parametrize(("letters", "length"), [("nf", effort(4, 10)), ("no", effort(3, 6)), ("nobrf", effort(2, 5))])
def test_all_orders_of_saves_and_ends(letters: str, length: int) -> None:
    for order in product(letters, repeat=length):
        with scene(host_memory_bytes=3 * COPY) as place:
            model = Model(place, 3)
            for letter in ("n", *order):
                model.finish() if letter == "f" else model.save(letter)
                model.check()
            model.end()


def test_a_save_that_cannot_be_captured_replaces_nothing() -> None:
    with scene(host_memory_bytes=2 * COPY) as place:
        stop, _ = place.hold(1, size_bytes=SIZE, on_full="newest")
        second = put_beside(place.store, 2, size_bytes=SIZE, on_full="newest")
        with pytest.raises(NoSpaceError):
            put_beside(place.store, 3, size_bytes=3 * COPY, on_full="newest")
        stop.let_go()
        second.wait(SECONDS)
        assert place.steps() == [1, 2]
