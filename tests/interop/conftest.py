"""Fixtures of the tests that load code of models with transformers."""

import sys

import pytest


@pytest.fixture
def module_cache(tmp_path, monkeypatch) -> None:
    """A place of its own for the code that comes with models, and none of it imported before."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # transformers appends the place
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
