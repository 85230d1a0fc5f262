"""What torch.save wrote comes back as torch.load gives it: every type, every dtype, shared memory, checksums, and Lightning's files."""

import argparse
import base64
import pathlib
import random
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tensorstore_ck as tsck
from tensorstore_ck.integrations.crc32 import combined
from tensorstore_ck.integrations.importing import import_checkpoint
from tests.integrations.importing.conftest import Bring, Refuse, archive
from tests.integrations.importing.same import require_same

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
NEW_DTYPES = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    scheduler.step()
    scheduler_state = {key: value for key, value in scheduler.state_dict().items() if not callable(value)}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler_state}


def many_values() -> dict[str, Any]:
    return {
        "numbers": [1, -1, 300, -70_000, 2**40, -(2**63), 2**80, 0.5, float("inf"), float("nan"), 1 + 2j],
        "texts": ["", "ä", "\ud800", "x" * 1000],
        "bytes": [b"", b"abc\x00\xff", bytearray(b"xyz")],
        "constants": (None, True, False, ()),
        "keys": {1: "a", 2.5: "b", (1, "x"): "c", None: "d", b"k": "e"},
        "sets": [{1, 2}, frozenset({3}), set()],
        "ordered": OrderedDict(b=1, a=2),
        "counted": Counter("abca"),
        "defaults": [defaultdict(list, {1: [2]}), defaultdict(None, {}), defaultdict(int)],
        "torch": [torch.float32, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3])],
        "numpy": [
            np.float64(0.1),
            np.int32(7),
            np.bool_(True),
            np.str_("text"),
            np.arange(6).reshape(2, 3),
            np.array(["2020-01-01"], "M8[25s]"),
            np.zeros(2, ">m8"),
        ],
        "arrays": [
            np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            np.array([b"a", b"bc"]),
            np.array(3),
            np.zeros((0, 2)),
            np.arange(3, dtype=">i4"),
        ],
        "generators": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
    }


def many_tensors() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "dtypes": [torch.arange(5).to(dtype) for dtype in DTYPES],
        "bool": torch.tensor([True, False]),
        "complex": torch.ones(2, dtype=torch.complex64) * 1j,
        "empty": [torch.empty(0), torch.empty(3, 0, 2)],
        "scalar": torch.tensor(3.5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "graded": torch.ones(2, requires_grad=True),
        "base": base,
        "row": base[1],
        "turned": base.t(),
        "expanded": torch.ones(1).expand(5),
        "strided": torch.arange(10)[::3],
    }


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("made", [training_state, many_values, many_tensors])
def test_all_that_torch_load_gives(bring: Bring, tmp_path: Path, made: Callable[[], dict[str, Any]], *, is_zip: bool) -> None:
    torch.save(made(), tmp_path / "state.pt", _use_new_zipfile_serialization=is_zip)
    found, contents = bring(tmp_path / "state.pt")
    require_same(found, torch.load(tmp_path / "state.pt", weights_only=False))
    assert contents.format == "torch file"
    assert not contents.converted


def test_a_new_dtype_alone(bring: Bring, tmp_path: Path) -> None:
    """The file holds a tensor, and no container."""
    for dtype in NEW_DTYPES:
        state = torch.arange(4, dtype=torch.uint8).to(dtype)
        torch.save(state, tmp_path / "state.pt")
        require_same(bring(tmp_path / "state.pt")[0], state)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_other_pickle_protocols(bring: Bring, tmp_path: Path, protocol: int, *, is_zip: bool) -> None:
    state = {**many_values(), **training_state()}
    torch.save(state, tmp_path / "state.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    require_same(bring(tmp_path / "state.pt")[0], torch.load(tmp_path / "state.pt", weights_only=False))


def test_shared_memory_is_shared_again(bring: Bring, tmp_path: Path) -> None:
    weight, bias = torch.randn(7, 5), torch.randn(3, dtype=torch.float64)
    torch.save({"b": bias, "embedding": weight, "head": weight, "row": weight[2]}, tmp_path / "a.pt")
    found = bring(tmp_path / "a.pt")[0]
    assert found["head"].data_ptr() == found["embedding"].data_ptr()
    found["embedding"][2] = 7
    assert found["row"].eq(7).all()


def test_the_same_blocks_as_a_save(store: tsck.Store, tmp_path: Path) -> None:
    state = {"a": torch.randn(300, 1000), "b": torch.randn(50, 50)}
    put = store.put_snapshot(state, ref="own")
    torch.save(state, tmp_path / "a.pt")
    imported = import_checkpoint(store, tmp_path / "a.pt", ref="old").snapshot
    assert put.new_bytes > 1_000_000
    assert imported.new_bytes < 5000
    assert imported.root == put.root


# --- what torch.load must be allowed to load ----------------------------------------------------------------------------


class AttributeDict(dict[str, Any]):
    """As Lightning has it."""


class Config:
    """Somebody's own class."""

    def __init__(self) -> None:
        self.depth, self.paths = 3, [pathlib.Path("/x")]


def lightning(**hyper_parameters: Any) -> dict[str, Any]:
    """What Lightning 2.x writes."""
    state = training_state()
    progress = {"total": {"ready": 30, "completed": 30}, "current": {"ready": 10, "completed": 10}}
    return {
        "epoch": 2,
        "global_step": 30,
        "pytorch-lightning_version": "2.5.1",
        "state_dict": state["model"],
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": progress}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'val_loss'}": {
                "best_model_score": torch.tensor(2.5),
                "best_k_models": {"/ckpt/epoch=1.ckpt": torch.tensor(2.5)},
                "kth_value": torch.tensor(float("inf")),
                "dirpath": "/ckpt",
            }
        },
        "optimizer_states": [state["optimizer"]],
        "lr_schedulers": [state["scheduler"]],
        "MixedPrecision": {"scale": 65536.0},
        "hparams_name": "kwargs",
        "hyper_parameters": AttributeDict(lr=1e-3, layers=[1, 2], **hyper_parameters),
    }


