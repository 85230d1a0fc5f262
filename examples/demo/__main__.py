"""The command line of the demo."""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from examples.demo.story import run_story
from examples.demo.supervisor import JobFailedError
from examples.demo.train import SIZES


def main() -> int:
    """Runs the demo; the exit code is 0 if the killed run ended bit-identical to the undisturbed one."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Train a small GPT twice, once killed several times and once undisturbed, and compare the results bit by bit.",
    )
    parser.add_argument("--folder", type=Path, help="an empty or missing folder for the store (default: a temporary one)")
    parser.add_argument("--size", choices=SIZES, default="demo", help="size of the model and length of the training (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="number of kills (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="seed of the random moments (default: a new one each time; printed)")
    arguments = parser.parse_args()
    if arguments.kills < 1:
        parser.error("--kills must be 1 or more")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="tsck-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    seed = random.SystemRandom().randrange(10_000) if arguments.seed is None else arguments.seed
    try:
        return run_story(folder.resolve(), size=arguments.size, kills=arguments.kills, seed=seed)
    except JobFailedError as exc:
        print(f"the demo stopped: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
