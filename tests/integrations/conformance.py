"""What every adapter of a trainer promises, as a class of tests: subclass it and define `train`.

[CONTRIBUTING.md](../../CONTRIBUTING.md) has an example; `test_conformance.py` applies it to a loop of one's own.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tests.effort import in_turns
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.gc.stores import contents, open_store
from tests.training.resume_rule import ALL, check_door

STEPS = 4
MOST_CALLS = 1000
"""More calls of a backend than two steps make."""


class Trained(NamedTuple):
    """What a run did."""

    resumed_at: int | None
    """The step of the snapshot from which it continued; None: it began."""
    state: Mapping[str, torch.Tensor]
    """Weights, moments and whatever else must be equal, at its end."""


class AdapterConformance(ABC):
    """The tests."""

    ref: ClassVar = "runs/job"
    """The branch to which `train` saves."""
    first_step: ClassVar = 1
    """The step of the first snapshot."""
    continuing: ClassVar[str]
    """A regular expression: how the error of a second run says how to continue the first."""

    @abstractmethod
    def train(self, folder: Path, store: tsck.Store, steps: int, *, resume: str | bool) -> Trained:
        """Trains as a user's script does, which is started again after each kill: with the seed, the data and the model made new.

        Each step is followed by a save that is waited for, and changes at least 8 KB of weights. Something random is in each step.

        Args:
            folder: For the trainer's own files; the same for all runs of one job.
            store: Where it saves, to `ref`.
            steps: The number of completed steps after which it ends, those before a resume included.
            resume: From an address, such as ``runs/job@2``; True: from the newest snapshot, or the beginning; False: a new run.
        """

    def test_a_resumed_run_does_what_an_undisturbed_one_does(self, tmp_path: Path) -> None:
        whole = self._whole(tmp_path)
        backend = MemoryBackend()
        assert self.train(tmp_path / "cut", open_store(backend), 2, resume=True).resumed_at is None
        resumed = self.train(tmp_path / "cut", open_store(backend), STEPS, resume=True)
        assert resumed.resumed_at == self.first_step + 1
        _assert_equal(resumed, whole)
        assert [each.step for each in open_store(backend).log(self.ref)][::-1] == [*range(self.first_step, self.first_step + STEPS)]

    @pytest.mark.parametrize("case", ALL)
    def test_which_snapshot_a_resume_takes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
        def save(store: tsck.Store) -> None:
            self.train(tmp_path / "out", store, 3, resume=False)

        def resume(store: tsck.Store, address: str | None) -> int | None:
            return self.train(tmp_path / "out", store, STEPS, resume=address or True).resumed_at

        check_door(case, tmp_path, monkeypatch, self.ref, save=save, resume=resume)

    def test_a_new_run_does_not_take_over_the_branch_of_another(self, tmp_path: Path) -> None:
        backend = MemoryBackend()
        self.train(tmp_path / "one", open_store(backend), 2, resume=False)
        before = open_store(backend).log(self.ref)
        with pytest.raises(tsck.ConflictError, match=self.continuing):
            self.train(tmp_path / "other", open_store(backend), 1, resume=False)
        assert open_store(backend).log(self.ref) == before

    @pytest.mark.race
    def test_a_death_at_every_call_of_the_store(self, tmp_path: Path) -> None:
        """Of a run that resumes and saves: the next one is, in the end, equal to the undisturbed one."""
        whole = self._whole(tmp_path)
        before = MemoryBackend()
        self.train(tmp_path / "cut", open_store(before), 2, resume=False)
        seen: set[int | None] = set()
        for at, mode in in_turns(range(1, MOST_CALLS), ["die-before", "die-after", "tear"]):
            backend, faults = MemoryBackend(), Faults(mode)
            for name, data in contents(before).items():
                backend.put(name, data)
            store = open_store(FaultyBackend(backend, faults, atomic_put=False))
            faults.calls, faults.at = 0, at
            with suppress(Death):
                self.train(tmp_path / "cut", store, 3, resume=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a folder whose save was never published
                resumed = self.train(tmp_path / "cut", open_store(backend), STEPS, resume=True)
            _assert_equal(resumed, whole)
            seen.add(resumed.resumed_at)
            if not faults.struck:
                break
        assert not faults.struck
        assert seen == {self.first_step + 1, self.first_step + 2}

    def _whole(self, folder: Path) -> Trained:
        return self.train(folder / "whole", open_store(), STEPS, resume=False)


def _assert_equal(one: Trained, other: Trained) -> None:
    assert one.state.keys() == other.state.keys()
    assert [name for name, tensor in one.state.items() if not torch.equal(tensor, other.state[name])] == []
