#!/usr/bin/env bash
# A few seconds of every fuzz target: fuzz/smoke.sh [seconds each]. Fails when a target finds something.
# 1,536 MiB of memory: torch, and the 800 MiB that fuzz_store.py allows. The other targets bound what an input takes themselves.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c "import atheris" 2>/dev/null; then
    echo "fuzz: skipped, atheris is not installed (pip install atheris==3.0.0; it has no wheel for Python 3.12 and later)"
    exit 0
fi
export python seconds="${1:-4}"
fuzz() {
    log=$(mktemp)
    if "$python" "$1" -max_total_time="$seconds" -rss_limit_mb=1536 -timeout=60 -artifact_prefix="${TMPDIR:-/tmp}/" -print_final_stats=1 >"$log" 2>&1; then
        echo "fuzz: $1: $(grep -o 'number_of_executed_units: *[0-9]*' "$log" | grep -o '[0-9]*$') inputs, $(grep -o 'peak_rss_mb: *[0-9]*' "$log" | grep -o '[0-9]*$') MiB at most"
    else
        tail -60 "$log"
        echo "fuzz: $1 found something; the input's path is above"
        touch "$found"
    fi
    rm -f "$log"
}
export -f fuzz
export found="$(mktemp -u)"
printf '%s\0' fuzz/fuzz_*.py | xargs -0 -n 1 -P "$(nproc)" bash -c 'fuzz "$0"'
if [ -e "$found" ]; then
    rm -f "$found"
    exit 1
fi
