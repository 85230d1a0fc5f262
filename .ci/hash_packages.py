"""Writes `.ci/build-tools.txt`, what a release is built with, and `.ci/run-time.txt`, what it needs at run time but for torch.

`.venv/bin/python .ci/hash_packages.py` after a change of `constraints.txt`, which has their versions. pip compares the hashes when `make`
installs them, so a file that somebody replaced in an index or on the way is refused. torch is left out: its wheels for CPUs and for each
CUDA are other files than PyPI's, and each index has its own.
"""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import sbom

ROOT = Path(__file__).resolve().parent.parent
BUILD_TOOLS = ("build", "packaging", "pyproject-hooks", "setuptools")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = tuple(
    [f"manylinux_2_{minor}_{machine}" for minor in (5, 12, 17, 24, 27, 28, 34)] + [f"manylinux{year}_{machine}" for year in (1, 2010, 2014)]
    for machine in ("x86_64", "aarch64")
)


def pinned() -> dict[str, str]:
    """Name -> the version in `constraints.txt`."""
    lines = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in lines}


def needed_at_run_time() -> list[str]:
    """Names of what `tensorstore_ck` needs, and of what that needs."""
    seen: dict[str, str] = {}
    sbom.needed(sbom.NAME, seen)
    return sorted(name for name in seen if name != "torch")


def hashes(wanted: list[str]) -> dict[str, list[str]]:
    """``name==version`` -> the hashes of its wheels for each Python and platform, as the index states them."""
    found: dict[str, set[str]] = {}
    for python, tags in itertools.product(PYTHONS, PLATFORMS):
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-"]
        pip += ["--only-binary", ":all:", "--target", "unused", "--python-version", python]
        pip += [argument for tag in tags for argument in ("--platform", tag)]
        report = json.loads(subprocess.run([*pip, *wanted], check=True, stdout=subprocess.PIPE).stdout)
        for item in report["install"]:
            name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
            found.setdefault(f"{name}=={item['metadata']['version']}", set()).add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    return {name: sorted(found[name]) for name in sorted(found)}


def main() -> None:
    """Writes both files."""
    versions = pinned()
    for file, names in (("build-tools.txt", BUILD_TOOLS), ("run-time.txt", needed_at_run_time())):
        lines = ["# Written by .ci/hash_packages.py."]
        for requirement, known in hashes([f"{name}=={versions[name]}" for name in names]).items():
            lines.append(" \\\n    ".join([requirement, *(f"--hash=sha256:{each}" for each in known)]))
        (ROOT / ".ci" / file).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
