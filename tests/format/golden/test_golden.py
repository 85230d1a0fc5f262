"""Every build reads the store that the first build of format 1 wrote: same roots, same values, same types."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tests.format.golden.codecs_content import codec_state
from tests.format.golden.content import golden_state
from tests.format.golden.ranks_content import make, quantised, whole_state
from tests.session.group.pool import Pool

GOLDEN = Path(__file__).parent / "v1"
ROOTS = {
    1: "8e60955c576c75a8ee8728c9cefa3540167305c1f6092301942427aa202a05a9",
    2: "235fa6f00c9fbe8a8500896ce522befec83698f9ae8ece39eca1e0be080c14b5",
}
CODECS = Path(__file__).parent / "codecs"
CODEC_ROOTS = {
    "small@1": "67466d6e61b8021d8827e09c6107f0c2757fe0d5e180caa9ac33b107fc8f09bf",
    "small@2": "abaffe11da585e097419c2c3254adabc78466bdab2d2482111d18f4d733b05bf",
    "small@3": "a363b8ce880e29fe64e80b5eb69d4fe1b8d941a9a29f0c4966e482fdc7a45d63",
    "fast@9": "5055d719de17d6ff7e959ca48c0afbd33c57f170e43eba3521e0056da2716dc1",
    "raw@11": "fb5267ece91dedcaf0992963362c50e2dab1ad242cf9bd9dbc9015ae36b3fa60",
}
"""The last one was put raw, and then encoded anew."""
RANKS = Path(__file__).parent / "ranks"
RANKS_ROOTS = {
    "united": "80283b0562d6870153908116400d82fe1e8ba16aa067bfbd441043b074ee66e4",
    "quantised": "24776ef4863e0e6f64cf9058d794848bdf5dd3c20782efeb44100cd3cd0a4eca",
}


def same(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        equal = left.dtype == right.dtype and left.shape == right.shape
        return equal and torch.equal(left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8))
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        assert isinstance(right, dict)
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        assert isinstance(right, list | tuple)
        return len(left) == len(right) and all(same(one, other) for one, other in zip(left, right, strict=True))
    return bool(left == right)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    shutil.copytree(GOLDEN, tmp_path / "v1")
    with tsck.open(tmp_path / "v1", cache_dir=tmp_path / "cache") as store:
        yield store


def test_values_and_refs_and_the_same_state_still_has_the_same_root(store: tsck.Store, tmp_path: Path) -> None:
    for step in (1, 2):
        state = store.checkout(f"runs/golden@{step}", allow_marked=True)
        assert same(state, golden_state(step))
        model = state["model"]
        assert model["tied"] is model["weight"] or model["tied"].data_ptr() == model["weight"].data_ptr()
        assert model["view"].data_ptr() == model["weight"][100:].data_ptr()
    assert {name: snapshot.root for name, snapshot in store.branches().items()} == {"exp/one": ROOTS[1], "runs/golden": ROOTS[2]}
    tag = store.tags()["v1"]
    assert (tag.root, tag.step, tag.parent) == (ROOTS[2], 2, ROOTS[1])
    assert tag.metrics == {"loss": 0.5, "eval": 0.75, "late": 63.0}
    assert store.show("v1").metadata == {"lr": 0.1, "tags": ["a", None]}
    assert store.resolve("exp/one").mark == "bad"
    report = store.fsck(read_data=True)
    assert (report.ok, report.findings) == (True, ())
    with tsck.open(tmp_path / "again", create=True, cache_dir=tmp_path / "cache") as again:
        for step in (1, 2):
            put = again.put_snapshot(golden_state(step), ref="runs/golden", step=step, metadata={"lr": 0.1, "tags": ["a", None]})
            assert put.root == ROOTS[step]


def test_every_codec(tmp_path: Path) -> None:
    shutil.copytree(CODECS, tmp_path / "codecs")
    with tsck.open(tmp_path / "codecs", cache_dir=tmp_path / "cache") as store:
        for address, root in CODEC_ROOTS.items():
            assert store.resolve(address).root == root
            assert same(store.checkout(address), codec_state(int(address.partition("@")[2])))
        assert {usage.codec for usage in store.usage().codecs} == {"planes", "delta", "cast", "zstd", "lz4"}
        assert store.fsck(read_data=True).ok


def test_ranks_that_are_not_alike(tmp_path: Path) -> None:
    shutil.copytree(RANKS, tmp_path / "ranks")
    with tsck.open(tmp_path / "ranks", cache_dir=tmp_path / "cache") as store:
        assert {name: store.resolve(name).root for name in RANKS_ROOTS} == RANKS_ROOTS
        united = store.checkout("united")
        assert united.keys() == whole_state().keys()
        assert all(same(united[name], value) for name, value in whole_state().items())
        for name, rows in (("here", 3), ("spread", 8)):
            found, expected = store.checkout("quantised")[name], quantised(rows)
            assert type(found) is type(expected)
            assert all(same(getattr(found, inner), getattr(expected, inner)) for inner in ("codes", "scale", "qmap"))
        assert store.fsck(read_data=True).ok


def test_ranks_that_are_not_alike_still_have_the_same_roots(pool: Pool, tmp_path: Path) -> None:
    assert make(tmp_path, pool) == [*RANKS_ROOTS.values()]
