"""Folders that stock Megatron wrote, imported; snapshots exported, loaded by stock Megatron: bit for bit, on 1 and 2 ranks."""

from enum import Enum
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tensorstore_ck.integrations.exporting import export_snapshot
from tensorstore_ck.integrations.importing import import_checkpoint
from tensorstore_ck.integrations.importing.megatron_types import ENUMS
from tests.effort import effort
from tests.integrations.rank_runs import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
JOB = "tests.integrations.megatron.folders_job"
LAYOUT = "fully_reshardable"


@pytest.mark.parametrize("ranks", effort([2], [1, 2]))
def test_a_folder_of_megatron_there_and_back(tmp_path: Path, ranks: int) -> None:
    run = tmp_path / "run"
    said = run_ranks(JOB, run, "save", LAYOUT, str(ranks), ranks=ranks)
    stock = said[0]["saved"]
    exported = [str(tmp_path / name / "iter_0000002") for name in ("imported", "here")]
    for path in exported:
        Path(path).parent.mkdir()
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        snapshot, contents = import_checkpoint(store, run, ref="runs/old")
        assert (snapshot.step, contents.skipped, contents.left_out) == (2, {}, ())
        export_snapshot(store, "runs/old", exported[0], format="megatron", max_file_bytes=100_000)
    with tsck.open(run / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        export_snapshot(store, "runs/here", exported[1], format="megatron")
    for count in (1, 2):
        paths = (stock, *exported)
        found = run_ranks(JOB, run, "compare", LAYOUT, str(count), str(tmp_path / "store"), "runs/old", *paths, ranks=count)
        assert [each["same"] for each in found if each["rank"] == 0] == [*exported, str(tmp_path / f"named-{count}" / "iter_0000002")]
        assert len(found) == 3 * count
        assert all(each["keys"] > 60 for each in found)


def test_the_enums_are_those_of_megatron() -> None:
    from megatron.core.safe_globals import SAFE_GLOBALS

    import tests.integrations.megatron.on_cpu  # noqa: F401

    enums = [listed for listed in SAFE_GLOBALS if isinstance(listed, type) and issubclass(listed, Enum)]
    assert len(enums) > 5
    for each in enums:
        assert {member.value: member.name for member in each}.items() <= ENUMS[each.__module__, each.__name__].items(), each
