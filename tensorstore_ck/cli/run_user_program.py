"""Runs the user's program for a snapshot: the ``--exec`` of `watch` and `bisect`."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log.snapshot import Snapshot

_STDERR = 2


def program_words(program: str) -> list[str]:
    """The words of a command line, with placeholders; no shell reads it.

    Raises:
        InvalidOptionError: it cannot be split into words, is empty, or has other placeholders.
    """
    try:
        words = shlex.split(program)
        _filled(words, dict.fromkeys(("root", "step", "ref", "store"), ""))
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as exc:
        raise InvalidOptionError(
            f"--exec {program!r} cannot be run: {exc}; {{root}}, {{step}}, {{ref}} and {{store}} are filled in, and {{{{ is a brace"
        ) from exc
    if not words:
        raise InvalidOptionError("--exec is empty", object_id="exec")
    return words


def run_program(words: Sequence[str], snapshot: Snapshot, url: str, *, quiet: bool = False) -> int:
    """The exit status of the program, negative for a signal. With `quiet` it prints on stderr alone.

    Its environment has TSCK_STORE, TSCK_ROOT, TSCK_STEP and TSCK_REF.

    Raises:
        OSError: it could not be run.
    """
    step = "" if snapshot.step is None else str(snapshot.step)
    values = {"root": snapshot.root, "step": step, "ref": snapshot.ref, "store": url}
    environment = {**os.environ, **{f"TSCK_{name.upper()}": value for name, value in values.items()}}
    sys.stdout.flush()
    return subprocess.run(_filled(words, values), check=False, env=environment, stdout=_STDERR if quiet else None).returncode


def _filled(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    return [word.format(**values) for word in words]
