"""The example of Ray Train, in two runs and in one; and what is no worker."""

from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tests.integrations.conftest import has_finished
from tests.long_errors import long_errors_of_adapter


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_continues(ray_here: Any, tmp_path: Path) -> None:
    from examples import ray_train

    whole = ray_train.main(tmp_path / "whole", 20)
    ray_train.main(tmp_path / "cut", 10)
    assert ray_train.main(tmp_path / "cut", 20) == whole
    with tsck.open(tmp_path / "cut" / "store", read_only=True) as store:
        assert has_finished(store)


def test_no_worker(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="the extra ray is not installed: run `make test-apart`")
    with (
        tsck.open(tmp_path / "store", create=True) as store,
        pytest.raises(tsck.InvalidOptionError, match="functions that Ray Train runs in its workers"),
    ):
        tsck.ray.report({}, {"a": 1}, store=store, ref="runs/r", step=1)


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("tensorstore_ck.integrations.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(tsck.MissingExtraError, match=r"pip install 'ray\[train\]>=2.56,<3'"):
        tsck.ray.report  # noqa: B018 - is loaded here


def test_errors_of_what_it_offers_are_short() -> None:
    pytest.importorskip("ray.train", reason="the extra ray is not installed: run `make test-apart`")
    assert long_errors_of_adapter("ray") == []
