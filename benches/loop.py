"""A training loop with a save every ten steps, to a store so slow that a save takes 2 s: `python -m benches.loop --folder /tmp/bench`.

time: each way of saving in a process of its own, ten steps with a save and ten without in turns (`_training`); the first save does not
count. What ours may cost is one warm copy of the state for each save, and 2 %.
memory: runs of their own, since asking for it takes time: the kernel's high-water mark of the trainer beyond what it held before its first
save (exact), and the highest sum over its processes, shared memory counted once (sampled).
budget: a save at every step, far more than the store takes, under a budget of one copy of the state.

`--quick` tries all of it on a smaller state, in some two minutes.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benches._training import SAVERS, TSCK, Job, Trained, flood, train
from benches._usage import pss_bytes, watch_others
from tensorstore_ck.common.rate_limit import BURST_SECONDS

MIB = 1 << 20
SAMPLE_SECONDS = 0.1
PARTS = ("time", "memory", "budget")
ON_FULL = ("block", "skip", "replace")


def run(job: Job, *, on_full: str = "", sampled: bool = False) -> tuple[str, int]:
    """What a process of its own answers, and the highest sum of its family's memory if that is asked for."""
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    described = json.dumps(job._replace(folder=str(job.folder)))  # type: ignore[arg-type]
    command = [sys.executable, "-m", "benches.loop", "--child", described, "--on-full", on_full]
    highest = 0
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process:
        while sampled and process.poll() is None:
            highest = max(highest, pss_bytes(process.pid))
            time.sleep(SAMPLE_SECONDS)
        answer, _ = process.communicate()
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{said.read()}\n{job.saver} failed")
    shutil.rmtree(job.folder)
    return answer.splitlines()[-1], highest


def answer_parent(described: str, on_full: str) -> None:
    job = Job(*json.loads(described))
    job = job._replace(folder=Path(job.folder))
    print(json.dumps(flood(job, on_full) if on_full else train(job)), flush=True)


def time_all(jobs: list[Job]) -> None:
    print("| saver | 10 steps | with a save | + | of that the call | outside it | beyond one warm copy | durable after |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with watch_others() as others:
        for job in jobs:
            trained = Trained(*json.loads(run(job)[0]))
            pairs = list(zip(trained.plain_seconds, trained.saving_seconds, strict=True))
            plain, saving = sum(trained.plain_seconds), sum(trained.saving_seconds)
            extra = statistics.median(b - a for a, b in pairs)
            stall = statistics.median(trained.stall_seconds)
            share = statistics.median((b - a - trained.copy_seconds) / a for a, b in pairs)
            cells = [f"{plain / job.pairs:.3f} s", f"{saving / job.pairs:.3f} s", f"{extra * 1e3:.0f} ms", f"{stall * 1e3:.0f} ms"]
            cells += [f"{(extra - stall) * 1e3:.0f} ms", f"{share:+.1%}" + (" (must be <= 2 %)" if job.saver == TSCK else "")]
            print(f"| {job.saver} | {' | '.join(cells)} | {statistics.median(trained.store_seconds):.2f} s |", flush=True)
    print(f"{jobs[0].pairs} pairs each; + and what follows are medians of pairs; {others}\n")


def measure_all(jobs: list[Job]) -> None:
    print("| saver | trainer's high-water mark, beyond the state | all its processes |\n|---|---|---|", flush=True)
    for job in jobs:
        answer, highest = run(job._replace(pairs=1, copies=0), sampled=True)
        trained = Trained(*json.loads(answer))
        print(f"| {job.saver} | {trained.extra_bytes / MIB:.0f} MiB | {(highest - trained.before_pss_bytes) / MIB:.0f} MiB |", flush=True)
    print(f"the state has {jobs[0].size_bytes / MIB:.0f} MiB\n")


def measure_budget(job: Job) -> None:
    print("| tsck, budget of one copy, a put at every step | high-water mark beyond state and budget |\n|---|---|", flush=True)
    for on_full in ON_FULL:
        beyond = int(run(job, on_full=on_full)[0])
        print(f'| on_full="{on_full}" | {beyond / MIB:.0f} MiB (must be <= 128) |', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--part", choices=PARTS, nargs="*", default=PARTS)
    parser.add_argument("--only", nargs="*", default=list(SAVERS), help=f"of {', '.join(SAVERS)}")
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--write-seconds", type=float, default=2.0)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--on-full", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        answer_parent(args.child, args.on_full)
        return
    if args.quick:
        args.gib, args.step_seconds, args.write_seconds, args.pairs = 0.125, 0.1, 0.5, 2
    size = int(args.gib * (1 << 30)) // 4096 * 4096
    rate = size / (args.write_seconds + BURST_SECONDS)
    jobs = [Job(name, args.folder / "loop", size, rate, args.step_seconds, args.pairs) for name in SAVERS if name in args.only]
    print(f"{size / MIB:.0f} MiB in 64 fp32 tensors, steps of {args.step_seconds} s, a store that takes {args.write_seconds} s for it\n")
    if "time" in args.part:
        time_all(jobs)
    if "memory" in args.part:
        measure_all(jobs)
    if "budget" in args.part:
        measure_budget(jobs[0]._replace(step_seconds=args.write_seconds / 5))


if __name__ == "__main__":
    main()
