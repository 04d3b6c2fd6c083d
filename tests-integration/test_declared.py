"""Packages declare what they import, which attributes they share, and where they know one kind of accelerator."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

PACKAGES = sorted(path.parent for path in Path(__file__).parents[1].glob("packages/*/pyproject.toml"))

THERE = {"par-precision": {"triton"}, "par-layers": {"transformers", "triton"}, "par-checkpoint": {"verl", "vllm"}}
"""What comes with torch, with the models that are given, and with the engine that loads an adapter."""

KEYWORDS = {"par_tokens"}
"""Keyword arguments that par-layers adds to the forward of a model; par-train passes them."""

SET_BY_NAME = {
    *("par_sharding", "par_segments", "par_gradient_elsewhere", "par_pretrained", "par_label", "par_has_alias"),
    "par_exact_gradients",
}
"""Attributes that every package reads and sets through par-groups, so that only par-groups spells their names."""

CUDA_ONLY = {
    "par_layers/context/kernels/choose.py": "attention kernels for CUDA",
    "par_layers/experts/products.py": "grouped matmuls for CUDA",
    "par_layers/modes/lane_kernel.py": "a Triton kernel",
    "par_layers/modes/lanes.py": "chooses the Triton kernel",
    "par_precision/_float8.py": "float8 matmuls for CUDA",
    "par_precision/_precisions.py": "compute capabilities of NVIDIA GPUs",
    "par_precision/rounding/rounding.py": "chooses the Triton kernels",
    "par_precision/rounding/triton.py": "Triton kernels",
    "par_groups/live/launch.py": "NCCL needs CUDA",
}
"""Files of src that may name CUDA, with the reason. All other code asks torch.accelerator, or a device's module."""


def imported(source):
    """Names of the outer modules that a file imports."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


@cache  # it reads the metadata of everything that is installed
def distributions():
    """Names of distributions by the outer modules that they install."""
    return packages_distributions()


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_imports_what_it_declares(package):
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    wanted = [*project.get("dependencies", [])]
    wanted += [each for extra in project.get("optional-dependencies", {}).values() for each in extra]
    declared = {normal(re.split(r"[^\w.-]", each)[0]) for each in wanted} | {package.name}
    found = {name for source in package.glob("src/**/*.py") for name in imported(source)}
    assert found
    known = distributions()
    missing = {
        name
        for name in found - sys.stdlib_module_names - THERE.get(package.name, set())
        if not declared.intersection(map(normal, known.get(name, [name])))
    }
    assert missing == set()


def test_attribute_of_two_packages_is_declared_once():
    from par_groups import attributes

    declared = {each.name for each in vars(attributes).values() if isinstance(each, attributes.Attribute)}
    modules = {package.name.replace("-", "_") for package in PACKAGES} | {"par_testing"}
    packages: dict[str, set[str]] = {}
    for package in (*PACKAGES, PACKAGES[0].parents[1] / "tools" / "par-testing"):
        for source in package.glob("src/**/*.py"):
            for name in re.findall(r"\bpar_[a-z_]+", source.read_text()):
                packages.setdefault(name, set()).add(package.name)
    shared = {name for name, users in packages.items() if len(users) > 1} - modules
    assert shared - declared == KEYWORDS
    assert {name for name in declared if packages[name] == {"par-groups"}} <= SET_BY_NAME


def knows_cuda(node):
    """Return whether a node of a syntax tree is `torch.cuda`, `is_cuda`, or the text of one of them or of a device."""
    if isinstance(node, ast.Attribute):
        is_module = node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch"
        return is_module or node.attr == "is_cuda"
    return isinstance(node, ast.Constant) and node.value in {"cuda", "is_cuda"}


def test_only_files_of_kernels_know_cuda():
    found = {
        str(source.relative_to(package / "src"))
        for package in PACKAGES
        for source in package.glob("src/**/*.py")
        if any(map(knows_cuda, ast.walk(ast.parse(source.read_text()))))
    }
    assert found == set(CUDA_ONLY)
