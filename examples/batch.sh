#!/usr/bin/env bash
# Answers a file of requests; the same command continues after an interruption. Start a system first: `make serve`.
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-answers.jsonl}
millrace batch batch.jsonl --out "$out" --address "${MILLRACE_URL:-http://127.0.0.1:8000}"
cat "$out"
