"""Exchange with Hugging Face transformers, which is needed for what runs there:

    from megadiff.interop.hf import LlamaDiffAttention, replace_attention_layers

Converting files (`tools/convert.py`) does not need it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megadiff.interop.hf.modeling_megadiff import (
        LlamaDiffAttention,
        MegadiffConfig,
        MegadiffForCausalLM,
    )
    from megadiff.interop.hf.replace import replace_attention_layers

__all__ = [
    "LlamaDiffAttention",
    "MegadiffConfig",
    "MegadiffForCausalLM",
    "replace_attention_layers",
]


def __getattr__(name: str) -> Any:
    """Import what needs transformers when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "replace" if name == "replace_attention_layers" else "modeling_megadiff"
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("transformers"):
            raise
        raise ImportError(f"{name} needs transformers 5: pip install 'megadiff[hf]'") from error
