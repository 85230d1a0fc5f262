"""The bill of materials of a release."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci" / "sbom.py"


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
