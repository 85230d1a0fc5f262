"""Any command on a store anywhere, whatever is wrong there: it does its work, or says in one line why not, and has changed nothing."""

import contextlib
import importlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.backend.chaos import ChaosProxy, Fault, chaos_proxy
from tests.effort import effort
from tests.end_to_end.any_place import (
    COMMANDS,
    FINDS,
    FOLDER_FAULTS,
    FOLDERS,
    S3,
    S3_FAULTS,
    Outcome,
    as_arguments,
    fill,
    held_locks,
    in_child,
    load_modules,
    run,
    s3_options,
    seen,
    stage,
    strike_folder,
    strike_server,
    url_in_bucket,
)
from tests.servers import BUCKET, S3Server

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount"), pytest.mark.filterwarnings("ignore")]
Case = tuple[str, str, str]
SEED: Final = 42
COUNT: Final = effort(60, 900)
SHARES: Final = 8
CHANGING: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "put": lambda before, after: "runs/new" in after["branches"],
    "tag": lambda before, after: "new" in after["tags"],
    "mark": lambda before, after: after["marks"][0][1] == "bad",
    "pin": lambda before, after: after["pins"] == ["me"],
    "policy": lambda before, after: after["policies"] == ["runs/*"],
    "quota": lambda before, after: after["quotas"] == ["runs/*"],
    "forget": lambda before, after: "runs/old" not in after["branches"],
    "undo": lambda before, after: "runs/gone" in after["branches"],
    "reset": lambda before, after: after["branches"]["runs/gpt"] != before["branches"]["runs/gpt"],
}


def cases() -> list[Case]:
    """Drawn with a fixed seed, without those that cannot be."""
    folders = itertools.product(FOLDERS, FOLDER_FAULTS, [name for name in COMMANDS if name not in ("staging", "resume")])
    staged = itertools.product(S3[1:], S3_FAULTS, ("staging", "resume", "log", "put", "fsck"))
    servers = itertools.product(S3[:1], S3_FAULTS, [name for name in COMMANDS if name not in ("staging", "resume")])
    return random.Random(SEED).sample([*folders, *servers, *staged], COUNT)


def is_one_line(outcome: Outcome) -> bool:
    """One line says what is wrong, apart from warnings."""
    lines = [
        line for line in outcome.err.splitlines() if line.startswith("tsck: ") and not line.startswith(("tsck: warning: ", "tsck: noted"))
    ]
    return len(lines) == 1 or (not lines and bool(outcome.out))


def judge(case: Case, outcome: Outcome, before: dict[str, Any], after: dict[str, Any] | None) -> None:
    place, fault, command = case
    shown = f"{place}; {fault}; {command}: {outcome.code}\n{outcome.out}\n{outcome.err}\n{outcome.trouble}"
    assert not outcome.trouble, shown
    assert "Traceback" not in outcome.err, shown
    if outcome.code == 0 or (outcome.code in FINDS and command in ("fsck", "fsck of data", "repair")):
        if after is not None and command in CHANGING:
            assert CHANGING[command](before, after), shown
        return
    assert is_one_line(outcome), shown
    if after is not None:
        assert after == before, shown


def torn(path: Path) -> None:
    """The newest pack and the newest part end in the middle, as after a power failure."""
    for kind in ("packs", "parts"):
        newest = max((found for found in (path / kind).rglob("*") if found.is_file()), key=lambda found: found.name)
        newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])


class Templates:
    """Stores that each case has a copy of."""

    def __init__(self, folder: Path, *, is_for_many: bool) -> None:
        """`is_for_many`: loads first what all processes need."""
        self.folder = folder
        (folder / "home").mkdir()
        in_child(partial(fill, str(folder / "home" / "a store"), {}, folder / "home"))
        if not is_for_many:
            return
        shutil.copytree(folder / "home", folder / "loading")
        for name in in_child(partial(load_modules, str(folder / "loading" / "a store"), folder / "loading")):
            with contextlib.suppress(Exception):
                importlib.import_module(name)

    def place(self, name: str, number: int) -> tuple[str, Path]:
        """The URL, and the folder of other files."""
        folder = self.folder / (f"with blanks {number}" if name == "folder with blanks" else f"n{number}")
        shutil.copytree(self.folder / "home", folder)
        url = folder / "a store"
        if name == "folder":
            url = url.rename(folder / "ck")
        if name == "copied folder":
            shutil.copytree(url, url := folder / "a copy")
        return str(url), folder


