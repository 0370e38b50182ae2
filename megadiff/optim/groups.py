"""Which rule updates a section, whether it decays, and how fast it learns: said here alone."""

import math

from torch import nn

from megadiff.config import OptimizerConfig
from megadiff.optim.muon import is_muon_matrix
from megadiff.parallel.parameter import Group, Section, named_sections


def update_rule(section: Section, config: OptimizerConfig) -> str:
    """The rule for `section`: "adam", "sgd" or "muon"."""
    if config.optimizer == "muon" and not is_muon_matrix(section):
        return "adam"
    return config.optimizer


def group_rule(group: Group, config: OptimizerConfig) -> tuple[bool, float]:
    """Whether `group` decays, and its learning-rate multiplier."""
    decays = group in ("matrix", "embedding")
    return decays, config.lambda_lr_multiplier if group == "lambda" else 1.0


def describe_groups(module: nn.Module, config: OptimizerConfig) -> list[str]:
    """A line for each group of the parameters of `module`: who decays, who learns how fast."""
    tensors: dict[tuple[str, Group], dict[str, int]] = {}
    for _, section in named_sections(module):
        members = tensors.setdefault((update_rule(section, config), section.group), {})
        members[section.name] = math.prod(section.shape)
    lines = []
    for (rule, group), members in sorted(tensors.items()):
        decays, multiplier = group_rule(group, config)
        decay = "weight decay" if decays else "no decay"
        rate = "" if multiplier == 1.0 else f", learning rate x {multiplier:g}"
        count = f"{len(members)} tensors, {sum(members.values()):,} parameters"
        lines.append(f"{group}: {count}, {rule}, {decay}{rate}")
    return lines
