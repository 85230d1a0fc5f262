#!/usr/bin/env bash
# A few seconds of every fuzz target: fuzz/smoke.sh [seconds each]. Fails when a target finds something.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c "import atheris" 2>/dev/null; then
    echo "fuzz: skipped, atheris is not installed (pip install atheris==3.0.0; it has no wheel for Python 3.12 and later)"
    exit 0
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for target in fuzz/fuzz_*.py; do
    if ! "$python" "$target" -max_total_time="${1:-6}" -rss_limit_mb=512 -timeout=10 -artifact_prefix="${TMPDIR:-/tmp}/" -print_final_stats=1 >"$log" 2>&1; then
        tail -60 "$log"
        echo "fuzz: $target found something; the input's path is above"
        exit 1
    fi
    echo "fuzz: $target: $(grep -o 'number_of_executed_units: *[0-9]*' "$log" | grep -o '[0-9]*$') inputs, $(grep -o 'peak_rss_mb: *[0-9]*' "$log" | grep -o '[0-9]*$') MiB at most"
done