def try_folder(templates: Templates, number: int, case: Case) -> None:
    place, fault, command = case
    url, folder = templates.place(place, number)
    before = in_child(partial(seen, url, {}, folder))
    if fault == "torn":
        torn(Path(url))
    if fault == "no store.json":
        Path(url, "store.json").unlink()

    def work() -> list[Any]:
        strike_folder(fault, url, folder)
        outcome = run(COMMANDS[command], url, [], folder)
        if fault == "vanished":
            assert not Path(url).exists() or not any(Path(url).rglob("log/*/*")), "a store was begun in its place"
            shutil.rmtree(url, ignore_errors=True)
            os.rename(f"{url} away", url)
        return [*outcome, seen(url, {}, folder) if fault != "no store.json" else None]

    if fault == "lock held":
        with held_locks(folder):
            *outcome, after = in_child(work)
    else:
        *outcome, after = in_child(work)
    judge(case, Outcome(*outcome), before, json.loads(json.dumps(after)))
    shutil.rmtree(folder)


def try_server(templates: Templates, server: S3Server, proxy: ChaosProxy, number: int, case: Case) -> None:
    place, fault, command = case
    _, folder = templates.place("folder", number)
    shutil.rmtree(folder / "cache")
    url, options = url_in_bucket(number), s3_options(proxy.url)
    proxy.plan = lambda _: Fault.NONE
    shutil.rmtree(folder / "other")
    in_child(partial(fill, url, options, folder))
    if place != S3[0]:
        in_child(partial(stage, url, options, folder))
    before = in_child(partial(seen, url, options, folder))
    client = server.client()
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    if fault == "torn":
        for kind in ("packs", "parts"):
            found = [each["Key"] for each in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/{kind}/")["Contents"]]
            key = max(found, key=lambda key: key.rpartition("/")[2])
            data = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            client.put_object(Bucket=BUCKET, Key=key, Body=data[: len(data) // 2])
    if fault == "no store.json":
        client.delete_object(Bucket=BUCKET, Key=f"{prefix}/store.json")
    strike_server(fault, proxy)

    def work() -> list[Any]:
        strike_folder(fault if fault == "cache full" else "", url, folder)
        arguments = [] if command == "copy" else as_arguments(options)
        if command == "copy":
            arguments = [word.replace("--storage-option", "--from-storage-option") for word in as_arguments(options)]
        return list(run(COMMANDS[command], url, arguments, folder))

    if fault == "lock held":
        with held_locks(folder):
            outcome = in_child(work)
    else:
        outcome = in_child(work)
    proxy.hang_up()
    proxy.plan = lambda _: Fault.NONE
    after = in_child(partial(seen, url, options, folder)) if fault != "no store.json" else None
    if command == "resume" and after is not None:  # of several staged saves, one may be published
        before = after
    judge(case, Outcome(*outcome), before, after)
    shutil.rmtree(folder)


def try_each(tmp_path: Path, wanted: list[tuple[int, Case]], attempt: Callable[[Templates, int, Case], None]) -> None:
    """All of them; reports every one that went wrong."""
    templates, wrong = Templates(tmp_path, is_for_many=len(wanted) > 1), []
    for number, case in wanted:
        try:
            attempt(templates, number, case)
        except Exception as exc:  # noqa: BLE001 - reported below
            wrong.append(f"{case}: {exc!s:.1500}")
    assert not wrong, f"{len(wrong)} of {len(wanted)}:\n" + "\n\n".join(wrong)


def test_one_in_a_folder(tmp_path: Path) -> None:
    try_each(tmp_path, [(0, ("folder with blanks", "read-only", "tag"))], try_folder)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_many_in_folders(tmp_path: Path, share: int) -> None:
    wanted = [(number, case) for number, case in enumerate(cases()) if case[0] in FOLDERS]
    try_each(tmp_path, wanted[share::SHARES], try_folder)


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize("share", range(SHARES))
def test_many_in_s3(tmp_path: Path, moto_server: S3Server, share: int) -> None:
    wanted = [(number, case) for number, case in enumerate(cases()) if case[0] in S3]
    with chaos_proxy(moto_server.port) as proxy:
        try_each(tmp_path, wanted[share::SHARES], lambda templates, number, case: try_server(templates, moto_server, proxy, number, case))
