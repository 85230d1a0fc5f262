"""The command doctor: what a report of a problem needs to say about this installation, this host and a store."""

import os
import platform
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Final

import click
import platformdirs

import tensorstore_ck
from tensorstore_ck.cli.options import StoreChoice, command, store_options
from tensorstore_ck.cli.output import counted, emit, facts, printable
from tensorstore_ck.common.extras import EXTRAS
from tensorstore_ck.common.filesystem_kind import filesystem_of
from tensorstore_ck.common.host_memory import free_bytes
from tensorstore_ck.common.units import human_bytes, iso_time
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.codec.compiled import HAS_KERNEL
from tensorstore_ck.redaction import display_url

PACKAGES: Final = ("torch", "numpy", "fsspec", "lmdb", "blake3", "zstandard")


@command("Print ten lines for a report of a problem.", "tsck doctor", "tsck doctor -s ./ckpt")
@store_options()
@click.pass_context
def doctor(context: click.Context, choice: StoreChoice, *, as_json: bool) -> None:
    """Print versions, extras, caches, disks, whether the store can be reached, and clocks: ten lines to paste into a report.

    Secrets of URLs and storage options are left out, and of environment variables only names are printed. Nothing is changed. Exits with
    the code of the error if the store cannot be opened.
    """
    lines, failure = dict(_installation(choice)), None
    if choice.url or choice.is_here():
        try:
            lines |= _store(choice)
        except StoreError as exc:
            lines["store"] = f"{display_url(choice.require_url())}: {exc.kind}: {exc}"
            failure = exc
    else:
        lines["store"] = "none given: -s URL looks at one"
    emit(lines, facts((name, printable(text)) for name, text in lines.items()), as_json=as_json)
    if failure is not None:
        context.exit(failure.exit_code)


def _installation(choice: StoreChoice) -> Iterator[tuple[str, str]]:
    yield "tsck", f"{tensorstore_ck.__version__}, Python {platform.python_version()}, {platform.platform()}"
    kernel = "compiled" if HAS_KERNEL else "numpy (the compiled module is not there, or of older sources)"
    yield "packages", f"{', '.join(_versions(PACKAGES))}; kernel: {kernel}"
    extras = {extra: _versions(re.split(r"[\[<>=]", each, maxsplit=1)[0] for each in needed) for extra, needed in EXTRAS.items()}
    whole = {extra: versions for extra, versions in extras.items() if not any("missing" in version for version in versions)}
    yield "extras", ", ".join(f"{extra} ({', '.join(versions)})" for extra, versions in whole.items()) or "none"
    yield "not installed", ", ".join(extra for extra in extras if extra not in whole)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "host", f"{cores} cores, {human_bytes(free_bytes())} of memory free"
    yield "cache", _folder(choice.cache_dir or platformdirs.user_cache_path("tensorstore_ck", appauthor=False))
    yield "seen logs", _folder(choice.state_dir or platformdirs.user_state_path("tensorstore_ck", appauthor=False))
    yield "variables", ", ".join(sorted(name for name in os.environ if name.startswith("TSCK_"))) or "no TSCK_*"


def _versions(names: Iterable[str]) -> list[str]:
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} missing")
    return versions


def _folder(folder: str | Path) -> str:
    """The filesystem and the free space of a folder, or of the nearest existing folder above it."""
    path = there = Path(folder)
    while not there.exists():
        there = there.parent
    state = "" if there == path else ", not there yet"
    state += "" if os.access(there, os.W_OK) else ", NOT writable"
    disk = os.statvfs(there)
    return f"{path}{state} ({filesystem_of(there) or 'unknown filesystem'}, {human_bytes(disk.f_bavail * disk.f_frsize)} free)"


def _store(choice: StoreChoice) -> Iterator[tuple[str, str]]:
    began = time.perf_counter()
    with closing(choice.open_engine(read_only=True)) as engine:
        view = engine.log.newest_view()
        opened_ms = (time.perf_counter() - began) * 1000
        head, space, backend = view.head(), engine.backend.space(), engine.backend
        entries = 0 if head is None else head.n
        branches = counted(sum(1 for _ in view.branches()), "branch")
        yield "store", f"{backend.url}: {branches}, {entries:,} log entries; opened in {opened_ms:.0f} ms"
        yield "disk", "" if space is None else f"{human_bytes(space.free_bytes)} of {human_bytes(space.total_bytes)} free"
        entry = engine.log.chain.read(entries) if entries else None
        now_ns = time.time_ns()
        age = "" if entry is None else _age((now_ns - entry.time_ns) / 1e9)
        yield "clock", f"{iso_time(now_ns)}{age}"


def _age(seconds: float) -> str:
    ahead = "; a clock is wrong" if seconds < 0 else ""
    return f"; the newest entry of the log is from {abs(seconds):,.0f} s {'in the future' if seconds < 0 else 'ago'}{ahead}"
