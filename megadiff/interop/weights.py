"""Weights on their way between a megadiff checkpoint and other formats, one tensor at a time.

Nothing here needs a process group, and no more than one tensor is in memory.
"""

from megadiff.config import ModelConfig
from megadiff.models.decoder import Decoder
from megadiff.parallel.parameter import named_sections


class InteropError(ValueError):
    """What can not be read, converted or represented; the message says what and why."""


def global_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every global tensor of the model, by its name."""
    model = Decoder(config, device="meta", max_positions=config.max_position_embeddings or 0)
    return {section.name: section.shape for _, section in named_sections(model)}
