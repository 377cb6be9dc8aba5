#!/bin/bash
# Train on several hosts under Slurm: sbatch examples/launch/slurm.sh train.py ARGS...
#
# The batch script runs the daemon on the first host; srun starts one launch on each host. When a host fails, the others
# train on. Before its time limit the job drains, and is queued again: it resumes from its checkpoints.
#SBATCH --job-name=llm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=TERM@120
set -euo pipefail

workers=${WORKERS_PER_HOST:-8}
directory=$(mktemp -d "${TMPDIR:-/tmp}/forged-$SLURM_JOB_ID-XXXX")
export FORGED_SOCKET=$directory/forged.sock

forged run --data-dir "$directory" --listen "$(hostname):0" >"$directory/ready" &
trap 'kill %1; wait; rm -rf "$directory"' EXIT
until grep -q "is ready" "$directory/ready"; do kill -0 %1; sleep 0.2; done

# The port that the daemon has chosen, and a token that may control this job only.
FORGED_ENDPOINT=$(grep -o "tcp://[^;,]*" "$directory/ready")
FORGED_TOKEN=$(forgectl tokens create "slurm-$SLURM_JOB_ID" --role operator --job "$SLURM_JOB_NAME")
export FORGED_ENDPOINT FORGED_TOKEN

# Each task has its own $SLURM_NODEID. With --kill-on-bad-exit=0 a failed host does not end the others.
code=0
srun --kill-on-bad-exit=0 bash -c '
    exec forged launch -n "$0" --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --job "$SLURM_JOB_NAME" \
        --drain-timeout 100 "$@"' "$workers" "$@" || code=$?

# 143: all workers have drained before the time limit.
if [ "$code" = 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
