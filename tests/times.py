"""Where the time of tests goes, as tables of Markdown: `python -m tests.times build/test.jsonl [build/test-slow.jsonl ...] [--slowest 50]`.

`make test`, `make test-slow` and `make test-apart` leave these reports.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from tests.effort import suite_of

PHASES = {"setup": "set-up", "call": "call", "teardown": "teardown"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--slowest", type=int, default=50)
    given = parser.parse_args()
    by_suite: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    tests: defaultdict[str, int] = defaultdict(int)
    pieces = []
    for path in given.reports:
        for line in path.read_text().splitlines():
            report = json.loads(line)
            if report["$report_type"] != "TestReport":
                continue
            suite = (
                path.stem.removeprefix("test-")
                if "apart" in path.stem
                else suite_of(report["nodeid"], is_slow="slow" in report["keywords"])
            )
            by_suite[suite][report["when"]] += report["duration"]
            tests[suite] += report["when"] == "call"
            pieces.append((report["duration"], PHASES[report["when"]], report["nodeid"].removeprefix("tests/")))
    print("| suite | tests | set-up, s | call, s | teardown, s |\n|---|---|---|---|---|")
    for suite, seconds in sorted(by_suite.items()):
        print(f"| {suite} | {tests[suite]:,} | {' | '.join(f'{seconds[phase]:.0f}' for phase in PHASES)} |")
    print("\n| s | phase | test |\n|---|---|---|")
    for taken, phase, name in sorted(pieces, reverse=True)[: given.slowest]:
        print(f"| {taken:.1f} | {phase} | `{name}` |")


if __name__ == "__main__":
    main()
