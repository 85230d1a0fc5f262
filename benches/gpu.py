"""What a GPU changes, in one run of at most 5 minutes: `python -m benches.gpu --out FOLDER [--folder /dev/shm/bench] [STEP ...]`.

Each step is a process with a timeout of its own, so that one that hangs or dies costs no other its figures. FOLDER gets `results.json`
and `results.txt`. Medians of three. Without a GPU the steps run on the CPU, with a small state, to try the bench itself.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS = {
    "limits": 40,
    "ids": 60,
    "save": 70,
    "unchanged": 50,
    "restore": 40,
    "stall": 40,
    "loop none": 40,
    "loop at-once": 60,
    "loop tsck": 60,
    "peers": 60,
}
"""Step -> its timeout in seconds."""


def run_step(step: str, folder: Path, timeout_seconds: float) -> dict[str, Any]:
    """The figures that a step printed, one JSON object a line; also those from before it failed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "benches._gpu_steps", *step.split(), "--folder", str(folder)]
    begin = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_seconds)
        output, error, code = done.stdout, done.stderr, str(done.returncode)
    except subprocess.TimeoutExpired as exc:
        output, error, code = _text(exc.stdout), _text(exc.stderr), f"more than {timeout_seconds:.0f} s"
    for line in output.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    if code != "0":
        found["ended with"] = f"{code}: {error[-1500:]}"
    found["step seconds"] = round(time.perf_counter() - begin, 1)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _text(output: str | bytes | None) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/bench"))
    parser.add_argument("steps", nargs="*", default=list(STEPS), metavar="STEP")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    with (args.out / "results.txt").open("w") as text:
        for step in args.steps:
            results[step] = run_step(step, args.folder, STEPS[step])
            lines = [f"## {step}", *(f"{name}: {value}" for name, value in results[step].items())]
            for file in (text, sys.stdout):
                print("\n".join(lines), file=file, flush=True)
            (args.out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
