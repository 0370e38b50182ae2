"""The configuration of a run: dataclasses, read from YAML and flags, validated once.

Every field is a flag, under Megatron-LM's name where it has one (`num_layers` is `--num-layers`),
and a key of its section in a YAML file; a flag wins over the file. Nothing here imports torch.
"""
# ruff: noqa: F401  what others import from here

from megadiff.config.options import (
    DELTA_MIXERS,
    MIXER_SYMBOLS,
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TokenMixer,
    TrainingConfig,
    sections,
)
from megadiff.config.reading import load_config, to_dict, to_yaml, update_config
from megadiff.config.validate_split import data_parallel_size, stage_sizes
from megadiff.config.validation import NATIVE_OPTIONS, iterations, validate
