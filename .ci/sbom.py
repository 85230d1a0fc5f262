"""What tensorstore_ck needs at run time, as a bill of materials in CycloneDX 1.6: `python .ci/sbom.py VERSION > sbom.cdx.json`.

Of the environment that runs it: what was built and tried with these versions. Without extras.
"""

import json
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "tensorstore_ck"


def needed(name: str, seen: dict[str, str]) -> None:
    """Adds what a package needs to `seen`: name -> version."""
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        found = canonicalize_name(requirement.name)
        if found in seen or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            seen[found] = distribution(found).version
        except PackageNotFoundError:
            continue  # of a platform or interpreter that this is not
        needed(found, seen)


def purl(name: str, version: str) -> str:
    """The package URL of a version on PyPI; that of a local build is the one that it was built from."""
    return f"pkg:pypi/{canonicalize_name(name)}@{version.partition('+')[0]}"


def components() -> Iterator[dict[str, Any]]:
    """What is needed, by name."""
    seen: dict[str, str] = {}
    needed(NAME, seen)
    for name, version in sorted(seen.items()):
        yield {"type": "library", "name": name, "version": version, "bom-ref": purl(name, version), "purl": purl(name, version)}


def bill_of_materials(version: str) -> dict[str, Any]:
    """The document for a version of this package."""
    listed = [*components()]
    this = {"type": "library", "name": NAME, "version": version, "bom-ref": purl(NAME, version), "purl": purl(NAME, version)}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": this},
        "components": listed,
        "dependencies": [{"ref": this["bom-ref"], "dependsOn": [component["bom-ref"] for component in listed]}],
    }


if __name__ == "__main__":
    print(json.dumps(bill_of_materials(sys.argv[1]), indent=2))
