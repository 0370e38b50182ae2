"""Exchange with Hugging Face, and drop-in modules for other codebases."""

from megadiff.interop.flash_diff_attention import FlashDiffAttention

__all__ = ["FlashDiffAttention"]
