"""Distinguishes a folder of one checkpoint (of several ranks, or of model, optimizer and schedule) from one of several training steps.

The second must not become one snapshot. It has steps in its file names, or different values of a usual counter (``global_step``) in files
with the same keys.
"""

import fnmatch
import glob
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tensorstore_ck.errors import AmbiguousAddressError
from tensorstore_ck.integrations.importing.lookup import top_level_step
from tensorstore_ck.integrations.importing.numbers_in_names import progress_in_names, step_in_name

_COUNTERS: Final = ("global_step", "global_steps", "step", "steps", "current_step", "iteration", "iter", "iter_num", "iters", "epoch")


class SeveralStepsError(AmbiguousAddressError):
    """A folder has checkpoints of several steps: they are a history, not one snapshot."""

    def __init__(self, folder: str, steps: Mapping[str, int], step_from: str, all_names: Sequence[str], *, can_be_one: bool = True) -> None:
        """`steps`: file name -> step, according to `step_from`. `can_be_one`: they can be imported as one snapshot."""
        by_step: dict[int, str] = {}
        self._same = next(((by_step[step], name) for name, step in steps.items() if by_step.setdefault(step, name) != name), None)
        first, last = min(steps, key=lambda name: steps[name]), max(steps, key=lambda name: steps[name])
        self._what = (
            f"{folder} has checkpoints of several steps ({first}: {steps[first]}, {last}: {steps[last]}), which are not one snapshot"
        )
        self._otherwise = "; --as-one (as_one=True) imports all files as one snapshot" if can_be_one else ""
        self._patterns = [] if self._same else _patterns(list(steps), all_names)
        self._names = [] if self._same or self._patterns else list(steps)
        self.step_from = step_from
        command = ["tsck", "import", "--history", *self.paths(folder), "--step-from", step_from, "--ref", "REF"]
        super().__init__(self.message(shlex.join(command)), object_id=folder)

    def paths(self, folder: str) -> list[str]:
        """Globs or paths for exactly those files, with `folder` as the caller writes it; empty if two have the same step."""
        patterns = [os.path.join(glob.escape(folder), pattern) for pattern in self._patterns]
        return patterns or [os.path.join(folder, name) for name in self._names]

    def message(self, command: str) -> str:
        """The error message, with `command`, which imports them as a history."""
        if self._same:
            one, other = self._same
            return (
                f"{self._what}. {one} and {other} have the same step: move the files of each step to a separate folder, "
                f"or remove one of them, and import the rest with --history{self._otherwise}"
            )
        return f"{self._what}: import them one by one with `{command}` (tsck.import_history in Python){self._otherwise}"


def require_one_step(folder: str, states: Mapping[str, Any], all_names: Sequence[str]) -> None:
    """Rejects a folder of checkpoints, by name, of several steps. Raises `SeveralStepsError` if there are several steps."""
    named = {name: step for name in states if (step := step_in_name(name)) is not None}
    if len(set(named.values())) > 1:
        raise SeveralStepsError(folder, named, "name", all_names)
    alike: dict[frozenset[object], list[str]] = {}
    for name, state in states.items():
        if isinstance(state, Mapping):
            alike.setdefault(frozenset(key for key in state if isinstance(key, str)), []).append(name)
    for keys, members in alike.items():
        if 2 * len(members) <= len(states):  # for example two objects of one class, among the files of one step
            continue
        for key in _COUNTERS:
            steps = {name: step for name in members if key in keys and (step := top_level_step(states[name], key)) is not None}
            if len(set(steps.values())) > 1:
                raise SeveralStepsError(folder, steps, f"key:{key}", all_names)
    counted = progress_in_names(list(states))
    if counted:
        raise SeveralStepsError(folder, counted, "name", all_names)


def _patterns(chosen: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """A simple glob that matches exactly these files of a folder, if there is one."""
    visible = [name for name in all_names if not name.startswith(".")]
    suffixes = {os.path.splitext(name)[1] for name in chosen}
    suffix = glob.escape(suffixes.pop()) if len(suffixes) == 1 else ""
    prefix = glob.escape(os.path.commonprefix(list(chosen)).rstrip("0123456789"))  # noqa: RUF071 - of names, not paths
    return [pattern for pattern in (f"*{suffix}", f"{prefix}*{suffix}") if set(fnmatch.filter(visible, pattern)) == set(chosen)][:1]
