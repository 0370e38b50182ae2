"""Distributed pretraining of Differential Transformers."""

__version__ = "0.1.0"
