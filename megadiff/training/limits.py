"""Sizes beyond any machine are refused before anything is allocated, with the arithmetic."""

import os

import torch

from megadiff.config import Config, ConfigError
from megadiff.models.memory import Memory, estimate_memory

SPARE = 2  # refuse beyond this many times the memory: an estimate is one, and hosts swap
ORDER_BYTES = 12  # of a sample in the indices that say which tokens it is made of


def check_sizes(config: Config, world_size: int, device: torch.device) -> Memory:
    """The estimate of the fullest rank. Raises ConfigError for what is far beyond the memory."""
    m, t = config.model, config.training
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = host // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        on_device = torch.cuda.get_device_properties(device).total_memory
        room = max(room, on_device) if t.deepspeed else on_device  # which may offload
    order = ORDER_BYTES * t.total_samples
    if order > host:
        raise ConfigError(
            f"--train-iters {t.train_iters} x --global-batch-size {t.global_batch_size} = "
            f"{t.total_samples} samples: their order alone takes {_gb(order)}, and this machine "
            f"has {_gb(host)}"
        )
    factors = 3 if m.swiglu else 2
    least = m.num_layers * m.hidden_size * m.ffn_size * factors
    least += (m.vocab_size or 0) * m.hidden_size
    width = torch.finfo(getattr(torch, t.dtype)).bits // 8
    if least * width // world_size > SPARE * room:
        raise ConfigError(
            f"--num-layers {m.num_layers} x --hidden-size {m.hidden_size} x {m.ffn_size} of the "
            f"MLP x {factors}, and a vocabulary of {m.vocab_size}, are {least:.3g} parameters: "
            f"{_gb(least * width // world_size)} on each of {world_size} ranks that have "
            f"{_gb(room)}"
        )
    fullest = max(estimate_memory(config, world_size), key=lambda memory: memory.total)
    # What DeepSpeed shards or offloads is not in the estimate.
    if (fullest.activations if t.deepspeed else fullest.total) > SPARE * room:
        raise ConfigError(
            f"the fullest rank would need about {fullest}, and has {_gb(room)}: lower "
            f"--micro-batch-size {t.micro_batch_size} or --seq-length {t.seq_length}, recompute "
            "activations, or split the model over more ranks"
        )
    return fullest


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f} GB"
