"""Shared by all tests: one thread a process, so that runs repeat and ranks share the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
