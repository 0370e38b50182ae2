"""Shared by all tests: one torch thread, so that runs are repeatable and ranks do not fight for cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
