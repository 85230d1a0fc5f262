"""What a script prints for an error: its own lines, the message, and the command that says what to do."""

import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fsspec.registry import known_implementations

import tensorstore_ck as tsck
from tensorstore_ck.common.user_frames import short_errors, user_stacklevel
from tests.long_errors import long_errors

PACKAGE = Path(tsck.__file__).parent
STATE = {"w": torch.arange(4000.0)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as found:
        found.put_snapshot(STATE, ref="runs/a", step=1)
        yield found


def _corrupt(store: tsck.Store) -> object:
    for pack in Path(store.url, "packs").rglob("*"):
        if pack.is_file():
            data = bytearray(pack.read_bytes())
            data[2000:2064] = bytes(64)
            pack.chmod(0o600)
            pack.write_bytes(data)
    return store.checkout("runs/a")


def _rows_of_corrupt(store: tsck.Store) -> object:
    with pytest.raises(tsck.CorruptObjectError):
        _corrupt(store)
    return list(store.open_snapshot("runs/a")["w"])


def _again(store: tsck.Store) -> object:
    with tsck.open(store.url) as other:
        return other.put_snapshot_async(STATE, ref="runs/a", step=1).wait()


def _without_its_library(_: tsck.Store) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(known_implementations, "absent", {"class": "no_such_module.FileSystem", "err": "install no_such_module"})
        return tsck.open("absent://bucket/ckpt")


CASES: dict[str, tuple[str, Callable[[tsck.Store], object]]] = {
    "wrong ref": ("not_found", lambda store: store.checkout("runs/b")),
    "wrong step": ("not_found", lambda store: store.show("runs/a@7")),
    "wrong store": ("not_a_store", lambda store: tsck.open(f"{store.url}/nothing")),
    "wrong URL": ("invalid_url", lambda _: tsck.open("s4://bucket")),
    "a rerun": ("conflict", _again),
    "no space": ("no_space", lambda store: tsck.open(store.url, min_free="1000TB")),
    "a corrupt block": ("corrupt_object", _corrupt),
    "an open file in the state": ("unsupported_value", lambda store: store.put_snapshot({"f": sys.stdin}, ref="runs/b")),
    "another model": ("mismatch", lambda store: store.checkout("runs/a", into={"v": torch.zeros(3)})),
    "a state of nobody's": ("mismatch", lambda store: tsck.TrainingState(model=torch.nn.Linear(1, 1)).restore(store, "runs/a")),
    "a bad trigger": ("invalid_option", lambda store: tsck.Checkpointer(store, {}, ref="runs/c", when="often")),  # type: ignore[arg-type]
    "a trigger and a number": ("invalid_option", lambda _: tsck.every_steps(5) | 3),  # type: ignore[operator]
    "no such trigger": ("invalid_option", lambda _: tsck.every_steps(0)),
    "an option that a dataclass refuses": ("invalid_option", lambda _: tsck.GcOptions(max_delete=7)),
    "a wrong ref, lazily": ("not_found", lambda store: store.open_snapshot("runs/b")),
    "a wrong tensor": ("not_found", lambda store: store.open_snapshot("runs/a")["v"]),
    "a wrong row": ("invalid_option", lambda store: store.open_snapshot("runs/a")["w"][4000]),
    "a corrupt block, row by row": ("corrupt_object", _rows_of_corrupt),
    "the first step of a watch": ("invalid_name", lambda store: next(store.watch("runs/a@1"))),
    "a missing extra": ("missing_extra", _without_its_library),
}


@pytest.mark.parametrize("name", CASES)
def test_a_traceback_has_the_scripts_frames_alone(store: tsck.Store, name: str) -> None:
    kind, call = CASES[name]
    with pytest.raises(tsck.StoreError) as caught:
        call(store)
    error = caught.value
    assert error.kind == kind
    assert {frame.filename for frame in traceback.extract_tb(error.__traceback__)} == {__file__}
    printed = "".join(traceback.format_exception(error)).splitlines()
    assert printed[-1] == f"`tsck help {kind}` says what to do"
    assert "tensorstore_ck/" not in "\n".join(line for line in printed if line.startswith("  File"))
    assert len(printed) <= 17, printed


WRONG_ARGUMENTS: dict[str, Callable[[tsck.Store], object]] = {
    "one too many": lambda store: store.put_snapshot({}, "runs/b"),  # type: ignore[call-arg]
    "one that is missing": lambda store: store.put_snapshot({}),  # type: ignore[call-arg]
    "a mistyped name": lambda store: tsck.open(store.url, read_onyl=True),  # type: ignore[call-overload]
    "a mistyped name of a class": lambda _: tsck.TrainingState(modle=torch.nn.Linear(1, 1)),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_arguments_that_a_call_does_not_take(store: tsck.Store, name: str) -> None:
    with pytest.raises(TypeError, match="argument") as caught:
        WRONG_ARGUMENTS[name](store)
    assert {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)} == {__file__}


def test_a_type_error_of_a_callback_keeps_its_frames(store: tsck.Store) -> None:
    def fails(_: object) -> None:
        raise TypeError("of the user's own")

    with pytest.raises(TypeError, match="own") as caught:
        store.restoring("runs/a", fails)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fails"


@pytest.mark.parametrize(
    "call",
    [
        lambda url: tsck.import_checkpoint(url, "a.pt", ref="runs/a"),
        lambda url: tsck.import_history(url, "a.pt", ref="runs/a", step_from="name"),
        lambda url: tsck.export_snapshot(url, "runs/a", "a.pt", format="torch"),
        lambda url: tsck.Checkpointer(url, {}, ref="runs/a", when=tsck.first()),
        lambda url: tsck.TrainingState(extra={"a": 1}).put(url, ref="runs/a", step=1),
        lambda url: tsck.TrainingState(extra={"a": 1}).put_async(url, ref="runs/a", step=1),
        lambda url: tsck.TrainingState(extra={"a": 1}).restore(url, "runs/a"),
        lambda url: tsck.verify_resume(lambda: pytest.fail("it has no store"), url, "runs/a"),
    ],
)
def test_the_location_of_a_store_is_not_a_store(store: tsck.Store, call: Callable[[Any], object]) -> None:
    with pytest.raises(tsck.InvalidOptionError, match="is the location of a store: pass the store itself, as tsck"):
        call(store.url)


def test_all_that_is_public_raises_short_errors() -> None:
    """By what decorates it: it is too much to call. Adapters: `tests/integrations/test_adapter_arguments.py` and their folders."""
    public = [each for name in tsck.__all__ if not isinstance(each := getattr(tsck, name), ModuleType)]
    assert long_errors(public) == []


def _fails(cause: BaseException | None = None) -> None:
    if cause is not None:
        raise tsck.NotFoundError(f"no such thing ({cause})") from cause
    raise tsck.NotFoundError("no such thing")


def _printed(call: Callable[[], object]) -> str:
    with pytest.raises(tsck.NotFoundError) as caught:
        call()
    return "".join(traceback.format_exception(caught.value))


def test_causes_are_printed_where_they_say_something(store: tsck.Store) -> None:
    def calls_back(read: Callable[[Any], Any]) -> Callable[[], object]:
        return lambda: store.restoring("runs/a", read)

    assert "OSError: disk on fire\n" not in _printed(calls_back(lambda _: _fails(OSError("disk on fire"))))

    def fails_for_another_reason(_: object) -> None:
        raise tsck.NotFoundError("no such thing") from OSError("disk on fire")

    assert "OSError: disk on fire\n\nThe above exception was the direct cause" in _printed(calls_back(fails_for_another_reason))
    try:
        _ = dict[str, int]()["what the script looked for"]
    except KeyError:
        said = _printed(lambda: store.checkout("runs/b"))
    assert "what the script looked for" in said, "the script's own error stays"


def test_frames_of_a_callback_stay(store: tsck.Store) -> None:
    assert "in _fails" in _printed(lambda: store.restoring("runs/a", lambda _: _fails()))


def test_all_frames_stay_at_debug_level(store: tsck.Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="tensorstore_ck")
    said = _printed(lambda: store.checkout("runs/b"))
    assert "address.py" in said
    assert "tsck help" not in said


def test_signatures_and_names_stay() -> None:
    import inspect

    assert "address" in inspect.signature(tsck.Store.checkout).parameters
    assert tsck.Store.checkout.__qualname__ == "ReadOnlyStore.checkout"


def test_an_error_that_passes_two_public_calls_has_one_note() -> None:
    assert _printed(short_errors(short_errors(_fails))).count("tsck help not_found") == 1


def test_a_warning_is_at_the_users_line(store: tsck.Store) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.checkout("runs/a", into={"w": torch.zeros(4000), "v": torch.zeros(1)}, strict=False)
        store.checkout("runs/a", allow_bad=True)  # type: ignore[call-arg]
    assert [each.filename for each in caught] == [__file__] * 2
    assert user_stacklevel() == 1


def test_warnings_of_a_save_name_no_line_of_this_package(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    diverged = {"w": torch.full((4000,), torch.nan)}
    with tsck.open(tmp_path / "store", create=True) as store:
        store.put_snapshot(STATE, ref="runs/a", step=1, metrics={"loss": 1.0})
        store.set_policy("runs/*", keep_best=(1, "los", "min"))
        store.set_quota("runs/*", warn=1)
        store.put_snapshot(diverged, ref="runs/a", step=2)
        store.put_snapshot_async(diverged, ref="runs/a", step=3).wait()
    caught = [(each.category.__name__, each.filename) for each in recwarn]
    assert {category for category, _ in caught} == {"SuspiciousSaveWarning", "QuotaWarning", "UnmatchedRuleWarning"}
    assert not [name for _, name in caught if name.startswith(str(PACKAGE)) or name == threading.__file__], caught
    assert ("SuspiciousSaveWarning", __file__) in caught
