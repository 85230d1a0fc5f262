"""What the adapters of trainers have in common, without a trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import tensorstore_ck as tsck
from tensorstore_ck.errors import InvalidOptionError, MissingExtraError, NoSpaceError
from tensorstore_ck.integrations.trainer import persistent_workers
from tensorstore_ck.integrations.trainer.attach import attach
from tensorstore_ck.integrations.trainer.pointers import NamedSaves, SnapshotPointer, address_through_ref, newest_noted, read_pointer
from tensorstore_ck.integrations.trainer.versions import Package, changed_methods, changed_overrides, missing_attributes

REF = "runs/a"


class Save:
    """A save in progress, until it ends."""

    def __init__(self, step: int) -> None:
        self.step, self.ended, self.error = step, False, None

    def end(self, error: Any = None) -> None:
        self.ended, self.error = True, error

    def done(self) -> bool:
        return self.ended

    @property
    def root(self) -> str:
        return f"{self.step:064x}"

    def wait(self) -> Any:
        if self.error is not None:
            raise self.error
        return self


def name(named: NamedSaves, save: Any, folder: Path, **options: Any) -> None:
    named.name(save, [folder], "store", REF, run="1-0", **options)


def named_by(folder: Path) -> str | None:
    found = read_pointer(folder)
    return None if found is None else found.address


def test_a_pointer_names_the_step_until_the_root_is_known(tmp_path: Path) -> None:
    named, save, latest = NamedSaves(), Save(2), tmp_path / "latest"
    name(named, save, tmp_path / "two", latest=latest)
    named.finish()
    assert (named_by(tmp_path / "two"), latest.exists()) == (f"{REF}@2", False)
    save.end()
    named.finish()
    assert (named_by(tmp_path / "two"), latest.read_text()) == (save.root, "two")


@pytest.mark.parametrize("others", [("mp_rank_00_model_states.pt",), ()])
def test_a_failed_save_takes_only_its_pointer_away(tmp_path: Path, others: tuple[str, ...]) -> None:
    folder, latest = tmp_path / "out" / "last", tmp_path / "out" / "latest"
    named, save = NamedSaves(), Save(2)
    name(named, save, folder, latest=latest)
    for each in others:
        (folder / each).write_bytes(b"of a trainer")
    save.end(NoSpaceError("the disk is full", object_id="store"))
    named.finish()
    assert read_pointer(folder) is None
    assert folder.exists() == bool(others)
    assert all((folder / each).exists() for each in others)
    assert not latest.exists()


@pytest.mark.parametrize("error", [None, NoSpaceError("the disk is full", object_id="store")])
def test_a_save_that_ends_leaves_the_pointer_of_a_later_one(tmp_path: Path, error: Any) -> None:
    """Both were made to one folder; and nothing comes back that a user has deleted."""
    named, first, second, gone = NamedSaves(), Save(2), Save(3), Save(4)
    name(named, first, tmp_path / "last")
    name(named, second, tmp_path / "last")
    name(named, gone, tmp_path / "gone", latest=tmp_path / "latest")
    (tmp_path / "gone" / "snapshot.json").unlink()
    first.end(error)
    gone.end()
    named.finish()
    assert named_by(tmp_path / "last") == f"{REF}@3"
    assert named_by(tmp_path / "gone") is None
    assert not (tmp_path / "latest").exists()
    second.end()
    named.finish()
    assert named_by(tmp_path / "last") == second.root


def test_an_address_through_the_ref(store: tsck.Store) -> None:
    first = store.put_snapshot({"n": 1}, ref=REF, step=1)
    again = store.put_snapshot({"n": 2}, ref=REF, step=1, expect=first.root)
    stepless = [store.put_snapshot({"n": number}, ref=REF) for number in (3, 4)]
    elsewhere = store.put_snapshot({"n": 5}, ref="runs/b", step=1)
    found = [address_through_ref(store, *each) for each in ((again, REF), (first, REF, 3), (stepless[0], REF, 1), (stepless[1], REF))]
    assert found == [f"{REF}@1", f"{REF}~3", f"{REF}~1", f"{REF}~0"]
    assert address_through_ref(store, elsewhere, REF) == elsewhere.root
    assert SnapshotPointer(store.url, stepless[1].root).address_in(store, "file") == f"{REF}~0", "one snapshot, not the branch's newest"


class Native:
    """Of a trainer."""

    options = ("a",)

    def save(self, path: str) -> None: ...


class Mixin:
    """Of an adapter."""


def test_the_newest_snapshot_with_a_note(store: tsck.Store) -> None:
    assert newest_noted(store, REF, "trainer", ("tag", "a")) is None
    for step, tag in ((1, "a"), (2, "b"), (3, "a"), (4, "b")):
        store.put_snapshot({"x": step}, ref=REF, step=step, metadata={"trainer": {"tag": tag}, "other": "a"})
    store.put_snapshot({"x": 5}, ref=REF, step=5, metadata={"trainer": "a"})
    assert newest_noted(store, REF, "trainer", ("tag", "a")) == f"{REF}@3"
    assert newest_noted(store, REF, "trainer", ("tag", "a"), (1, 2)) == f"{REF}@1"
    assert newest_noted(store, REF, "other", ("tag", "a")) is None


def test_workers_that_begin_early_leave_no_trace_below_the_sampler_of_lightning() -> None:
    wrapped = pytest.importorskip("lightning.fabric.utilities.distributed").DistributedSamplerWrapper
    drawn_from = torch.Generator()
    drawn_from.manual_seed(3)
    sampler = wrapped(RandomSampler(range(8), generator=drawn_from), num_replicas=2, rank=0)
    loader: DataLoader[int] = DataLoader(range(8), sampler=sampler, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    before = drawn_from.get_state()
    persistent_workers.begin(loader)
    assert persistent_workers.has_begun(loader)
    assert torch.equal(drawn_from.get_state(), before)


class Balanced(RandomSampler):
    """A sampler that its dataset knows, too."""

    def __init__(self, dataset: "KnowsItsSampler") -> None:
        super().__init__(dataset)
        self.dataset = dataset


class KnowsItsSampler:
    def __init__(self) -> None:
        self._sampler = Balanced(self)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> int:
        return at


def test_a_dataset_may_know_its_sampler() -> None:
    dataset = KnowsItsSampler()
    loader: DataLoader[int] = DataLoader(dataset, sampler=dataset._sampler)  # type: ignore[arg-type]
    assert [*persistent_workers.samplers_of(loader)].count(dataset._sampler) == 1


def test_a_class_is_changed_back_where_the_start_fails() -> None:
    target, refused = Native(), InvalidOptionError("no", object_id="x")

    def fail() -> None:
        raise refused

    with pytest.raises(InvalidOptionError, match="no"):
        attach(target, Mixin, Native, fail, title="Thing", expected="a Native")
    assert type(target) is Native
    attach(target, Mixin, Native, lambda: None, title="Thing", expected="a Native")
    assert isinstance(target, Mixin)
    with pytest.raises(InvalidOptionError, match="this Thing saves into a store already"):
        attach(target, Mixin, Native, fail, title="Thing", expected="a Native")
    with pytest.raises(InvalidOptionError, match="attach a Native, not 3"):
        attach(3, Mixin, Native, fail, title="Thing", expected="a Native")


@pytest.mark.parametrize(("version", "supported"), [("1.11.9", False), ("1.12.0rc1", True), ("1.99", True), ("2.0.0", False)])
def test_versions(version: str, supported: bool) -> None:
    package = Package("Thing", "thing[all]", (1, 12), (2, 0), "thing==1.15.0")
    if supported:
        package.require_version(version)
    else:
        with pytest.raises(MissingExtraError, match=r"Thing .* is not supported: run `pip install 'thing\[all\]>=1\.12,<2'`"):
            package.require_version(version)


class Same:
    def save(self, path: str) -> None:
        """Overrides it with the same parameter."""


class Other:
    def save(self, target: str) -> None:
        """Overrides it with another parameter."""

    def load(self) -> None:
        """Overrides what is not there any more."""


def test_names_that_have_changed() -> None:
    assert [*changed_methods(Native, {"save": ("self", "path")})] == []
    assert [*changed_methods(Native, {"save": ("self",), "load": ("self",)})] == ["save", "load"]
    assert [*changed_overrides(Native, Same, ("save",))] == []
    assert [*changed_overrides(Native, Other, ("save", "load"))] == ["save", "load"]
    assert [*missing_attributes(Native(), ("options", "options.count", "options.none", "no.path"))] == ["options.none", "no.path"]
    package = Package("Thing", "thing", (1, 12), (2, 0), "thing==1.15.0")
    package.require_unchanged("1.13", ())
    with pytest.raises(MissingExtraError, match=r"the Native of Thing 1\.13 has another load than .* `pip install 'thing==1\.15\.0'`"):
        package.require_unchanged("1.13", ("load", "save"), owner="the Native of")
