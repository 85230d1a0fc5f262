"""`tsck export --to deepspeed-universal`: stock DeepSpeed loads the folder, on other stages and numbers of ranks."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tensorstore_ck.errors import AlreadyExistsError, UnsupportedValueError
from tensorstore_ck.integrations.exporting import export_snapshot
from tensorstore_ck.integrations.importing import import_checkpoint
from tensorstore_ck.store import ReadOnlyStore, Store
from tests.effort import effort
from tests.integrations.deepspeed.same_bits import differences
from tests.integrations.deepspeed.stages_job import SAVED_AFTER, parse
from tests.integrations.rank_runs import Said, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

JOB = "tests.integrations.deepspeed.folders_job"
SAVED = ["2,bf16", "2,fp16"]
PIPELINE = "1,bf16,stages=2"
PIPELINES = ["1,bf16,stages=1", '1,bf16,stages=2,grad_accum_dtype="fp32"']
TAG = f"global_step{SAVED_AFTER}_universal"
LOADED = [
    (["1,bf16", '1,bf16,grad_accum_dtype="fp32"', "2,bf16"], "bf16-2", 2),
    (["3,bf16"], "bf16-2", 2),
    *effort([], [(["2,fp16", "1,fp16"], "fp16-2", 4), (["3,fp16"], "fp16-2", 1)]),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which three ranks have saved, as DeepSpeed does and to a store."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(JOB, folder, "save", *SAVED, ranks=3)
    return folder


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two ranks have saved a pipeline of two stages."""
    folder = tmp_path_factory.mktemp("pipelines")
    run_ranks(JOB, folder, "save", PIPELINE)
    return folder


@pytest.fixture
def store(saved: Path) -> Iterator[Store]:
    with tsck.open(saved / "store", cache_dir=saved / "cache-test") as opened:
        yield opened


def optimizer_and_counters(store: ReadOnlyStore, ref: str) -> dict[str, Any]:
    """Masters, moments, weights of trained parameters, schedule and counters, by name."""
    with store.open_snapshot(ref) as found:
        wanted = ("optimizer.state.", "scheduler.", "extra.deepspeed.", "model.")
        left = ("seen", "micro_steps", "micro_offset")  # DeepSpeed loads none of them from a universal checkpoint
        tensors = {name: found[name][...] for name in found if name.startswith(wanted) and not name.endswith(left)}
        values = {name: each for name, each in found.state_values.items() if name.startswith(wanted) and not name.endswith(left)}
        return {**tensors, **values}


def counters(store: ReadOnlyStore, ref: str) -> dict[str, Any]:
    """The counters of an engine, and those that DeepSpeed does not save."""
    with store.open_snapshot(ref) as found:
        return {name: each for name, each in found.state_values.items() if name.startswith("extra.deepspeed.")}


def losses(said: list[Said]) -> dict[tuple[int, int], list[float]]:
    return {(each["at"], each["rank"]): each["losses"] for each in said}


@pytest.mark.parametrize("case", LOADED)
def test_stock_deepspeed_loads_an_export(saved: Path, tmp_path: Path, store: Store, case: tuple[list[str], str, int]) -> None:
    kinds, name, ranks = case
    target = tmp_path / f"from-{name}"
    report = export_snapshot(store, f"runs/{name}", target, format="deepspeed-universal")
    assert any("load_universal" in note for note in report.notes)
    assert any("fixed.weight" in note and "seen" in note for note in report.notes)
    expected = optimizer_and_counters(store, f"runs/{name}")
    said = run_ranks(JOB, saved, "load", *(f"{kind},load_universal=true@{target}" for kind in kinds), ranks=ranks)
    if name.startswith("bf16"):  # DeepSpeed begins with a loss scale of its own in float16
        resumed = run_ranks(JOB, saved, "resume", *(f"{kind}@runs/{name}" for kind in kinds), ranks=ranks)
        assert losses(said) == losses(resumed)
    refs = {each["ref"] for each in said}
    assert (len(refs), {each["step"] for each in said}) == (len(kinds), {SAVED_AFTER})
    with tsck.open(saved / "store", read_only=True, cache_dir=saved / f"cache-{ranks}-{len(kinds)}") as loaded:
        for ref in refs:
            found = optimizer_and_counters(loaded, ref)
            assert len(found) > 40
            assert differences(expected, found) == [], ref


