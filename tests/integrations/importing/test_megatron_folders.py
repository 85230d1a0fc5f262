"""Folders of Megatron-core: what is imported, without Megatron, and what is refused."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.engine.read.snapshot_reader import open_snapshot
from tensorstore_ck.format.tree import Container, parse
from tensorstore_ck.integrations.importing import import_checkpoint
from tensorstore_ck.log.address import resolve
from tests.integrations.importing import megatron_folders
from tests.integrations.importing.conftest import Refuse
from tests.integrations.importing.same import require_same

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "run"
    megatron_folders.write(path)
    return path


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


@pytest.fixture
def iteration(folder: Path) -> Path:
    return folder / "iter_0001000"


def test_everything_of_a_folder(store: tsck.Store, tmp_path: Path) -> None:
    held = megatron_folders.write(tmp_path / "run")
    snapshot, contents = import_checkpoint(store, tmp_path / "run", ref="old")
    assert (contents.format, snapshot.step, contents.skipped) == ("checkpoint of Megatron", 1000, {})
    content = open_snapshot(store.engine, resolve(store.engine.log.view(), "old").info)
    tree = parse(content.layout, len(content.values))
    assert isinstance(tree, Container)
    assert set(tree.keys) == {*held, *megatron_folders.objects(), "common"}
    require_same(store.checkout("old", select=list(held)), held)
    empty = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
    assert store.checkout("old", select=[empty]) == {empty: None}
    (rng,) = store.checkout("old", select=["rng_state/*"])["rng_state/shard_0.0_1.1"]
    assert (rng["torch"].dtype, rng["seed"]) == (torch.uint8, 3)
    found = store.checkout("old", select=["common.iteration", "common.optimizer.*", "common.opt_param_scheduler.*"])["common"]
    expected = megatron_folders.common()
    assert found == {key: expected[key] for key in ("iteration", "optimizer", "opt_param_scheduler")}


def test_types_of_megatron_are_stored_by_their_names(store: tsck.Store, folder: Path) -> None:
    import_checkpoint(store, folder, ref="old")
    with pytest.raises(tsck.UnsupportedValueError, match=r"'megatron\.\w+', which is not registered here"):
        store.checkout("old", select=["common.args*"])


def test_one_folder_by_its_path_and_its_metadata(store: tsck.Store, iteration: Path) -> None:
    roots = {
        import_checkpoint(store, path, ref=f"r{number}").snapshot.root for number, path in enumerate((iteration, iteration / ".metadata"))
    }
    assert len(roots) == 1


def test_a_common_state_that_is_an_object(store: tsck.Store, tmp_path: Path) -> None:
    """Of Megatron-core 0.19; what an older one left in the folder is of another save."""
    roots = set()
    for name, has_common_file in (("old", True), ("new", False)):
        torch.manual_seed(1)
        megatron_folders.write(tmp_path / name, has_common_file=has_common_file)
        roots.add(import_checkpoint(store, tmp_path / name, ref=name).snapshot.root)
    assert len(roots) == 1
    with megatron_folders.pickled_as_megatron():
        torch.save(megatron_folders.common(2000), tmp_path / "new" / "iter_0001000" / "common.pt")
    again, contents = import_checkpoint(store, tmp_path / "new", ref="again")
    assert ({again.root}, contents.skipped) == (roots, {"common.pt": "not named by .metadata"})


def rename(iteration: Path, key: str, new: str) -> None:
    metadata = pickle.loads((iteration / ".metadata").read_bytes())
    metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(key)
    for index in [index for index in metadata.storage_data if index.fqn == key]:
        metadata.storage_data[type(index)(new, index.offset)] = metadata.storage_data.pop(index)
    (iteration / ".metadata").write_bytes(pickle.dumps(metadata))


def test_an_object_with_the_key_of_the_common_state(store: tsck.Store, iteration: Path) -> None:
    """Before 0.19 it means nothing."""
    rename(iteration, "rerun_state_machine_state/shard_0_1", "common_state/shard_0_1")
    snapshot, contents = import_checkpoint(store, iteration, ref="old")
    assert (snapshot.step, contents.skipped) == (1000, {})


def test_a_release(store: tsck.Store, folder: Path) -> None:
    (folder / "iter_0001000").rename(folder / "release")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    assert import_checkpoint(store, folder, ref="old").snapshot.step == 1000


def test_files_of_an_earlier_save_are_skipped(store: tsck.Store, iteration: Path) -> None:
    shutil.copy(iteration / "__0_0.distcp", iteration / "__7_0.distcp")
    _, contents = import_checkpoint(store, iteration, ref="old")
    assert contents.skipped == {"__7_0.distcp": "not named by .metadata"}


def test_plain_dcp_folders_stay_that(store: tsck.Store, iteration: Path) -> None:
    (iteration / "common.pt").unlink()
    (iteration / "metadata.json").write_text('{"mine": 1}')
    typed = ["rerun_state_machine_state/*", "decoder.layers.mlp.linear_fc2._extra_state/*"]
    assert import_checkpoint(store, iteration, ref="old", exclude=typed).contents.format == "DCP checkpoint"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", "metadata.json", ".metadata"])
def test_a_file_is_missing(refuse: Refuse, iteration: Path, name: str) -> None:
    (iteration / name).unlink()
    message = refuse(iteration, tsck.CorruptObjectError)
    assert name in message
    assert "get the whole" in message


@pytest.mark.parametrize(
    ("name", "cut"),
    [("__0_0.distcp", 1), ("__0_1.distcp", None), ("common.pt", 300), ("common.pt", None), ("metadata.json", 1), (".metadata", 300)],
)
def test_a_file_is_truncated(refuse: Refuse, iteration: Path, name: str, cut: int | None) -> None:
    path = iteration / name
    size = path.stat().st_size
    os.truncate(path, 0 if cut is None else max(0, size - cut))
    assert str(iteration) in refuse(iteration)


def test_more_bytes_than_the_metadata_names(refuse: Refuse, iteration: Path) -> None:
    with (iteration / "__0_0.distcp").open("ab") as file:
        file.write(b"x" * 10)
    assert "has 10 bytes that .metadata does not name: the two are of different saves" in refuse(iteration, tsck.CorruptObjectError)


def test_files_of_two_iterations(refuse: Refuse, folder: Path, iteration: Path) -> None:
    megatron_folders.write(folder, 2000)
    shutil.copy(folder / "iter_0002000" / "common.pt", iteration / "common.pt")
    message = refuse(iteration, tsck.CorruptObjectError)
    assert "named after iteration 1000, and its common.pt is of iteration 2000" in message


@pytest.mark.parametrize("text", ["999", "release"])
def test_the_newest_iteration_is_not_there(refuse: Refuse, folder: Path, text: str) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text(text)
    assert "which is not there: import another folder by its path" in refuse(folder, tsck.CorruptObjectError)


def test_a_tracker_does_not_lead_out_of_the_folder(refuse: Refuse, folder: Path, iteration: Path) -> None:
    """Whoever made the folder does not choose which other checkpoint of the user is imported."""
    iteration.rename(folder.parent / "private")
    iteration.symlink_to("../private")
    assert "leads out of its folder" in refuse(folder, tsck.InvalidNameError)


@pytest.mark.parametrize("text", ["", "../../etc", "1e3", "9" * 30])
def test_a_tracker_that_names_nothing(refuse: Refuse, folder: Path, text: str) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text(text)
    assert "neither a number nor 'release'" in refuse(folder, tsck.CorruptObjectError)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sharded_backend": "zarr"}, "names sharded_backend 'zarr', and only 'torch_dist' of version 1"),
        ({"sharded_backend_version": 2}, "names sharded_backend_version '2'"),
        ({"common_backend": "x", "common_backend_version": 3}, "names common_backend 'x' and common_backend_version '3'"),
        ({"sharded_backend": "tsck"}, "its state is in the store that its snapshot.json names already"),
    ],
)
def test_another_format_or_version(refuse: Refuse, iteration: Path, change: dict[str, object], said: str) -> None:
    (iteration / "metadata.json").write_text(json.dumps({**megatron_folders.CONFIG, **change}))
    assert said in refuse(iteration, tsck.UnsupportedValueError)


def test_the_format_torch(refuse: Refuse, folder: Path) -> None:
    shutil.rmtree(folder / "iter_0001000")
    (folder / "iter_0001000" / "mp_rank_00").mkdir(parents=True)
    assert "--ckpt-convert-format torch_dist" in refuse(folder, tsck.UnsupportedValueError)


def test_flattened_tensors(refuse: Refuse, iteration: Path) -> None:
    megatron_folders.rewrite_metadata(iteration, mcore_data={"x": {"nd_reformulated_orig_global_shape": (2, 3)}})
    assert "has flattened tensors" in refuse(iteration, tsck.UnsupportedValueError)


class Runs:
    """Pickles as a call."""

    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


@pytest.mark.parametrize("where", ["common.pt", ".metadata", "plans", "hidden", "object"])
def test_hostile_pickles(refuse: Refuse, iteration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.chdir(tmp_path)
    if where == "common.pt":
        torch.save({"iteration": 1000, "args": {"x": Runs()}}, iteration / "common.pt")
    elif where == "hidden":  # below an attribute of an object that is allowed
        with megatron_folders.pickled_as_megatron():
            torch.save(megatron_folders.common(evil=[Runs()]), iteration / "common.pt")
    elif where == "object":
        shutil.rmtree(iteration)
        megatron_folders.write(iteration.parent, has_common_file=False, evil=[Runs()])
    elif where == ".metadata":
        (iteration / ".metadata").write_bytes(pickle.dumps(Runs()))
    else:
        megatron_folders.rewrite_metadata(iteration, all_local_plans=[Runs()])
    message = refuse(iteration, tsck.UnsupportedValueError)
    assert "posix.system" in message
    if where in ("hidden", "object"):
        assert "common.args.evil.0" in message
    assert not (tmp_path / "hacked").exists()


def test_an_object_of_another_version(refuse: Refuse, iteration: Path) -> None:
    with megatron_folders.pickled_as_megatron():
        torch.save(megatron_folders.common(scope=megatron_folders.AttnBackend.unknown), iteration / "common.pt")
    message = refuse(iteration, tsck.CorruptObjectError)
    assert "has a megatron.AttnBackend of the value 99, which Megatron-core 0.19 does not have" in message


@pytest.mark.parametrize("left_out", ["common.args.evil", "common.args", "common"])
def test_what_is_excluded_may_be_unknown(store: tsck.Store, iteration: Path, left_out: str) -> None:
    with megatron_folders.pickled_as_megatron():
        torch.save(megatron_folders.common(evil=Runs), iteration / "common.pt")
    _, contents = import_checkpoint(store, iteration, ref="old", exclude=[left_out])
    assert contents.left_out == (left_out,)


def test_a_key_that_means_something_else(refuse: Refuse, iteration: Path) -> None:
    rename(iteration, "embedding.word_embeddings.weight", "common")
    assert "has a tensor with the key 'common'" in refuse(iteration)
