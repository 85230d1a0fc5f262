"""Completes refs, steps after ``@`` and metrics, from the store that the command line or the environment names.

A local store's log is followed; of a remote store this host's cache is read, and the store is not asked. Takes `DEADLINE_SECONDS` at most,
and offers nothing when anything goes wrong. Only names that mean nothing to a shell are offered.

A small file in the cache's folder, named by a hash of the URL and its options, says which cache belongs to a remote store. A command writes
it when it opens the store. It may be lost or wrong: it is used for completion alone. The folder is this user's alone, since the cache's
folder may be one where others can write.
"""

import hashlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import platformdirs

from tensorstore_ck.common.owned_files import FILE_MODE
from tensorstore_ck.common.private_folder import PrivateFolder
from tensorstore_ck.common.replace_file import replace_file_in
from tensorstore_ck.errors import PermissionDeniedError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from tensorstore_ck.log import RefTable

DEADLINE_SECONDS: Final = 1.0
MAX_OFFERED: Final = 200
"""Steps, newest first."""
_LOOKED_AT: Final = 1000
"""Snapshots, for the names of their metrics."""
_PLAIN: Final = re.compile(r"[\w./:+%-]+", re.ASCII)

Names = Iterator[tuple[str, str]]
"""Each candidate, with a word that says what it is."""


class _TooLongError(BaseException):
    """The deadline has passed. No handler of other errors may catch it."""


def complete_ref(context: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem[Any]]":
    """Branches."""
    return _offered(context, incomplete, lambda view: ((name, "branch") for name in view.branches()))


def complete_tag(context: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem[Any]]":
    """Tags."""
    return _offered(context, incomplete, lambda view: ((name, "tag") for name in view.tags()))


def complete_address(context: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem[Any]]":
    """Branches and tags; after ``@`` the steps of the branch."""

    def names(view: "RefTable") -> Names:
        base, at, _ = incomplete.partition("@")
        if at:
            seen = dict.fromkeys(info.step for info in view.history(base) if info.step is not None)
            yield from ((f"{base}@{step}", "step") for step in seen)
        else:
            yield from ((name, "branch") for name in view.branches())
            yield from ((name, "tag") for name in view.tags())

    return _offered(context, incomplete, names)


def complete_metric(context: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem[Any]]":
    """Metrics of the newest snapshots of the branch that the command line has, or of all branches."""

    def names(view: "RefTable") -> Names:
        ref = context.params.get("ref")
        infos = (info for branch in ([ref] if ref else view.branches()) for info in view.history(branch, limit=_LOOKED_AT))
        yield from ((name, "metric") for name in sorted({name for info in infos for name in info.metrics}))

    return _offered(context, incomplete, names)


def _offered(context: click.Context, incomplete: str, names: "Callable[[RefTable], Names]") -> "list[CompletionItem[Any]]":
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - only a completion needs it

    offers = list[tuple[str, str]]()
    with suppress(Exception, _TooLongError), _deadline(), _view(context) as view:
        if view is not None:
            fit = ((name, what) for name, what in names(view) if name.startswith(incomplete) and _PLAIN.fullmatch(name.replace("@", "")))
            offers.extend(islice(fit, MAX_OFFERED))
    return [CompletionItem(name, help=what) for name, what in offers]


@contextmanager
def _deadline() -> Iterator[None]:
    def end(*_: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _view(context: click.Context) -> "Iterator[RefTable | None]":
    """The ref table of the store; None if this host knows nothing of it."""
    from tensorstore_ck.cli.options import StoreChoice  # noqa: PLC0415 - imports this module
    from tensorstore_ck.log import RefTable  # noqa: PLC0415
    from tensorstore_ck.log.cache import open_table  # noqa: PLC0415

    given = context.params
    options, cache_dir = dict(given.get("storage_option") or ()), given.get("cache_dir")
    choice = StoreChoice(given.get("store"), options, cache_dir, state_dir=given.get("state_dir"))
    url = choice.require_url()
    if not is_remote(url):
        engine = choice.open_engine(read_only=True)
        try:
            yield engine.log.readable_view()
        finally:
            engine.close()
    elif (key := find_key(url, options, cache_dir)) is None:
        yield None
    else:
        with closing(open_table(Path(cache_dir) if cache_dir else None, key)) as table:
            yield RefTable(table)


_MAX_KEY_BYTES: Final = 200
_KEY: Final = re.compile(f"[0-9A-Za-z-]{{1,{_MAX_KEY_BYTES}}}")


def note_store(url: str, options: Mapping[str, Any], cache_dir: str | None, key: str) -> None:
    """Notes the key of a remote store's cache. A local store needs no note, since its configuration has the key."""
    if not is_remote(url) or find_key(url, options, cache_dir) == key:
        return
    with suppress(OSError, PermissionDeniedError), closing(_folder(cache_dir)) as folder:
        replace_file_in(folder.make(), _name(url, options), key.encode("ascii"), mode=FILE_MODE)


def find_key(url: str, options: Mapping[str, Any], cache_dir: str | None) -> str | None:
    """The key that `note_store` noted, if any."""
    with suppress(OSError, ValueError, PermissionDeniedError), closing(_folder(cache_dir)) as folder:
        with open(os.open(_name(url, options), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd()), "rb") as file:
            key = file.read(_MAX_KEY_BYTES + 1).decode("ascii")
        return key if _KEY.fullmatch(key) else None
    return None


def is_remote(url: str) -> bool:
    """Whether reading the store takes a network."""
    return "://" in url and not url.startswith(("file://", "memory://"))


def _folder(cache_dir: str | None) -> PrivateFolder:
    base = platformdirs.user_cache_path("tensorstore_ck", appauthor=False) if cache_dir is None else Path(cache_dir)
    return PrivateFolder(os.path.abspath(base / "known"))


def _name(url: str, options: Mapping[str, Any]) -> str:
    what = json.dumps([url.rstrip("/"), options], sort_keys=True, default=str)
    return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
