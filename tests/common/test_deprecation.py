"""Earlier spellings work, and say what to write instead."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.common.deprecation import renamed_argument, renamed_method


@renamed_argument(old="new", size="count")
def made(first: int, *, new: int = 0, count: int = 0) -> tuple[int, int, int]:
    """Made."""
    return first, new, count


@renamed_argument(old="new")
@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    new: int = 0


class Shelf:
    def put(self, what: str) -> str:
        return f"put {what}"

    store = renamed_method("store", put)


def test_arguments_fields_and_methods() -> None:
    call: Any = made
    with pytest.warns(DeprecationWarning, match=r"made\(old=\) is now new=") as warned:
        assert call(1, old=2, count=3) == (1, 2, 3)
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="is now") as warned:
        assert call(1, old=2, size=3) == (1, 2, 3)
    assert len(warned) == 2
    with pytest.raises(TypeError, match="both new= and old="):
        call(1, old=2, new=3)
    assert made(1, new=2) == (1, 2, 0), "without a warning"
    assert (made.__name__, made.__doc__, *inspect.signature(made).parameters) == ("made", "Made.", "first", "new", "count")
    options: Any = Options
    with pytest.warns(DeprecationWarning, match=r"Options\(old=\) is now new=") as warned:
        assert options(old=2) == Options(2) == dataclasses.replace(Options(1), new=2)
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"store\(\) is now put\(\)") as warned:
        assert Shelf().store("it") == "put it"
    assert warned[0].filename == __file__
    assert Shelf().put("it") == "put it"


def test_public_options() -> None:
    renamed: list[tuple[Any, str]] = [
        (tsck.GcOptions, "max_bytes_per_second"),
        (tsck.GcOptions, "settle_seconds"),
        (tsck.FsckOptions, "max_bytes_per_second"),
    ]
    for call, option in renamed:
        with pytest.warns(DeprecationWarning, match="is now"):
            found: Any = call(**{option: 60.0})
        assert 60.0 in {getattr(found, field.name) for field in dataclasses.fields(found)}
    functions: list[tuple[Any, str]] = [
        (tsck.copy, "rate_limit_bytes_per_second"),
        (tsck.export_snapshot, "skip"),
        (tsck.export_snapshot, "allow_bad"),
        *((each, "leave_out") for each in (tsck.import_checkpoint, tsck.import_history, tsck.inspect_checkpoint, tsck.inspect_history)),
    ]
    for function, option in functions:
        message = rf"{function.__name__}\({option}=\) is now "
        with pytest.warns(DeprecationWarning, match=message), pytest.raises(TypeError, match="missing"):
            function(**{option: None})


def test_the_store(tmp_path: Path) -> None:
    make: Any = tsck.open
    with pytest.warns(DeprecationWarning, match=r"open\(max_bytes_per_second=\) is now rate_limit="):
        store: Any = make(tmp_path / "store", create=True, cache_dir=tmp_path / "cache", max_bytes_per_second=1e9)
    with store:
        store.put_snapshot({"x": 1}, ref="a", step=1)
        with pytest.warns(DeprecationWarning, match="is now allow_marked="):
            assert store.checkout("a", allow_bad=True) == {"x": 1}
        for old, arguments in {"streams": ("a",), "kept_by": ("a",), "retain": (), "tier": ()}.items():
            with pytest.warns(DeprecationWarning, match=rf"^{old}\(\) is now "):
                getattr(store, old)(*arguments)
        with pytest.warns(DeprecationWarning, match="is now"):
            store.advise("a", stall=1.0, mtbf=3600.0, bytes_per_second=1e9)
