"""A new user at a terminal: types commands, and follows every command that is printed in backticks, exactly as it is printed.

A printed command that nobody followed fails the walk, and so does one that is a misuse of the command line, or that ends with another
exit code than a user may expect of it: 0, unless the walk says otherwise.
"""

import os
import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import pytest

from tensorstore_ck.cli.command_groups import USAGE
from tests.end_to_end.walks.terminal import Terminal

REPOSITORY: Final = Path(__file__).parents[3]
PRINTED: Final = re.compile(r"`(tsck(?: [^`]*)?)`")
PLACEHOLDER: Final = re.compile(r"(?<![\w./-])[A-Z]{2,}(?:_[A-Z]+)*(?![\w./-])")


class Said(NamedTuple):
    """What one command, or one program, printed."""

    line: str
    code: int
    text: str
    """As it is on the terminal, errors and warnings among it; wrapped lines are one."""

    @property
    def lines(self) -> list[str]:
        """Of the text, but for what is printed to stderr where a store is made or a run resumes."""
        notices = ("made a new store at ", "nothing to resume: ", "resuming from ")
        return [line for line in self.text.splitlines() if not line.startswith(notices)]

    @property
    def printed(self) -> list[str]:
        """The commands in it, each once."""
        return list(dict.fromkeys(PRINTED.findall(self.text)))


class Walk:
    """A session in a terminal, whose folder is the current one, with a cache and a catalog of its own. Leaving it fails if a hint is left
    over.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._to_follow: dict[str, str] = {}
        self._followed: set[str] = set()
        self._typed = self._as_printed = 0
        self.clicks = 0
        self._open = ExitStack()
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith("TSCK_") or name == "PYTHONWARNINGS"]:
            patch.delenv(name)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

    def __enter__(self) -> Self:
        self.terminal = self._open.enter_context(Terminal())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()
        print(f"{self._typed} commands typed, {self._as_printed} of them as they were printed; {self.clicks} clicks")
        assert kind or not self._to_follow, "nobody followed:\n" + "\n".join(f"{one}\n    {by}" for one, by in self._to_follow.items())

    def type(self, line: str, code: int = 0) -> Said:
        """Types a line, and reads what it prints."""
        self.terminal.begin(line)
        return self.read_on(line, code)

    def read_on(self, line: str, code: int = 0) -> Said:
        """Reads what a line prints that was typed, until it has ended."""
        self._typed += 1
        text, ended_with = self.terminal.end()
        return self._heard(Said(line, ended_with, text), code)

    def python(self, *arguments: str, code: int = 0) -> Said:
        """Types ``python ...``."""
        return self.type(shlex.join(["python", *arguments]), code)

    def read(self, text: object, where: str) -> Said:
        """Notes what a user reads elsewhere: an exception in a notebook."""
        return self._heard(Said(where, 0, str(text)), 0)

    def follow(self, said: Said, beginning: str, code: int = 0, **filled: str) -> Said:
        """Runs the one command in `said` that begins so, exactly as it is printed.

        Args:
            said: Where it is printed.
            beginning: Its first words after ``tsck``.
            code: The exit code that a user may expect.
            filled: What a user writes for each placeholder in it.
        """
        fitting = [printed for printed in said.printed if printed.startswith(f"tsck {beginning}")]
        assert len(fitting) == 1, f"{len(fitting)} commands begin with 'tsck {beginning}' in:\n{said}"
        (printed,) = fitting
        line = printed
        for placeholder, value in filled.items():
            line, count = re.subn(rf"(?<![\w./-]){placeholder}(?![\w./-])", lambda _, value=value: shlex.quote(value), line)  # type: ignore[misc]
            assert count, f"there is no {placeholder} in {printed}"
        left = PLACEHOLDER.findall(re.sub(r"'[^']*'", "", printed if not filled else line))
        assert not [word for word in left if word not in filled.values()], f"what is a user to write for {left} in {printed}?"
        done = self.type(line, code)
        self._as_printed += 1
        self._followed.add(printed)
        self._to_follow.pop(printed, None)
        return done

    def follow_all(self, said: Said, **filled: str) -> None:
        """Follows each command that it prints, and each that these print."""
        for printed in said.printed:
            if printed not in self._followed:
                here = {name: value for name, value in filled.items() if name in PLACEHOLDER.findall(printed)}
                self.follow_all(self.follow(said, printed.removeprefix("tsck "), 0, **here), **filled)

    def _heard(self, said: Said, code: int) -> Said:
        assert said.code == code, said
        assert code != USAGE, said
        self._followed.add(said.line)
        self._to_follow.pop(said.line, None)
        if said.line.startswith("tsck help "):  # an entry of a page, whose commands are for any store
            return said
        for printed in said.printed:
            if printed not in self._followed:
                self._to_follow.setdefault(printed, f"of: {said.line}")
        return said
