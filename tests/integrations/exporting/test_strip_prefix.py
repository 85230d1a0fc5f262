"""--strip-prefix: names in the files without what they have in common, in every format."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.integrations.exporting import export_snapshot
from tests.gc.stores import open_store
from tests.integrations.exporting.conftest import Export
from tests.integrations.exporting.states import load_dcp, small_blocks
from tests.integrations.exporting.test_safetensors import require_equal


def _exported(state: Any, path: Path, **options: Any) -> Any:
    """`state`, saved and exported as a torch file, as torch reads it."""
    with open_store(small_blocks()) as store:
        store.put_snapshot(state, ref="x")
        export_snapshot(store, "x", path, format="torch", **options)
    return torch.load(path)


def test_safetensors(export: Export, state: dict[str, Any], tmp_path: Path) -> None:
    export(tmp_path / "out", "safetensors", select=["model.*"], strip_prefix="model.", max_file_bytes=8000)
    found = {name: tensor for file in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(file).items()}
    require_equal(found, state["model"])
    with pytest.raises(tsck.MismatchError, match=r"the prefix 'model\.' is missing from optimizer\.state\.0\.step, .* and \d+ more"):
        export(tmp_path / "all", "safetensors", strip_prefix="model.")
    assert not (tmp_path / "all").exists()


def test_torch_and_dcp(export: Export, state: dict[str, Any], tmp_path: Path) -> None:
    export(tmp_path / "out.pt", "torch", select=["model.*"], strip_prefix="model.")
    found = torch.load(tmp_path / "out.pt")
    require_equal(found, state["model"])
    assert type(found) is type(state["model"])
    assert found._metadata == state["model"]._metadata  # a module's version, which load_state_dict reads
    export(tmp_path / "dcp", "dcp", select=["model.*"], strip_prefix="model.")
    require_equal(load_dcp(tmp_path / "dcp"), state["model"])


def test_a_prefix_within_names(tmp_path: Path) -> None:
    """As of a model under DistributedDataParallel, whose attributes are of the names with the prefix."""
    weights = nn.Linear(3, 2).state_dict()
    wrapped = OrderedDict((f"module.{name}", tensor) for name, tensor in weights.items())
    wrapped._metadata = {"module.": {"version": 1}}  # type: ignore[attr-defined]
    found = _exported({"net": wrapped, "step": 3}, tmp_path / "a.pt", select=["net.*"], strip_prefix="net.module.")
    require_equal(found, dict(weights))
    assert not hasattr(found, "_metadata")
    nested = {"a": {"b": {"x": torch.ones(2)}, "b.y": torch.zeros(2)}}
    require_equal(_exported(nested, tmp_path / "b.pt", strip_prefix="a.b."), {"x": torch.ones(2), "y": torch.zeros(2)})
    assert _exported({3: {"x": [1, None]}}, tmp_path / "c.pt", strip_prefix="3.") == {"x": [1, None]}


@pytest.mark.parametrize(
    ("state", "prefix", "what"),
    [
        ({"a": {"x": 1}, "a.x": 2}, "a.", "two names become 'x' without the prefix 'a.'"),
        ({"a": {"x": 1}}, "a", "leaves '.x' of the name 'a.x': end the prefix with the dot"),
        ({"a": {"x": 1}}, "a.x", "leaves '' of the name 'a.x'"),
        ({"a": [torch.ones(1), 2]}, "a.", "a is no dict, so its names cannot lose the prefix 'a.'"),
        (
            {"a": {"x": 1}, "b": {"y": 1}, "c": 1},
            "a.",
            "'a.' is missing from b.y, c: select the names that have it, --include 'a.*'",
        ),
    ],
)
def test_names_that_cannot_lose_it(tmp_path: Path, state: Any, prefix: str, what: str) -> None:
    with pytest.raises(tsck.StoreError) as caught:
        _exported(state, tmp_path / "out.pt", strip_prefix=prefix)
    assert what in str(caught.value)
    assert list(tmp_path.iterdir()) == []
