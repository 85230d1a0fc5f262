"""Writes `.ci/build-tools.txt`: what a release is built with, in the versions of `constraints.txt`, each with the hashes of its files.

`python .ci/hash_build_tools.py` after a change of those versions. pip compares the hashes when `make package` installs them, so a file
that somebody replaced in an index or on the way is refused. torch and what else is needed to run is not needed to build.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("build", "packaging", "pyproject-hooks", "setuptools")
WRITTEN = ROOT / ".ci" / "build-tools.txt"


def pinned() -> dict[str, str]:
    """Name -> the version in `constraints.txt`."""
    lines = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in lines}


def main() -> None:
    """Downloads the wheel of each, and writes the file."""
    versions, lines = pinned(), ["# Written by .ci/hash_build_tools.py."]
    for tool in TOOLS:
        wanted = f"{tool}=={versions[tool]}"
        with tempfile.TemporaryDirectory() as folder:
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder)
            subprocess.run((*pip, wanted), check=True)
            (wheel,) = Path(folder).iterdir()
            lines.append(f"{wanted} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    WRITTEN.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
