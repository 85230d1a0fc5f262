"""Chooses the slow tests of a run of `.ci/run`, by the seconds that they took in the last full run (`slow_seconds.json`).

In this order, until the budget is spent: tests of what changed since that run, tests of what imports that, and the third of all others
whose turn it is on the day of HEAD's commit, so that each runs within three days of commits. Prints what was left out. Leaves in `build`
the chosen files of tests (`slow.txt`; `apart.txt` has those that need the environment of trainers) and other commands (`commands.txt`).

`choose_slow.py --record` notes the seconds of a full run from the reports that it left in `build`.
"""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
RECORD = Path(__file__).with_name("slow_seconds.json")
APART = tuple(
    f"tests/integrations/{name}"
    for name in (
        *("titan/", "deepspeed/", "megatron/", "nemo/", "nvrx/", "ray/test_example.py"),
        *("launchers/test_nvrx.py", "launchers/test_torchft.py", "test_model_signing.py"),
    )
)
"""As in the Makefile: their tests run in an environment of their own."""
BUDGET_SECONDS = 1200
"""Of tests, two at a time."""
NEW_SECONDS = 30
"""What a file is taken to need that no full run has seen."""
TURNS = 3


@dataclass(frozen=True)
class Choice:
    """What runs, and what would have run with a larger budget."""

    chosen: list[str]
    left_out: list[str]


def module_of(path: str) -> str:
    """The dotted name of a Python file, as the package's own imports have it."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_by(source: str) -> set[str]:
    """The modules that a Python file imports, by their dotted names; names imported from a module count as modules too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def mirrors(path: str, tests: Iterable[str]) -> set[str]:
    """The test files of a changed file: itself, or those named after it, or else all of the folder that mirrors its own."""
    if path.startswith("tests/"):
        return {path} & set(tests)
    folder, _, name = path.removeprefix("tensorstore_ck/").rpartition("/")
    if path.startswith(("docs/", "examples/")) or path == "README.md":
        folder = "docs"
    elif not path.endswith((".py", ".c")):
        return set()
    named = f"tests/{folder}/test_{name.removesuffix('.py')}" if folder else f"tests/{name.removesuffix('.py')}/"
    found = {test for test in tests if test.startswith(named)}
    while not found and folder:
        found = {test for test in tests if test.startswith(f"tests/{folder}/")}
        folder = folder.rpartition("/")[0]
    return found


def turns(seconds: Mapping[str, float]) -> dict[str, int]:
    """Deals the files out to the turns, which take about the same time."""
    filled = [0.0] * TURNS
    dealt = {}
    for path in sorted(seconds, key=lambda path: (-seconds[path], path)):
        dealt[path] = filled.index(min(filled))
        filled[dealt[path]] += seconds[path]
    return dealt


def choose(
    seconds: Mapping[str, float], changed: Sequence[str], imports: Mapping[str, set[str]], turn: int, budget_seconds: float = BUDGET_SECONDS
) -> Choice:
    """Plans a run.

    Args:
        seconds: of each file of slow tests.
        changed: files, since the last full run.
        imports: of each Python file of the package and the tests, the modules.
        turn: whose turn it is.
        budget_seconds: what the chosen ones take at most.
    """
    first = set().union(*(mirrors(path, seconds) for path in changed))
    modules = {module_of(path) for path in changed if path.endswith(".py")}
    importers = [path for path, imported in imports.items() if imported & modules]
    second = set().union(*(mirrors(path, seconds) for path in importers)) - first
    dealt = turns(seconds)
    today = {path for path in seconds if dealt[path] == turn}
    order = [sorted(group, key=lambda path: (path not in today, path)) for group in (first, second, today - first - second)]
    chosen: list[str] = []
    left_out = []
    for path in [path for group in order for path in group]:
        fits = sum(seconds[each] for each in chosen) + seconds[path] <= budget_seconds
        (chosen if fits else left_out).append(path)
    return Choice(chosen, left_out)


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.split("\n")[:-1]


def _changed_since(commit: str, tracked: list[str]) -> list[str]:
    """The files; all of them where a shallow clone does not have the commit."""
    try:
        return _git("diff", "--name-only", commit, "HEAD")
    except subprocess.CalledProcessError:
        return tracked


def _has_slow_tests(path: str) -> bool:
    text = (ROOT / path).read_text()
    return path.startswith(APART) or "mark.slow" in text or "mark.s3" in text


def _reports(path: Path) -> Iterator[tuple[str, float]]:
    for line in path.read_text().splitlines():
        report = json.loads(line)
        if report["$report_type"] == "TestReport":
            yield report["nodeid"].split("::")[0], report["duration"]


def record() -> None:
    """Notes what a full run took."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for name in ("test-slow", "test-apart", "test-apart-newest"):
        for path, taken in _reports(BUILD / f"{name}.jsonl"):
            seconds[path] += taken
    for line in (BUILD / "commands.seconds").read_text().splitlines():
        taken, command = line.split(maxsplit=1)
        seconds[command] = 2 * float(taken)  # alone on two cores
    rounded = {path: max(round(taken, 1), 0.1) for path, taken in sorted(seconds.items())}
    RECORD.write_text(json.dumps({"commit": _git("rev-parse", "HEAD")[0], "seconds": rounded}, indent=1) + "\n")


def main() -> None:
    """Chooses for HEAD."""
    recorded = json.loads(RECORD.read_text())
    tracked = _git("ls-files")
    changed = _changed_since(recorded["commit"], tracked)
    python = [path for path in tracked if path.endswith(".py") and path.startswith(("tensorstore_ck/", "tests/"))]
    slow = {path for path in python if path.split("/")[-1].startswith("test_") and _has_slow_tests(path)}
    known = {path: taken for path, taken in recorded["seconds"].items() if path in slow or not path.startswith("tests/")}
    seconds = {**dict.fromkeys(sorted(slow), NEW_SECONDS), **known}
    imports = {path: imported_by((ROOT / path).read_text()) for path in python}
    day = int(_git("log", "-1", "--format=%ct")[0]) // 86_400
    choice = choose(seconds, changed, imports, day % TURNS)
    BUILD.mkdir(exist_ok=True)
    tests = [path for path in choice.chosen if path.startswith("tests/")]
    (BUILD / "slow.txt").write_text("\n".join(path for path in tests if not path.startswith(APART)))
    (BUILD / "apart.txt").write_text("\n".join(path for path in tests if path.startswith(APART)))
    (BUILD / "commands.txt").write_text("".join(f"{path}\n" for path in choice.chosen if not path.startswith("tests/")))
    taken = sum(seconds[path] for path in choice.chosen)
    print(f"slow tests: {len(choice.chosen)} of {len(seconds)} files, {taken:.0f} of {BUDGET_SECONDS} s, turn {day % TURNS}")
    for path in choice.chosen:
        print(f"  {seconds[path]:6.1f} s {path}")
    if choice.left_out:
        print(f"left out, for they do not fit into {BUDGET_SECONDS} s:")
        for path in choice.left_out:
            print(f"  {seconds[path]:6.1f} s {path}")
    others = len(seconds) - len(choice.chosen) - len(choice.left_out)
    print(f"left out until their turn comes: {others} files, {sum(seconds.values()) - taken:.0f} s with those above")


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        record()
    else:
        main()