def test_stock_deepspeed_loads_an_export_of_a_pipeline(pipelines: Path, tmp_path: Path) -> None:
    ref = parse(PIPELINE).ref
    with tsck.open(pipelines / "store", cache_dir=pipelines / "cache-test") as store:
        export_snapshot(store, ref, tmp_path / "out", format="deepspeed-universal")
        expected = optimizer_and_counters(store, ref)
        import_checkpoint(store, tmp_path / "out", ref="again")
        assert differences(expected, optimizer_and_counters(store, "again")) == []
        assert counters(store, ref) == counters(store, "again")
    said = run_ranks(JOB, pipelines, "load", *(f"{kind},load_universal=true@{tmp_path / 'out'}" for kind in PIPELINES))
    for address in (ref, "again"):
        assert losses(said) == losses(run_ranks(JOB, pipelines, "resume", *(f"{kind}@{address}" for kind in PIPELINES)))
    with tsck.open(pipelines / "store", read_only=True, cache_dir=pipelines / "cache-test") as loaded:
        for name in {each["ref"] for each in said}:
            found = optimizer_and_counters(loaded, name)
            assert len(found) > 60
            assert differences(expected, found) == [], name


def test_an_export_is_imported_again(saved: Path, tmp_path: Path, store: Store) -> None:
    export_snapshot(store, "runs/fp16-2", tmp_path / "out", format="deepspeed-universal")
    assert (tmp_path / "out" / "latest_universal").read_text() == TAG
    import_checkpoint(store, tmp_path / "out", ref="again/fp16-2")
    expected, found = store.checkout("runs/fp16-2"), store.checkout("again/fp16-2")
    assert differences(optimizer_and_counters(store, "runs/fp16-2"), optimizer_and_counters(store, "again/fp16-2")) == []
    assert torch.equal(found["model"]["seen"], expected["model"]["seen"])
    assert counters(store, "again/fp16-2") == counters(store, "runs/fp16-2")
    assert found["rank"]["rank_values"]["client_state"] == {"epoch": 7, "rank": 0}
    export_snapshot(store, "again/fp16-2", tmp_path / "again", format="deepspeed-universal")
    names = sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.pt"))
    assert names == sorted(path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.pt"))


def test_an_export_is_whole_or_not_there(tmp_path: Path, store: Store) -> None:
    target = tmp_path / "out"
    export_snapshot(store, "runs/bf16-2", target, format="deepspeed-universal")
    for overwrite in (False, True):
        with pytest.raises(AlreadyExistsError):
            export_snapshot(store, "runs/bf16-2", target, format="deepspeed-universal", overwrite=overwrite)
    store.put_snapshot({"model": {"w": torch.ones(3)}}, ref="runs/plain")
    for address, options in (("runs/plain", {}), ("runs/bf16-2", {"exclude": ["model.inner.weight"]})):
        with pytest.raises(UnsupportedValueError, match=r"universal checkpoint needs|master weights need"):
            export_snapshot(store, address, tmp_path / "other", format="deepspeed-universal", **options)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_loss_scale_is_in_a_note(tmp_path: Path, store: Store) -> None:
    command = ["export", "runs/fp16-2", "--to", "deepspeed-universal", str(tmp_path / "out"), "-s", store.url]
    done = subprocess.run([sys.executable, "-m", "tensorstore_ck.cli", *command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "set initial_scale_power to 9 for 512" in done.stdout
