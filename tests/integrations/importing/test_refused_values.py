"""Valid torch files with what a snapshot cannot hold: refused by its name, with a hint that works; nothing valid is called damaged."""

import shlex
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tests.integrations.importing.conftest import Bring, Refuse
from tests.integrations.importing.same import require_same

WEIGHT = torch.arange(6.0)
NAMED: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.nn.Sequential(torch.nn.Linear(3, 2)), "v (torch.nn.modules.container.Sequential)"),
    (lambda: np.array([1, "a", Path("x")], object), "v (a numpy array of objects)"),
    (lambda: np.zeros(2, [("x", "i4")]), "v (a numpy array of a structured dtype)"),
    (lambda: np.zeros(1, [("x", "i4")])[0], "v (a numpy scalar of a structured dtype)"),
    (lambda: np.array(["a" * 12_000]), "v (a numpy array of dtype <U12000)"),
    (lambda: np.dtype("f4"), "v (a numpy dtype)"),
    (lambda: quantized(torch.quint8), "v (a quantized tensor)"),
    (lambda: quantized(torch.qint32), "v (a quantized tensor)"),
    (lambda: torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8), "v (a quantized tensor)"),
    (lambda: torch.nn.Parameter(quantized(torch.quint8), requires_grad=False), "v (a quantized tensor)"),
    (lambda: torch.ones(3).to_sparse(), "v (a sparse tensor)"),
    (lambda: torch.empty(3, device="meta"), "v (a tensor without data (meta))"),
    (lambda: {Unknown: Unknown()}, f"v.{__name__}.Unknown ({__name__}.Unknown, as a key)"),
    (lambda: {(1, Unknown): 1}, f"v.{__name__}.Unknown ({__name__}.Unknown, as a key)"),
    (lambda: {int: 1}, "v.builtins.int (builtins.int, as a key)"),
    (lambda: {("a", torch.Tensor): 1}, "v.Tensor (Tensor, as a key)"),
    (lambda: {torch.nn.Parameter(WEIGHT): 1}, "v.Parameter (Parameter, as a key)"),
    (lambda: {torch.ones(1): 1}, "v.Tensor (Tensor, as a key)"),
    (lambda: {torch.strided: 1}, "v.torch.strided (torch.strided, as a key)"),
    (lambda: {int}, "v (builtins.int)"),
    (lambda: float, "v (builtins.float)"),
    (lambda: torch.strided, "v (torch.strided)"),
    (lambda: torch.eye(2).to_sparse_csc(), "v (a sparse tensor)"),
    (lambda: {"it's [0]*": Unknown()}, f"v.it's [0]* ({__name__}.Unknown)"),
]


class Unknown:
    pass


