"""`register`: its arguments, and versions of Megatron-core that are not supported."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tensorstore_ck.errors import InvalidNameError, MissingExtraError
from tests.long_errors import long_errors_of_adapter

pytestmark = pytest.mark.timeout(300)


def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="ref"):
        tsck.megatron.register(tmp_path / "store")  # type: ignore[call-arg]
    with pytest.raises(InvalidNameError):
        tsck.megatron.register(tmp_path / "store", ref="no name")
    monkeypatch.setattr("megatron.core.__version__", "0.20.0")
    with pytest.raises(
        MissingExtraError, match=r"Megatron-core 0\.20\.0 is not supported: run `pip install 'megatron-core>=0\.16,<0\.20'`"
    ):
        tsck.megatron.register(tmp_path / "store", ref="runs/gpt")


def test_a_newer_megatron_is_refused_before_what_it_lacks_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.__version__", "0.20.1")
    monkeypatch.delattr("megatron.core.dist_checkpointing.strategies.async_utils.AsyncRequest")
    monkeypatch.delitem(sys.modules, "tensorstore_ck.integrations.megatron.compatibility")
    with pytest.raises(MissingExtraError, match=r"Megatron-core 0\.20\.1 is not supported"):
        importlib.reload(sys.modules["tensorstore_ck.integrations.megatron"])


def test_a_changed_megatron_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_common(self: object, checkpoint_dir: str, extra: int) -> None: ...

    monkeypatch.setattr("tensorstore_ck.integrations.megatron.compatibility.USED", [(load_common, ("self", "checkpoint_dir"))])
    with pytest.raises(MissingExtraError, match=r"has another .*load_common than the one that is used here"):
        tsck.megatron.register(tmp_path / "store", ref="runs/gpt")


def test_errors_of_what_it_offers_are_short() -> None:
    assert long_errors_of_adapter("megatron") == []
