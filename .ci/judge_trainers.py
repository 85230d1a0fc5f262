"""Runs trainers' own checkpoint tests against the adapters here: ``judge_trainers.py [TRAINER[=SOURCES] ...]``, by default all.

Without a folder of sources it downloads them: from PyPI where the source package has the tests, else from GitHub. judged_trainers.py says
for each trainer which tests must fail, and why, and which plugin of pytest puts the adapter into the place of the trainer. The output has
the rows of the table in docs/trainers. The exit code is 1 if a test ends otherwise than expected.

With `JUDGED_STOCK=1` in the environment, plugins of trainers in `.venv-apart` leave the trainer as it is: all that fails is shown, then.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from judged_trainers import JUDGED, Judged

HERE = Path(__file__).resolve().parent
APART = HERE.parent / ".venv-apart" / "bin" / "python"
EACH_RANK = '"$0" "$@" --junitxml="$FOLDER/report$RANK.xml" --basetemp="$FOLDER/files$RANK" || { code=$?; [ $code = 1 ] || exit $code; }'
"""For bash, of which torchrun starts one for each rank, and ends all if one fails: that tests failed is in the report."""
STOCK = "JUDGED_STOCK" in os.environ
HUB = ("offline", "connect to", "couldn't connect", "Max retries", "LocalEntryNotFound", "ConnectError", "not a valid model identifier")
"""In the errors of tests that could not reach the Hugging Face Hub."""


class Ending(NamedTuple):
    """How a test ended."""

    how: str
    """passed, skipped or failed."""
    text: str


def python_of(judged: Judged) -> str:
    """The interpreter that has the trainer."""
    if judged.apart and not APART.exists():
        sys.exit(f"there is no {APART}: run `make test-apart`")
    return str(APART) if judged.apart else sys.executable


def version_of(trainer: str, judged: Judged) -> str:
    """The installed one."""
    command = [python_of(judged), "-c", f"import importlib.metadata; print(importlib.metadata.version({judged.package or trainer!r}))"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]


def download(trainer: str, version: str, judged: Judged, folder: Path) -> Path:
    """The tests of this version, without the rest of its sources."""
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
        place = sources / judged.folder
        arguments = ["-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", judged.plugin]
        arguments += ["--rootdir", str(place), *options, *judged.tests]
        if judged.plugin == "stored_trainer":
            arguments += [f"--trainer={trainer}"]
        if judged.left_out:
            arguments += ["-k", " and ".join(f"not {name}" for name in judged.left_out)]
        python = python_of(judged)
        command = ["bash", "-c", EACH_RANK, python, *arguments]
        if judged.ranks > 1:
            command = [python, "-m", "torch.distributed.run", f"--nproc-per-node={judged.ranks}", "--no-python", *command]
        path = f"{APART.parent}:{os.environ['PATH']}" if judged.apart else os.environ["PATH"]
        env = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}", "FOLDER": folder, "RANK": "0", "PATH": path, **judged.env}
        done = subprocess.run(command, cwd=place, env=env, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        reports = [*Path(folder).glob("report*.xml")]
        if len(reports) != judged.ranks:
            sys.exit(f"pytest ended with {done.returncode} and without a report:\n{done.stdout}")
        endings: dict[str, Ending] = {}
        for case in (case for report in reports for case in ET.parse(report).iter("testcase")):
            name, ending = f"{case.get('classname')}::{case.get('name')}", _ending(case)
            endings[name] = ending if ending.how == "failed" else endings.get(name, ending)
    if done.returncode or not endings:
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout}")
    return endings


def run_script(script: str, judged: Judged, sources: Path) -> dict[str, Ending]:
    """How each test ended that a script ran."""
    command = [python_of(judged), str(HERE / script), str(sources), "stock" if STOCK else "stored", str(judged.ranks), *judged.tests]
    env = os.environ | {"PYTHONPATH": str(HERE.parent), "PATH": f"{APART.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=env, check=False, stdout=subprocess.PIPE, text=True)
    endings: dict[str, Ending] = {}
    for line in done.stdout.splitlines():
        how, _, rest = line.partition(" ")
        if how in ("passed", "failed", "skipped"):
            name, _, text = rest.partition(" ")
            place, *classes, test = name.split("::")
            endings[f"{'.'.join([place.removesuffix('.py').replace('/', '.'), *classes])}::{test}"] = Ending(how, text)
    if done.returncode not in (0, 1) or not done.stdout.rstrip().endswith(f" {len(endings)} tests"):
        sys.exit(f"{script} ended with {done.returncode}, and did not run all tests:\n{done.stdout}")
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
        place, _, test = name.partition("::")
        name = f"{place.rpartition('.')[2]}.{test}"
        why = None if STOCK else judged.fails.get(test, judged.fails.get(test.partition("[")[0]))
        if ending.how == "skipped":
            counts["skipped"] += 1
        elif last.how == "failed" and not judged.apart and any(word in last.text for word in HUB):
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
            version = version_of(trainer, judged)
            sources = Path(place).resolve() if place else download(trainer, version, judged, Path(folder))
            missing = [path for path in judged.tests if not (sources / judged.folder / path.partition("::")[0]).exists()]
            if missing:
                sys.exit(f"{sources} has no {missing[0]}: give the folder of the sources of {trainer}")
            print(f"{trainer} {version}", flush=True)
            began = time.monotonic()
            plain = run_script(judged.script, judged, sources) if judged.script else run(trainer, judged, sources)
            with_files = run(trainer, judged, sources, "--with-files") if judged.looks_for_files else {}
            for row in judge(judged, plain, with_files):
                print(row, flush=True)
                is_right &= not row.startswith("!")
            print(f"{(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
