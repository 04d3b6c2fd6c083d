"""A tiny tokenizer and small files of text, made once."""

import importlib.util
from pathlib import Path

import pytest


def pytest_configure(config):
    """Imports what ranks use where they are forked: a second a rank."""
    config.addinivalue_line("ranks_preload", "par_testing.ranks.transformers_once")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with the tokenizer of a tiny model, and paths of small corpora by their format."""
    pytest.importorskip("transformers")
    script = Path(__file__).parents[3] / "tools" / "tiny_model.py"
    if not script.exists():
        pytest.skip("tools/tiny_model.py is not part of this source distribution")
    spec = importlib.util.spec_from_file_location("tiny_model", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("tiny")
    module.make_model(folder / "model", files=8, weights=0)
    return folder / "model", module.write_corpora(folder / "texts", files=20)
