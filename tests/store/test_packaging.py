"""What is installed is what is here. `make package` tries out what is built."""

from pathlib import Path

import tensorstore_ck

ROOT = Path(tensorstore_ck.__file__).parent


def test_every_folder_of_the_package_is_one_that_setuptools_finds() -> None:
    """It finds packages by their `__init__.py`: modules in a folder without one would be missing from what is installed."""
    folders = {path.parent for top in (ROOT, ROOT / "gc", ROOT / "chunker") for path in top.rglob("*.py")} - {ROOT / "standalone"}
    assert len(folders) > 30
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
