"""Which slow tests a run of `.ci/run` takes."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def choosing() -> Any:
    spec = importlib.util.spec_from_file_location("choose_slow", Path(__file__).parents[2] / ".ci" / "choose_slow.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SECONDS = {
    "tests/log/test_fold.py": 10.0,
    "tests/log/test_processes.py": 20.0,
    "tests/gc/test_crashes.py": 30.0,
    "tests/gc/test_kill.py": 30.0,
    "tests/docs/test_code_blocks.py": 40.0,
    "tests/integrations/dcp/test_ranks.py": 50.0,
    "fuzz/smoke.sh": 60.0,
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("tensorstore_ck/log/fold.py", {"tests/log/test_fold.py"}),
        ("tensorstore_ck/log/names.py", {"tests/log/test_fold.py", "tests/log/test_processes.py"}),
        ("tensorstore_ck/log/cache/lmdb.py", {"tests/log/test_fold.py", "tests/log/test_processes.py"}),
        ("tensorstore_ck/gc/mark.py", {"tests/gc/test_crashes.py", "tests/gc/test_kill.py"}),
        ("tests/gc/test_kill.py", {"tests/gc/test_kill.py"}),
        ("docs/guides/s3.md", {"tests/docs/test_code_blocks.py"}),
        ("README.md", {"tests/docs/test_code_blocks.py"}),
        ("pyproject.toml", set()),
        ("tensorstore_ck/gc/PROTOCOL.md", set()),
    ],
)
def test_the_mirrors_of_a_file(choosing: Any, changed: str, expected: set[str]) -> None:
    assert choosing.mirrors(changed, SECONDS) == expected


def test_what_changed_goes_before_what_imports_it_and_before_the_turn(choosing: Any) -> None:
    imports = {
        "tests/integrations/dcp/test_ranks.py": {"tensorstore_ck.log.fold"},
        "tensorstore_ck/gc/mark.py": {"tensorstore_ck.log.names"},
    }
    planned = choosing.choose(SECONDS, ["tensorstore_ck/log/fold.py"], imports, 0, 1000)
    assert planned.chosen[:2] == ["tests/log/test_fold.py", "tests/integrations/dcp/test_ranks.py"]
    assert set(planned.chosen[2:]) == {path for path, turn in choosing.turns(SECONDS).items() if turn == 0} - set(planned.chosen[:2])
    assert planned.left_out == []


def test_the_budget_is_kept_and_what_does_not_fit_is_named(choosing: Any) -> None:
    planned = choosing.choose(SECONDS, ["tensorstore_ck/gc/mark.py", "tensorstore_ck/log/fold.py"], {}, 0, 45)
    assert sum(SECONDS[path] for path in planned.chosen) <= 45
    assert {"tests/gc/test_crashes.py", "tests/gc/test_kill.py", "tests/log/test_fold.py"} <= {*planned.chosen, *planned.left_out}


def test_each_file_has_its_turn_within_three_days(choosing: Any) -> None:
    planned = [choosing.choose(SECONDS, [], {}, turn, 1000).chosen for turn in range(3)]
    assert sorted(path for each in planned for path in each) == sorted(SECONDS)


def test_imports_are_found_in_every_form(choosing: Any) -> None:
    source = "import a.b\nfrom c.d import e\ndef f():\n    from tests.gc import stores\n"
    assert choosing.imported_by(source) == {"a.b", "c.d", "c.d.e", "tests.gc", "tests.gc.stores"}
    assert choosing.module_of("tensorstore_ck/gc/mark.py") == "tensorstore_ck.gc.mark"
    assert choosing.module_of("tensorstore_ck/log/__init__.py") == "tensorstore_ck.log"
