"""Builds the wheel and the sdist from the files that git knows, compares the wheel with the package, and tries each in a fresh environment.

It builds twice, in folders of other names, and compares the hashes: whoever builds the same commit on the same system gets the same files.

The fresh environments take the dependencies from the environment that runs this script (torch is large), and the package itself from what
was built: the commands run outside of the repository. Leaves the two files in `dist`, with a bill of materials (`sbom.py`).
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "tensorstore_ck/format/codec/_kernel.abi3.so"
SUFFIXES = (".py", ".pyi", ".typed", ".cu", ".html", ".css", ".js", ".LICENSE")
DOCUMENTS = {
    "tensorstore_ck/FORMAT.md",
    "tensorstore_ck/troubleshooting.md",
    "tensorstore_ck/gc/PROTOCOL.md",
    "tensorstore_ck/chunker/README.md",
    "tensorstore_ck/standalone/README.md",
}
USE = """
import sys
from pathlib import Path
import numpy as np, torch
import tensorstore_ck as tsck
from tensorstore_ck.format.codec import _kernel
assert Path(tsck.__file__).is_relative_to(sys.prefix), tsck.__file__
for name in tsck.__all__:
    getattr(tsck, name)
state = {"w": torch.arange(1 << 18, dtype=torch.float32), "rng": np.arange(7), "step": 3}
with tsck.open("store", create=True) as store:
    store.put_snapshot(state, ref="runs/a", step=3)
    got = store.checkout("runs/a")
assert torch.equal(got["w"], state["w"]) and np.array_equal(got["rng"], state["rng"]) and got["step"] == 3
"""


def commit_time() -> str:
    """Of the newest commit, for the times in the files; a caller's SOURCE_DATE_EPOCH counts more."""
    shown = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return os.environ.get("SOURCE_DATE_EPOCH", shown.strip())


def tools(folder: Path) -> Path:
    """The Python of a new environment with what a release is built with, nothing else; pip compares the hashes of what it installs."""
    python = folder / "tools" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", folder / "tools", cwd=folder)
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--only-binary", ":all:")
    run(*pip, "--require-hashes", "--requirement", ROOT / ".ci" / "build-tools.txt", cwd=folder)
    return python


def build(python: Path, names: list[str], folder: Path, epoch: str) -> tuple[Path, Path]:
    """The wheel and the sdist of these files, which do not depend on the clock, the user or the folder."""
    source, dist = folder / "source", folder / "dist"
    for name in names:
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    fixed = {"SOURCE_DATE_EPOCH": epoch, "CFLAGS": "-g0"}  # debug information has the folder's name
    run(python, "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=folder, **fixed)
    (wheel,), (sdist,) = dist.glob("*-cp311-abi3-*.whl"), dist.glob("*.tar.gz")
    repack(sdist, int(epoch))
    return wheel, sdist


def repack(sdist: Path, epoch: int) -> None:
    """Replaces times and users: setuptools writes those of its own copies."""
    packed = sdist.with_suffix(".packed")
    with (
        tarfile.open(sdist) as old,
        packed.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            data = old.extractfile(member) if member.isreg() else None
            member.mtime, member.uid, member.gid, member.uname, member.gname, member.pax_headers = epoch, 0, 0, "", "", {}
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, data)
    packed.replace(sdist)


def sha256(path: Path) -> str:
    """The hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What a command prints, in an environment that knows nothing of this repository or of the user's caches."""
    outer = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TSCK_STORE")}
    environment = outer | {"XDG_STATE_HOME": f"{cwd}/state", "XDG_CACHE_HOME": f"{cwd}/cache"} | variables
    done = subprocess.run(command, check=False, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def package_files(source: Path) -> set[str]:
    """The Python files, CUDA sources, pages and documents of the package, under the names that they have when it is installed."""
    names = {path.relative_to(source).as_posix() for path in (source / "tensorstore_ck").rglob("*") if path.is_file()}
    return {name for name in names if PurePosixPath(name).suffix in SUFFIXES or name in DOCUMENTS}


def try_out(built: Path, folder: Path, version: str) -> None:
    """Installs what was built into a new environment, and uses it there as a program and as a user of the command line would."""
    folder.mkdir()
    environment = folder / "env"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    packages = next(environment.glob("lib/python*/site-packages"))
    # Only appended to sys.path: an editable install that is there has no effect.
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    run(sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "--quiet", "--no-deps", built, cwd=folder)
    run(environment / "bin/python", "-c", USE, cwd=folder)
    tsck = environment / "bin/tsck"
    printed = run(tsck, "--version", cwd=folder), run(tsck, "log", "runs/a", "-s", "store", cwd=folder)
    run(tsck, "fsck", "--read-data", "-s", "store", cwd=folder)
    if printed[0] != f"tsck {version}\n" or " 3 " not in printed[1]:
        sys.exit(f"{built.name}: tsck said {printed}")
    print(f"{built.name}: installed and used")


def main() -> None:
    """Builds, compares, tries out."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True).stdout
        names, epoch = [name for name in os.fsdecode(listed).split("\0") if name], commit_time()
        for each in ("first", "a-second-one"):
            (folder / each).mkdir()
        python = tools(folder)
        wheel, sdist = build(python, names, folder / "first", epoch)
        again = build(python, names, folder / "a-second-one", epoch)
        differing = [one.name for one, other in zip((wheel, sdist), again, strict=True) if sha256(one) != sha256(other)]
        if differing:
            sys.exit(f"two builds of the same files differ: {', '.join(differing)}")
        version = wheel.name.split("-")[1]
        wanted = package_files(folder / "first" / "source") | {KERNEL}
        with zipfile.ZipFile(wheel) as archive:
            found = {name for name in archive.namelist() if ".dist-info/" not in name}
        if found != wanted:
            sys.exit(f"{wheel.name} lacks {sorted(wanted - found)} and has {sorted(found - wanted)}, which is not in the package")
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda built: try_out(built, folder / built.suffix[1:], version), (wheel, sdist)))
        (ROOT / "dist").mkdir(exist_ok=True)
        for built in (wheel, sdist):
            shutil.copy2(built, ROOT / "dist")
            print(f"{sha256(built)}  {built.name}")
        materials = run(sys.executable, ROOT / ".ci" / "sbom.py", version, cwd=folder)
        (ROOT / "dist" / f"{wheel.name.split('-')[0]}-{version}.cdx.json").write_text(materials)


if __name__ == "__main__":
    main()