def quantized(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(WEIGHT, 0.1, 0, dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("number", range(len(NAMED)))
def test_a_value_is_refused_by_its_name_and_the_hint_works(refuse: Refuse, bring: Bring, tmp_path: Path, number: int, zipped: bool) -> None:
    make, words = NAMED[number]
    torch.save({"v": make(), "w": WEIGHT}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    message = refuse(tmp_path / "a.pt", tsck.UnsupportedValueError)
    assert words in message
    hint = shlex.split(message.partition("; exclude them (")[2].partition("), or load")[0])
    found, _ = bring(tmp_path / "a.pt", exclude=hint[1:])
    require_same(found["w"], WEIGHT)
    assert not found.get("v")


def test_a_value_that_only_a_save_refuses_can_be_excluded(refuse: Refuse, bring: Bring, tmp_path: Path) -> None:
    values = torch.ones(3, dtype=torch.complex64)
    torch.save({"x": values, "it's": values.conj()}, tmp_path / "a.pt")
    message = refuse(tmp_path / "a.pt", tsck.UnsupportedValueError)
    (pattern,) = shlex.split(message.partition("(--exclude ")[2].partition(") from")[0])
    assert bring(tmp_path / "a.pt", exclude=[pattern])[0].keys() == {"x"}


def test_several_keys_of_unknown_classes_are_excluded(bring: Bring, tmp_path: Path) -> None:
    """As the callbacks of Lightning before 1.5."""
    classes = (torch.nn.Linear, torch.nn.ReLU, torch.nn.GELU, torch.nn.Dropout, torch.nn.LayerNorm, Unknown)
    torch.save({"callbacks": {kind: {} for kind in classes}, "w": WEIGHT}, tmp_path / "a.pt")
    assert bring(tmp_path / "a.pt", exclude=["callbacks.*"])[0].keys() == {"callbacks", "w"}


@pytest.mark.parametrize("zipped", [True, False])
def test_of_a_whole_module_nothing_can_be_excluded(refuse: Refuse, tmp_path: Path, zipped: bool) -> None:
    torch.save(torch.nn.Linear(3, 2), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    message = refuse(tmp_path / "a.pt", tsck.UnsupportedValueError)
    assert (
        "all of it (torch.nn.modules.linear.Linear); load it where you trust it and save plain values, such as the state_dict()" in message
    )


def test_an_attribute_of_a_tensor_of_an_unknown_class_is_left_out(bring: Bring, tmp_path: Path) -> None:
    weight, parameter = WEIGHT.clone(), torch.nn.Parameter(WEIGHT.clone())
    weight.mark = parameter.mark = Unknown()  # type: ignore[attr-defined]
    torch.save({"w": weight, "p": parameter}, tmp_path / "a.pt")
    found, contents = bring(tmp_path / "a.pt")
    require_same(found["w"], WEIGHT)
    assert contents.converted["attributes of a tensor, left out"] == 2


def test_long_doubles(bring: Bring, tmp_path: Path) -> None:
    state = {"array": np.arange(3, dtype=np.longdouble) / 3, "scalar": np.longdouble(1) / 3, "complex": np.ones(2, np.clongdouble) / 3}
    torch.save(state, tmp_path / "a.pt")
    require_same(bring(tmp_path / "a.pt")[0], state)


def test_an_archive_in_another_order(bring: Bring, tmp_path: Path) -> None:
    rezip(tmp_path, zipfile.ZIP_STORED)
    require_same(bring(tmp_path / "other.pt")[0], {"w": WEIGHT})


def test_a_compressed_archive(refuse: Refuse, tmp_path: Path) -> None:
    rezip(tmp_path, zipfile.ZIP_DEFLATED)
    assert "load it with torch, and save it again" in refuse(tmp_path / "other.pt", tsck.UnsupportedValueError)


def rezip(folder: Path, compression: int) -> None:
    torch.save({"w": WEIGHT}, folder / "a.pt")
    with zipfile.ZipFile(folder / "a.pt") as file, zipfile.ZipFile(folder / "other.pt", "w", compression) as other:
        for name in sorted(file.namelist()):
            other.writestr(name, file.read(name))


@pytest.mark.parametrize(
    ("records", "kind"),
    [(("data/0", "data.pkl", "code/a.py", "constants.pkl"), "TorchScript"), (("archive_format", "models/model.json"), "torch.export")],
)
def test_programs(refuse: Refuse, tmp_path: Path, records: tuple[str, ...], kind: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        for name in records:
            file.writestr(f"a/{name}", b"x")
    assert f"is a program of {kind}" in refuse(tmp_path / "a.pt", tsck.UnsupportedValueError)


def test_a_tar_archive(refuse: Refuse, tmp_path: Path) -> None:
    torch.save({"w": WEIGHT}, tmp_path / "a.pt")
    with tarfile.open(tmp_path / "a.pth.tar", "w") as file:
        file.add(tmp_path / "a.pt")
    assert "is a tar archive: unpack it" in refuse(tmp_path / "a.pth.tar", tsck.UnsupportedValueError)
