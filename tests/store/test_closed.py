"""A closed store, and names that a store does not have."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck


def _arguments(method: Callable[..., Any]) -> dict[str, object]:
    """Something for each parameter that has no default: a closed store looks at none."""
    parameters = inspect.signature(method).parameters.values()
    return {each.name: "runs/a" for each in parameters if each.default is each.empty and each.kind is not each.VAR_POSITIONAL}


def _call(method: Callable[..., Any]) -> None:
    next(iter(method(**_arguments(method))))  # of a generator, too


def test_a_closed_store_answers_nothing(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot({"a": 1, "w": torch.ones(2)}, ref="runs/a", step=1)
        lazy = store.open_snapshot("runs/a")
        tensor = lazy["w"]
    methods = [name for name in dir(store) if callable(getattr(type(store), name)) and name != "close"]
    assert len(methods) > 50
    for name in methods:
        method = getattr(store, name)
        with pytest.raises(tsck.InputError, match=f"the store at {store.url} was closed: open it again") as caught:
            _call(method)
        assert caught.value.retry == "after_reopen"
    for read in (lambda: tensor[:], lambda: next(iter(tensor)), lambda: lazy["w"][0], lambda: lazy.state_values):
        with pytest.raises(tsck.InputError, match="was closed: open it again"):
            read()
    store.close()
    assert str(store.url) in repr(store)


def test_who_goes_on_with_a_closed_store_is_not_advised_to_free_space(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot({"model": model.state_dict()}, ref="runs/a", step=1)
        feed = store.follow("runs/a", into=model)
    assert feed.poll() is not None
    assert not [record for record in caplog.records if "cache" in record.message]


@pytest.mark.parametrize(
    ("name", "said"),
    [("save", r"put_snapshot\(STATE, ref=REF\)$"), ("load", r"checkout\(ADDRESS\)$"), ("delete", r"forget\(ADDRESS\)$"), ("nope", "$")],
)
def test_names_of_other_libraries_lead_to_ours(tmp_path: Path, name: str, said: str) -> None:
    with (
        tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store,
        pytest.raises(AttributeError, match=f"'Store' object has no attribute '{name}'.*{said}"),
    ):
        getattr(store, name)
