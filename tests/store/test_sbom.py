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


def test_a_release_is_built_with_tools_of_known_hashes() -> None:
    """In the versions of constraints.txt: `.ci/hash_build_tools.py` writes the list again."""
    pinned = {line.replace("_", "-") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()}
    lines = (ROOT / ".ci" / "build-tools.txt").read_text(encoding="utf-8").splitlines()[1:]
    found = [re.fullmatch(r"(\S+==\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert {match[1] for match in found if match} <= pinned
    assert {match and match[1].partition("==")[0] for match in found} == {"build", "packaging", "pyproject-hooks", "setuptools"}
