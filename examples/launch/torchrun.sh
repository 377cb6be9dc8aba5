#!/bin/bash
# Scripts that stay as they are, under torchrun, whose agents meet by forged: torchrun.sh train.py ARGS...
#
# Run it on each of one to four hosts, with $FORGED_ENDPOINT and $FORGED_TOKEN set. When a host comes, goes or fails, the
# agents start their workers again, with new ranks, as with --rdzv-backend=c10d; no host is special.
set -euo pipefail
exec torchrun --nnodes=1:4 --nproc-per-node="${WORKERS_PER_HOST:-8}" --max-restarts=3 \
    --rdzv-backend=forged --rdzv-endpoint="${FORGED_ENDPOINT:-}" --rdzv-id="${FORGED_JOB:-llm}" "$@"
