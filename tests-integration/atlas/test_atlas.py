"""The page of supported models against models that are made and trained now."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.23")

ROOT = Path(__file__).parent.parent.parent


def check(*arguments):
    command = [sys.executable, str(ROOT / "tools/atlas.py"), *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]


@pytest.mark.storm
def test_atlas_one_type_is_as_on_the_page():
    check("gpt2", "--check", "1", "--jobs", "1")


@pytest.mark.storm
def test_atlas_every_type_is_as_on_the_page():
    check("--check", "151")
