"""Runs trainers' own checkpoint tests against the adapters here: ``judge_trainers.py [TRAINER[=SOURCES] ...]``, by default all.

Without a folder of sources it downloads those of the installed version: from PyPI where the source package has the tests, else from
GitHub. judged_trainers.py says for each trainer which tests must fail, and why; stored_trainer.py puts the adapter into the place of the
trainer. The output has the rows of the table in docs/trainers.md. The exit code is 1 if a test ends otherwise than expected.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from judged_trainers import JUDGED, Judged

HERE = Path(__file__).resolve().parent
HUB = ("offline", "connect to", "couldn't connect", "Max retries", "LocalEntryNotFound", "ConnectError", "not a valid model identifier")
"""In the errors of tests that could not reach the Hugging Face Hub."""


class Ending(NamedTuple):
    """How a test ended."""

    how: str
    """passed, skipped or failed."""
    text: str


def download(trainer: str, judged: Judged, folder: Path) -> Path:
    """The tests of the installed version, without the rest of its sources."""
    version = importlib.metadata.version(trainer)
    try:
        if judged.archive is None:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", trainer, f"--dest={folder}"]
            subprocess.run([*command, f"{trainer}=={version}"], check=True)
            with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
                _extract(archive, judged, folder)
        else:
            url = judged.archive.format(version=version)
            with urllib.request.urlopen(url, timeout=60) as answer, tarfile.open(fileobj=answer, mode="r|gz") as archive:
                _extract(archive, judged, folder)
    except (OSError, tarfile.TarError, subprocess.CalledProcessError, StopIteration) as exc:
        sys.exit(
            f"cannot download the tests of {trainer} {version}: {exc}. Get its sources on another machine, and run "
            f'`make test-trainers TRAINERS="{trainer}=<their folder>"`'
        )
    return folder


def _extract(archive: tarfile.TarFile, judged: Judged, folder: Path) -> None:
    for member in archive:
        path = "/".join(PurePosixPath(member.name).parts[1:])
        if member.isfile() and path.startswith(judged.kept) and ".." not in path and (data := archive.extractfile(member)):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(data, file)


def run(trainer: str, judged: Judged, sources: Path, *options: str) -> dict[str, Ending]:
    """How each test ended."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "stored_trainer"]
        command += [f"--trainer={trainer}", f"--junitxml={report}", "--rootdir", str(sources), *options, *judged.tests]
        if judged.left_out:
            command += ["-k", " and ".join(f"not {name}" for name in judged.left_out)]
        env = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
        done = subprocess.run(command, cwd=sources, env=env, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not report.exists():
            sys.exit(f"pytest ended with {done.returncode} and without a report:\n{done.stdout}")
        cases = ET.parse(report).iter("testcase")
        endings = {f"{str(case.get('classname')).rpartition('.')[2]}.{case.get('name')}": _ending(case) for case in cases}
    if done.returncode not in (0, 1) or not endings:
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout}")
    return endings


def _ending(case: ET.Element) -> Ending:
    for each in case:
        if each.tag in ("failure", "error"):
            return Ending("failed", f"{each.get('message')}\n{each.text}")
        if each.tag == "skipped":
            return Ending("skipped", str(each.get("message")))
    return Ending("passed", "")


def judge(judged: Judged, plain: dict[str, Ending], with_files: dict[str, Ending]) -> Iterator[str]:
    """The rows of the table, and what is not as it should be, which begins with an exclamation mark."""
    counts: Counter[str] = Counter()
    for name, ending in plain.items():
        second = with_files.get(name)
        last = ending if second is None else second
        why = judged.fails.get(name.partition(".")[2].partition("[")[0])
        if ending.how == "skipped":
            counts["skipped"] += 1
        elif last.how == "failed" and any(word in last.text for word in HUB):
            counts["without the Hub not run"] += 1
        elif ending.how == "failed" and why is None:
            yield f"! {name} failed:\n{ending.text}"
        elif second is not None and second.how == "failed":
            yield f"! {name} failed with the files:\n{second.text}"
        elif ending.how == "failed":
            counts["failed by design"] += 1
            yield f"| `{name}` | {why} | {'' if second is None else 'passed with these files'} |"
        elif why is not None:
            yield f"! {name} passed, although judged_trainers.py says that it fails: {why}"
        else:
            counts["passed"] += 1
    yield f"{len(plain)} tests: {', '.join(f'{number} {what}' for what, number in counts.items())}"


def main() -> None:
    """See the module."""
    is_right = True
    for given in sys.argv[1:] or JUDGED:
        trainer, _, place = given.partition("=")
        if trainer not in JUDGED:
            sys.exit(f"{trainer} is none of {', '.join(JUDGED)}")
        judged = JUDGED[trainer]
        with tempfile.TemporaryDirectory() as folder:
            sources = Path(place).resolve() if place else download(trainer, judged, Path(folder))
            missing = [path for path in judged.tests if not (sources / path).exists()]
            if missing:
                sys.exit(f"{sources} has no {missing[0]}: give the folder of the sources of {trainer}")
            print(f"{trainer} {importlib.metadata.version(trainer)}", flush=True)
            plain = run(trainer, judged, sources)
            with_files = run(trainer, judged, sources, "--with-files") if judged.looks_for_files else {}
            for row in judge(judged, plain, with_files):
                print(row, flush=True)
                is_right &= not row.startswith("!")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
