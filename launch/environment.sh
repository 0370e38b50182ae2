# Settings of NCCL and torch that matter for training; sourced by the launch scripts.
# shellcheck shell=bash

# One host thread a process: the work is on the GPU, and loader workers need the other cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Kernels start in the order they are issued, so that a collective meant to overlap with a product
# is not queued behind it.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# Segments that grow instead of many fixed ones: less memory lost to fragmentation.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# Only NCCL's warnings; INFO tells which network it picked, the first thing to check when slow.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# The flight recorder: on a timeout, which collective each rank was in.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# After a timeout torch lets ranks live for four times this long to write it: 10 s, not a minute.
export TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=${TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC:-2500}
# Workers that torchrun starts again meet at a new place: in torch 2.13 they would otherwise find the
# addresses of those that are gone, and wait for them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
# On clusters with several networks, name the one that ranks meet on, for example:
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
