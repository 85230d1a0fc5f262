"""The bill of materials of a release, and what it is built with."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "sbom.py"


def test_the_bill_of_materials_has_what_is_needed_at_run_time() -> None:
    printed = subprocess.run([sys.executable, str(SCRIPT), "1.2.3"], capture_output=True, text=True, check=True).stdout
    materials = json.loads(printed)
    found = {component["name"]: component["purl"] for component in materials["components"]}
    assert materials["bomFormat"] == "CycloneDX"
    assert materials["metadata"]["component"]["purl"] == "pkg:pypi/tensorstore-ck@1.2.3"
    assert {"blake3", "lmdb", "msgpack", "numpy", "torch", "zstandard"} <= found.keys()
    assert not {"pytest", "ruff", "s3fs", "deepspeed"} & found.keys()
    assert found["torch"].partition("@")[0] == "pkg:pypi/torch"
    assert "+" not in found["torch"]
    assert len(set(found.values())) == len(found)


def known_hashes(file: str) -> dict[str, int]:
    """``name==version`` -> the number of files, of a list that `.ci/hash_packages.py` writes."""
    text = (ROOT / ".ci" / file).read_text(encoding="utf-8").replace(" \\\n    ", " ")
    lines = [line.split() for line in text.splitlines()[1:]]
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for _, *hashes in lines for each in hashes)
    return {name: len(hashes) for name, *hashes in lines}


def pinned() -> set[str]:
    """The lines of constraints.txt."""
    return {line.lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()}


def test_a_release_is_built_with_tools_of_known_hashes() -> None:
    """In the versions of constraints.txt: `.ci/hash_packages.py` writes the list again."""
    found = known_hashes("build-tools.txt")
    assert found.keys() <= pinned()
    assert {name.partition("==")[0] for name in found} == {"build", "packaging", "pyproject-hooks", "setuptools"}
    assert all(found.values())


def test_what_is_needed_at_run_time_has_known_hashes_but_torch() -> None:
    """Nor what a CUDA build of torch brings."""
    found = known_hashes("run-time.txt")
    printed = subprocess.run([sys.executable, str(SCRIPT), "1.2.3"], capture_output=True, text=True, check=True).stdout
    needed = {
        name
        for component in json.loads(printed)["components"]
        if not (name := component["name"]).startswith(("torch", "triton", "cuda-", "nvidia-"))
    }
    assert found.keys() <= pinned()
    assert needed <= {name.partition("==")[0] for name in found}
    compiled = min(count for name, count in found.items() if name.startswith(("blake3", "lmdb", "lz4", "msgpack", "numpy", "zstandard")))
    assert compiled >= len(["3.11", "3.12", "3.13", "3.14"]) * len(["x86_64", "aarch64"])
