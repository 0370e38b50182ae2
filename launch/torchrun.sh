#!/usr/bin/env bash
# Train with torchrun, on one machine or many.
#
#   one machine:   launch/torchrun.sh
#   N machines:    HEAD=first-machine:29400 NNODES=N launch/torchrun.sh     on each of them
#
# Further arguments go to pretrain_diff.py. When a process dies, the ranks of all machines start anew
# from the last checkpoint, up to MAX_RESTARTS times; a machine that was lost joins again by starting
# this script on it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# 1. What to train.
TRAIN=(
  --config "${CONFIG:-configs/125M/diff_v2.yaml}"
  --data-path "${DATA:-data/corpus_text_document}"
  --tokenizer-model "${TOKENIZER:-data/tokenizer.model}"
  --save "${RUN:-runs/125M}/checkpoints" --load "${RUN:-runs/125M}/checkpoints"
  --save-interval 500
  --log-dir "${RUN:-runs/125M}"
)
# 2. Where.
NNODES=${NNODES:-1}
PROCESSES=${PROCESSES:-gpu} # a machine's processes: a number, or gpu for all its GPUs
HEAD=${HEAD:-localhost:29400}
# This machine's address, where the others can not find it by its host name (some containers).
ADDRESS=${ADDRESS:-}
MAX_RESTARTS=${MAX_RESTARTS:-3}

MEET=()
if [ -n "$ADDRESS" ]; then
  is_head=false
  [ "$ADDRESS" = "${HEAD%:*}" ] && is_head=true
  MEET=(--local-addr "$ADDRESS" --rdzv-conf "is_host=$is_head")
fi

source launch/environment.sh
exec torchrun \
  --nnodes "$NNODES" --nproc-per-node "$PROCESSES" --max-restarts "$MAX_RESTARTS" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${RUN_ID:-megadiff}" \
  "${MEET[@]}" \
  pretrain_diff.py "${TRAIN[@]}" "$@"
