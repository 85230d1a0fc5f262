"""Runs transformers' own checkpoint tests against the Trainer of tensorstore_ck: ``judge_transformers.py [CHECKOUT OF TRANSFORMERS]``.

Without a checkout it downloads the tests of the installed version from GitHub. It runs them twice: as they are, where the tests that look
for files that a snapshot replaces must fail and all others must pass; then with these files there (see stored_trainer.py), where all must
pass. It prints the rows of the table in docs/trainers.md, and exits with 1 if a test ends otherwise than it says.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import xml.etree.ElementTree as ET
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import transformers

HERE = Path(__file__).resolve().parent
ARCHIVE = "https://codeload.github.com/huggingface/transformers/tar.gz/refs/tags/v{version}"
TESTS = "tests/trainer/test_trainer_checkpointing.py"
KEPT = ("tests/__init__.py", "tests/trainer/", "tests/fixtures/sample_text.txt", "tests/fixtures/tests_samples/")
FILES = {
    "test_save_checkpoints": "weights, config, optimizer.pt, scheduler.pt, training_args.bin",
    "test_save_collator_tokenizer_by_default": "the tokenizer",
    "test_can_resume_training_lm": "weights, config, optimizer.pt, scaler.pt",
    "test_resume_training_with_shard_checkpoint": "weights: splits model.safetensors",
    "test_resume_training_with_checkpoint": "weights: splits model.safetensors",
    "test_resume_from_interrupted_training": "weights",
    "test_resume_batch_order": "weights: reads model.safetensors",
    "test_load_best_model_with_save_best": "weights: compares model.safetensors",
    "test_load_best_model_with_save": "weights: compares model.safetensors",
    "test_save_best_checkpoint": "weights, config, optimizer.pt, scheduler.pt, training_args.bin",
    "test_load_best_model_at_end": "weights, config, optimizer.pt, scheduler.pt, training_args.bin",
    "test_load_best_model_from_safetensors": "weights, config, optimizer.pt, scheduler.pt, training_args.bin",
}
"""Tests that fail by design -> the files of a checkpoint folder that they look for."""
LEFT_OUT = {
    "test_auto_batch_size_with_deepspeed": "DeepSpeed",
    "test_auto_batch_size_finder": "an example script and data sets of the Hub",
}
"""Tests that are not run -> what they need."""
HUB = ("offline", "connect to", "couldn't connect", "Max retries", "LocalEntryNotFound", "ConnectError", "not a valid model identifier")
"""In the errors of tests that could not reach the Hub."""


class Ending(NamedTuple):
    """How a test ended."""

    how: str
    """passed, skipped or failed."""
    text: str


def download(version: str, folder: Path) -> Path:
    """The tests of a release, without the rest of its sources."""
    url = ARCHIVE.format(version=version)
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, tarfile.open(fileobj=answer, mode="r|gz") as archive:
            for member in archive:
                path = "/".join(PurePosixPath(member.name).parts[1:])
                if member.isfile() and path.startswith(KEPT) and ".." not in path and (data := archive.extractfile(member)):
                    target = folder / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("wb") as file:
                        shutil.copyfileobj(data, file)
    except (OSError, tarfile.TarError) as exc:
        sys.exit(
            f"cannot download {url}: {exc}. Get the sources of transformers {version} on another machine, and run "
            "`make test-trainers TRANSFORMERS=<their folder>`"
        )
    return folder


def run(sources: Path, *options: str) -> dict[str, Ending]:
    """How each test ended."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "stored_trainer"]
        left_out = " and ".join(f"not {name}" for name in LEFT_OUT)
        command += [f"--junitxml={report}", "--rootdir", str(sources), "-k", left_out, *options, TESTS]
        env = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
        done = subprocess.run(command, cwd=sources, env=env, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not report.exists():
            sys.exit(f"pytest ended with {done.returncode} and without a report:\n{done.stdout}")
        cases = ET.parse(report).iter("testcase")
        endings = {str(case.get("name")): _ending(case) for case in cases}
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


def judge(plain: dict[str, Ending], with_files: dict[str, Ending]) -> list[str]:
    """The rows of the table, and what is not as it should be, which begins with an exclamation mark."""
    rows, counts = [], {"passed": 0, "by design": 0, "skipped": 0, "hub": 0}
    for name, ending in plain.items():
        second = with_files[name]
        if ending.how == "skipped":
            counts["skipped"] += 1
        elif second.how == "failed" and any(word in second.text for word in HUB):
            counts["hub"] += 1
            rows.append(f"| `{name}` | not run: cannot reach the Hub | |")
        elif second.how == "failed" or (ending.how == "failed" and name not in FILES):
            rows.append(f"! {name} failed:\n{second.text if second.how == 'failed' else ending.text}")
        elif ending.how == "failed":
            counts["by design"] += 1
            rows.append(f"| `{name}` | looks for {FILES[name]} | passed with these files |")
        else:
            counts["passed"] += 1
            if name in FILES:
                rows.append(f"! {name} passed, although the list in this script says that it fails")
    return [f"{len(plain)} tests: {', '.join(f'{number} {what}' for what, number in counts.items() if number)}", *rows]


def main() -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else download(transformers.__version__, Path(folder))
        if not (sources / TESTS).exists():
            sys.exit(f"{sources} has no {TESTS}: give the folder of the sources of transformers {transformers.__version__}")
        rows = judge(run(sources), run(sources, "--with-files"))
    print("\n".join(rows))
    sys.exit(any(row.startswith("!") for row in rows))


if __name__ == "__main__":
    main()