@pytest.fixture
def as_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("lightning.fabric.utilities.data")
    module.AttributeDict = AttributeDict  # type: ignore[attr-defined]
    monkeypatch.setattr(AttributeDict, "__module__", module.__name__)
    for name in ("lightning", "lightning.fabric", "lightning.fabric.utilities", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("as_lightning")
def test_lightning(bring: Bring, store: tsck.Store, tmp_path: Path) -> None:
    saved = lightning(path=pathlib.Path("/data/set"), options=argparse.Namespace(seed=1))
    torch.save(saved, tmp_path / "last.ckpt")
    found, contents = bring(tmp_path / "last.ckpt", metadata={"team": "a"})
    expected = {**saved, "hyper_parameters": {"lr": 1e-3, "layers": [1, 2], "path": "/data/set", "options": {"seed": 1}}}
    require_same(found, expected)
    assert contents.format == "Lightning checkpoint"
    assert set(contents.converted) == {
        "lightning.fabric.utilities.data.AttributeDict, read as a dict",
        "pathlib.PosixPath, read as text",
        "argparse.Namespace, read as a dict",
    }
    (entry,) = store.log("old")
    assert entry.step == 30
    metadata = dict(store.show("old").metadata)
    assert metadata.pop("tsck").keys() == {"non_finite"}  # the callback has an infinite score
    assert metadata == {"pytorch-lightning_version": "2.5.1", "epoch": 2, "team": "a"}


@pytest.mark.usefixtures("as_lightning")
def test_a_step_that_is_given_wins(bring: Bring, store: tsck.Store, tmp_path: Path) -> None:
    torch.save(lightning(), tmp_path / "last.ckpt")
    bring(tmp_path / "last.ckpt", step=0, metadata={"epoch": 9})
    assert store.log("old")[0].step == 0
    assert store.show("old").metadata["epoch"] == 9


@pytest.mark.usefixtures("as_lightning")
def test_objects_of_unknown_classes_are_refused_by_path_or_left_out(bring: Bring, refuse: Refuse, tmp_path: Path) -> None:
    torch.save(lightning(config=Config(), make=torch.optim.SGD), tmp_path / "last.ckpt")
    message = refuse(tmp_path / "last.ckpt", tsck.UnsupportedValueError)
    assert "hyper_parameters.config (tests.integrations.importing.test_torch_files.Config)" in message
    assert "hyper_parameters.make (torch.optim.sgd.SGD)" in message
    assert "--exclude 'hyper_parameters.config'" in message
    found, contents = bring(tmp_path / "last.ckpt", exclude=["hyper_parameters.config", "hyper_parameters.m*"])
    assert contents.left_out == ("hyper_parameters.config", "hyper_parameters.make")
    assert found["hyper_parameters"] == {"lr": 1e-3, "layers": [1, 2]}
    found, _ = bring(tmp_path / "last.ckpt", exclude=["hyper_parameters"])
    assert "hyper_parameters" not in found


def test_a_glob_that_fits_nothing_is_reported(refuse: Refuse, tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "a.pt")
    assert "'b.*'" in refuse(tmp_path / "a.pt", tsck.MismatchError, exclude=["a", "b.*"])


def test_leaving_out_of_containers(bring: Bring, tmp_path: Path) -> None:
    torch.save({"l": [1, Config(), 3], "t": (Config(), 2), "o": OrderedDict(a=Config(), b=1)}, tmp_path / "a.pt")
    found, _ = bring(tmp_path / "a.pt", exclude=["l.1", "t.0", "o.a"])
    require_same(found, {"l": [1, None, 3], "t": (None, 2), "o": OrderedDict(b=1)})


def test_attributes_of_tensors_are_left_out_and_reported(bring: Bring, tmp_path: Path) -> None:
    tensor = torch.ones(2)
    tensor.note = "mine"  # type: ignore[attr-defined]
    torch.save([tensor, torch.nn.Buffer(torch.zeros(2))], tmp_path / "a.pt")
    found, contents = bring(tmp_path / "a.pt")
    require_same(found, [torch.ones(2), torch.zeros(2)])
    assert contents.converted["attributes of a tensor, left out"] == 2


def test_damaged_bytes_of_a_tensor_are_noticed(refuse: Refuse, tmp_path: Path) -> None:
    sizes = (1, 1000, 2_000_000)
    torch.save([*map(torch.ones, sizes), torch.ones(5000)[:10]], tmp_path / "a.pt")
    good = (tmp_path / "a.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        places = [archive.getinfo(f"a/data/{number}").header_offset for number in range(4)]
    for place, size in zip(places, (*sizes, 5000), strict=True):
        start = good.index(torch.ones(1).numpy().tobytes(), place)
        bad = bytearray(good)
        bad[start + 4 * random.randrange(size)] ^= 1
        (tmp_path / "bad.pt").write_bytes(bad)
        assert "checksum" in refuse(tmp_path / "bad.pt", tsck.CorruptObjectError)


def test_files_without_checksums(bring: Bring, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(training_state(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    require_same(bring(tmp_path / "a.pt")[0], training_state())


def test_script_programs_and_other_archives_are_refused(refuse: Refuse, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones(2))
    assert "no supported format" in refuse(tmp_path / "a.npz", tsck.UnsupportedValueError)


# --- OmegaConf ----------------------------------------------------------------------------------------------------------

CONFIG = (
    "c-m!@*;dp*5Qc|MAs`AW?mGj)1;u?I6crU1A#Op%m}GjU10mthf}*F-(F@OkNAY!h6YssSx@V%vac-u%lltoKzbgH;U7)0!yGo@J-&kXjwPr{5Doa=tqs<Lh"
    "S;Kb2pgvyn+(ZUmLwi8sR5L{T*f(?tbn0dg5iClyYj$FzE0^lnG1Dj^vAuvrbFEi2Y@^)m0^PdVO}P=PTL~#Zk4t}E(9rG$8yYmTmmY@BGINvW^Iq4ooYeCZ"
    "FR(04>eA4s5aC+lg@Ns3$EMjq>lL<v{;JtUVcoYIF?I^<GPP`JMPZm=V9V@R<>Sy_r}MkE%NYh;H}rj~Nx)dEvAUi5Nwd~&-uE4Q4D3}ksYX-Q5ZBB;+F(9g"
    "WkE~pKCY#Xxm{XAzS1`KS5=xt&LnbuK;WQmw$qj$;ZV-CAgr-idQhc6!(lS(h`>>u|7Yz#M~~4<#|2L4yoYPNx5{^H@_v4Z)45Obfh|7BmH1NzhEs>{=N)FJ"
    ")Ur;Nm8UE7&fL#mKYo*7xvSbZ!exU;1$3&*Wy8h<PPg#9ugM>g{4+WJSp(-d`N7rkWgSk(9M@GRV(&AHaXxnl-;1-+nx!xstqW9bLf~Rn`I5lpR^`G3$aD=?"
    "np)0FEmw0|t{J$_hl&Xy4Hs_wRX55HEa9fkrNy@dZp(tw$vXmf3r^0IB)yWOPa3$V7!$la(?*eG+!vV27!L#<78z}l@hHcbHt;xOm~G_HCp>A9o(jxlq*;Nv"
    "BB@=HsyWg#1M?ZFN`dU%f`E}Z_*~#cv3D~alJPRfcxB*qp?4Fqccv0n!=jS)M&NBG>z%+-aoiRq@_i0z8Tg=33%oo%DQAm*sS~FTYt33rHx6vYb_CpvT@zqM"
    "wk_H99J^tFx0+a1<2C%nj|4md%aw1_MTTWXUJ>v!@~S{kBri*Hm?N(lz+bYwO)8ZNqSQ$VEkD;VK&-flK$>ya1wIzJvE+WraW@QnZhaKxO@*VOok++30EOVT"
    "7X"
)
"""The pickle in what torch.save of torch 2.13 makes of {"hyper_parameters": config, "sizes": config.data.sizes}, with OmegaConf 2.4.0."""


def test_configs(bring: Bring, tmp_path: Path) -> None:
    found, contents = bring(archive(tmp_path / "a.pt", zlib.decompress(base64.b85decode(CONFIG))))
    sizes = [1, "x", None, {"d": 2.5}]
    config = {"lr": 1e-3, "data": {"sizes": sizes, "same": "${lr}", "later": "???"}, "on": True}
    require_same(found, {"hyper_parameters": config, "sizes": sizes})
    assert contents.converted == {
        "omegaconf.dictconfig.DictConfig, read as a dict": 3,
        "omegaconf.listconfig.ListConfig, read as a list": 1,
    }


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combined(one: bytes, two: bytes) -> None:
    assert combined(zlib.crc32(one), zlib.crc32(two), len(two)) == zlib.crc32(one + two)


def test_combined_with_many_zeros() -> None:
    assert combined(zlib.crc32(b"abc"), zlib.crc32(bytes(10_000_000)), 10_000_000) == zlib.crc32(b"abc" + bytes(10_000_000))
