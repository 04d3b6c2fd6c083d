"""What is said of installing: the same on every page, and true."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
UNRELEASED = "The packages are not on a package index yet"
"""Goes from all of these pages at once, when the first release is there."""


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "docs" / "install.md", *(package / "README.md" for package in PACKAGES)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_first_page_says_that_nothing_is_on_an_index(page):
    assert UNRELEASED in page.read_text()


def commands(text):
    """What follows `pip install`, to the end of a line that is not continued, or of the words in backticks."""
    return re.findall(r"pip install ((?:[^`\n]|(?<=\\)\n)+)", text)


def ours(command):
    """The words of a command that name packages of ours, with their paths if they have some."""
    return re.findall(r"[^\s'\"]*par-[a-z]+", command.replace("\\\n", " "))


def test_nobody_is_told_to_fetch_a_package_of_ours_from_an_index():
    """Where there is none of that name, or somebody else's."""
    for page in (*PAGES, *SOURCES):
        for command in commands(page.read_text()):
            names = [word for word in ours(command) if not word.startswith("./")]
            assert names == [], f"{page.relative_to(ROOT)}: pip install {command}"


def test_a_command_that_installs_a_package_names_all_of_ours_that_it_needs():
    """A path installs what it names; siblings come from nowhere else."""
    for page in PAGES:
        for command in commands(page.read_text()):
            named = {Path(word).name for word in ours(command)}
            needed = set()
            for name in named:
                declared = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
                needed |= {re.match(r"[\w-]+", each)[0] for each in declared["dependencies"] if each.startswith("par-")}
            if len(named) > 1:  # a single one, with an extra, is added to what is there
                assert needed <= named, f"{page.relative_to(ROOT)}: pip install {command}"


def test_every_distribution_has_the_license_and_one_status():
    for package in PACKAGES:
        assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
        declared = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        assert "Development Status :: 3 - Alpha" in declared["classifiers"]
        log = (package / "CHANGELOG.md").read_text()
        assert log.startswith(f"# Changelog of {package.name}\n\n## 0.1.0 (unreleased)\n"), package.name


# What Windows lacks, taken away before the packages are imported. torch and its tools keep what they hold already.
WITHOUT_POSIX = """
import os, signal, sys
import numpy, safetensors, torch, torch.distributed, torch.multiprocessing, tqdm
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for module, names in (
    (os, ("fork", "killpg", "posix_fallocate", "preadv", "pwrite", "pwritev", "statvfs")),
    (signal, ("SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1")),
):
    for name in names:
        delattr(module, name)
for package in sys.argv[1:]:
    module = __import__(package)
    for name in module.__all__:
        getattr(module, name)
"""


@pytest.mark.storm
def test_packages_without_posix_modules_are_imported():
    """All but par-train, whose runs need the locks and signals of Linux or macOS."""
    names = [package.name.replace("-", "_") for package in PACKAGES if package.name != "par-train"]
    subprocess.run([sys.executable, "-c", WITHOUT_POSIX, *names], check=True)


def test_project_urls_are_the_same_address_in_every_package():
    urls = {}
    for package in PACKAGES:
        urls[package.name] = tomllib.loads((package / "pyproject.toml").read_text())["project"]["urls"]
    source = urls["par-groups"]["Source"].removesuffix("/tree/main/packages/par-groups")
    for name, found in urls.items():
        assert found == {
            "Documentation": f"{source}/tree/main/docs",
            "Source": f"{source}/tree/main/packages/{name}",
            "Changelog": f"{source}/blob/main/packages/{name}/CHANGELOG.md",
            "Issues": f"{source}/issues",
        }
    assert source in (ROOT / "CITATION.cff").read_text()
    assert source.removeprefix("https://github.com/") in (ROOT / ".github/workflows/release.yml").read_text()
