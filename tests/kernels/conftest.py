"""Without a GPU, Triton kernels run in Triton's interpreter, which is chosen at their import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
