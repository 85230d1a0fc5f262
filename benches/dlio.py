"""DLIO's checkpoint workload (MLPerf Storage), with its own torch.save and with a store: `python -m benches.dlio --folder /tmp/bench`.

Needs DLIO with mpi4py and an MPI in this environment (`pip install mpich mpi4py`, and DLIO from its repository). The shapes are those
of its `llama_8b_zero3`, with fewer and smaller layers; `fsync` is on, as MLPerf asks. Both take turns, each run of DLIO a process
for each rank. Loads are cold: before each the page cache drops all files of the folder.

On a virtual machine the first use of memory that its host has not provided takes seconds for a GiB. A save through the page cache leaves
provided memory behind when its files are dropped, and one with O_DIRECT leaves none: so as much memory is used and freed before each load.
Where the host takes free memory back (Linux's free page reporting, `/sys/module/page_reporting`), most of it is gone after two seconds.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import uuid
from pathlib import Path

MECHANISMS = {"DLIO's torch.save": "", "tsck": "benches._dlio_mechanism.TsckCheckpointing"}


def drop(folder: Path) -> None:
    """Writes what is dirty and drops it from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def provide_memory(gib: int) -> None:
    """Uses so much memory once and frees it."""
    with mmap.mmap(-1, gib << 30) as memory:
        for start in range(0, len(memory), mmap.PAGESIZE):
            memory[start] = 1


def run_dlio(folder: Path, mechanism: str, args: argparse.Namespace, *, writes: int, reads: int) -> dict[str, float]:
    """DLIO's own figures of one run."""
    out = folder.parent / f"out-{uuid.uuid4()}"
    options = {
        "model.num_layers": args.layers,
        "model.transformer.vocab_size": 32_000,
        "model.transformer.hidden_size": args.hidden,
        "model.transformer.ffn_hidden_size": 3 * args.hidden,
        "model.transformer.num_attention_heads": 16,
        "checkpoint.checkpoint_folder": folder,
        "checkpoint.num_checkpoints_write": writes,
        "checkpoint.num_checkpoints_read": reads,
        "checkpoint.time_between_checkpoints": 0,
        "checkpoint.randomize_tensor": True,
    }
    if mechanism:
        options["checkpoint.checkpoint_mechanism_classname"] = mechanism
    command = [
        "mpirun",
        "-n",
        str(args.ranks),
        sys.executable,
        "-m",
        "dlio_benchmark.main",
        "workload=llama_8b_zero3",
        f"hydra.run.dir={out}",
    ]
    command += [f"++workload.{name}={value}" for name, value in options.items()]
    environment = {**os.environ, "DLIO_RENDEZVOUS": str(folder.parent / f"meet-{uuid.uuid4()}"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    figures: dict[str, float] = json.loads((out / "summary.json").read_text())["metric"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--provided-gib", type=int, default=6)
    args = parser.parse_args()
    saves: dict[str, list[float]] = {name: [] for name in MECHANISMS}
    loads: dict[str, list[float]] = {name: [] for name in MECHANISMS}
    size = 0.0
    for _ in range(args.rounds):
        for name, mechanism in MECHANISMS.items():
            folder = args.folder / "checkpoints"
            folder.mkdir(parents=True)
            saved = run_dlio(folder, mechanism, args, writes=3, reads=0)
            size = saved["checkpoint_size_GB"]
            drop(folder)
            provide_memory(args.provided_gib)
            loaded = run_dlio(folder, mechanism, args, writes=0, reads=1)
            saves[name].append(saved["save_checkpoint_io_mean_GB_per_second"])
            loads[name].append(loaded["load_checkpoint_io_mean_GB_per_second"])
            shutil.rmtree(args.folder)
    print(f"{size:.2f} GiB a checkpoint, {args.ranks} ranks; GiB/s as DLIO counts, median (each round)\n")
    print("| | save | load, cold |\n|---|---|---|")
    for name in MECHANISMS:
        cells = [f"{statistics.median(found):.2f} ({', '.join(f'{one:.2f}' for one in found)})" for found in (saves[name], loads[name])]
        print(f"| {name} | {' | '.join(cells)} |")
    theirs, ours = MECHANISMS
    ratios = [statistics.median(mine / other for mine, other in zip(found[ours], found[theirs], strict=True)) for found in (saves, loads)]
    print(f"| ratio, median of pairs | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
