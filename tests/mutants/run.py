"""Plants each fault of the lists beside it in a copy of the tree, and runs the tests that should find it.

    python -m tests.mutants.run [NAME ...] [--jobs 2]

A mutant that no test finds is a missing test; the exit code is then 1. The lists (`*.toml`) name a file of the package, a text that it has
once, what takes its place, and the files or ids of tests, which run until the first failure.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600
"""A mutant may make a test wait for ever."""
FAILED = 1
"""pytest's exit code; others say that the tests could not be run."""


@dataclass(frozen=True)
class Mutant:
    """A fault: `old`, which occurs once in `file`, becomes `new`, and one of `tests` fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Plants the fault; returns the file's text before it."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has the text {text.count(self.old)} times")
        path.write_text(text.replace(self.old, self.new))
        return text


def mutants() -> list[Mutant]:
    """Those of all lists; each name begins with its list's."""
    found = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        for name, row in tomllib.loads(path.read_text()).items():
            found.append(Mutant(f"{path.stem}.{name}", row["file"], row["old"], row["new"], tuple(row["tests"])))
    return found


def _copy_tree(target: Path) -> None:
    """The files that git knows, and the compiled kernel."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    kernels = [str(path.relative_to(ROOT)) for path in (ROOT / "tensorstore_ck/format/codec").glob("*.so")]
    for name in [*listed.stdout.rstrip("\0").split("\0"), *kernels]:
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def _outcome(mutant: Mutant, tree: Path) -> str:
    """`found`, or what happened instead."""
    before = mutant.apply(tree)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *mutant.tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            check=False,
            timeout=LIMIT_SECONDS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return "found, by waiting for ever"
    finally:
        (tree / mutant.file).write_text(before)
    if done.returncode == FAILED:
        return "found"
    return "NOT FOUND" if done.returncode == 0 else f"NOT RUN, pytest ended with {done.returncode}:\n{done.stdout[-2000:]}"


def run(chosen: Iterable[Mutant], jobs: int) -> int:
    """How many were not found."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            _copy_tree(Path(folder) / str(number))
            trees.put(Path(folder) / str(number))

        def judge(mutant: Mutant) -> bool:
            tree = trees.get()
            try:
                outcome = _outcome(mutant, tree)
            finally:
                trees.put(tree)
            print(f"{mutant.name}: {outcome}", flush=True)
            return outcome.startswith("found")

        outcomes = list(pool.map(judge, chosen))
    print(f"{sum(outcomes)} of {len(outcomes)} mutants were found")
    return outcomes.count(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="a mutant, or a list; without any, all")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    chosen = [each for each in mutants() if not given.names or each.name in given.names or each.name.split(".")[0] in given.names]
    if not chosen:
        parser.error("no such mutant")
    return 1 if run(chosen, given.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
