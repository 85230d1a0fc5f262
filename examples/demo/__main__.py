"""The command line of the demo: where it plays, how large it is, and which random moments it takes."""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from examples.demo.story import tell
from examples.demo.supervisor import JobFailedError
from examples.demo.train import SIZES


def main() -> int:
    """Plays the story; the exit code is 0 if the killed run ended with the bits of the undisturbed one."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Train a small GPT twice, once killed again and again and once left alone, and compare the two bit by bit.",
    )
    parser.add_argument("--folder", type=Path, help="an empty or missing folder for the store (default: a temporary one)")
    parser.add_argument("--size", choices=SIZES, default="demo", help="how large a model, for how long (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="how often the job is killed (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="which random moments (default: other ones each time; printed)")
    arguments = parser.parse_args()
    if arguments.kills < 1:
        parser.error("--kills must be 1 or more")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="tsck-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    seed = random.SystemRandom().randrange(10_000) if arguments.seed is None else arguments.seed
    try:
        return tell(folder.resolve(), size=arguments.size, kills=arguments.kills, seed=seed)
    except JobFailedError as exc:
        print(f"the demo stopped: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
