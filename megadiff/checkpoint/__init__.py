"""Canonical state (global names, global shapes, shards) and its storage."""
