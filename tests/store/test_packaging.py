"""What is installed is what is here."""

import tomllib
from pathlib import Path

import tensorstore_ck

ROOT = Path(tensorstore_ck.__file__).parent


def test_every_package_is_installed() -> None:
    found = {
        "tensorstore_ck",
        *(".".join(("tensorstore_ck", *path.parent.relative_to(ROOT).parts)) for path in ROOT.glob("*/**/__init__.py")),
    }
    found |= {"tensorstore_ck.chunker", "tensorstore_ck.gc"}  # links, which a glob does not follow
    listed = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(found) == sorted(listed)
