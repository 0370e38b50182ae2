#!/usr/bin/env bash
# Train on DeepSpeed's engine, on one machine or on those of a hostfile ("name slots=8" lines, the
# machines reachable by ssh without a password and with this folder at the same path).
#
#   launch/deepspeed.sh                          one machine
#   HOSTFILE=hosts.txt launch/deepspeed.sh       many
#
# Further arguments go to pretrain_diff.py. torchrun starts DeepSpeed runs as well: add --deepspeed
# and --deepspeed_config to launch/torchrun.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# 1. What to train.
TRAIN=(
  --config "${CONFIG:-configs/125M/diff_v2.yaml}"
  --deepspeed --deepspeed_config "${ZERO:-configs/deepspeed/zero2.json}"
  --data-path "${DATA:-data/corpus_text_document}"
  --tokenizer-model "${TOKENIZER:-data/tokenizer.model}"
  --save "${RUN:-runs/125M}/checkpoints" --load "${RUN:-runs/125M}/checkpoints"
  --save-interval 500
  --log-dir "${RUN:-runs/125M}"
)
# 2. Where.
WHERE=()
[ -n "${HOSTFILE:-}" ] && WHERE+=(--hostfile "$HOSTFILE")
[ -n "${PROCESSES:-}" ] && WHERE+=(--num_gpus "$PROCESSES") # of one machine; all its GPUs by default

source launch/environment.sh
if [ -n "${HOSTFILE:-}" ]; then # of these settings the launcher takes only what a file names along
  export DS_ENV_FILE="$PWD/${RUN:-runs/125M}/settings.env"
  [[ "${RUN:-}" = /* ]] && DS_ENV_FILE="$RUN/settings.env"
  mkdir -p "${DS_ENV_FILE%/*}"
  env | grep -E '^(OMP|CUDA_DEVICE|PYTORCH|TORCH|NCCL|GLOO|DS_ACCELERATOR)' >"$DS_ENV_FILE"
fi
exec deepspeed --no_local_rank "${WHERE[@]}" pretrain_diff.py "${TRAIN[@]}" "$@"
