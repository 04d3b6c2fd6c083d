"""Compare the public names of packages with their last tag, and their version ranges with the tree.

Run as `python tools/check_api.py par-groups par-train`; `--since REVISION` compares with that commit. A package that
was never tagged has no users whose names could break, so nothing is compared. A version may break public names when
its number shows it: a new minor version below 1.0, a new major version from there on. `--ranges` checks ranges only.
"""

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import griffe
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def main(arguments: list[str]) -> int:
    """Prints every problem; the exit status says whether there was one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", metavar="package", help="the folder of a package, such as par-groups")
    parser.add_argument("--since", metavar="REVISION", help="compare with this commit in place of the last tag")
    parser.add_argument("--ranges", action="store_true", help="compare ranges alone, which needs no history")
    options = parser.parse_args(arguments)
    problems = [problem for package in options.packages for problem in broken_ranges(package)]
    problems += different_ranges(options.packages)
    if not options.ranges:
        problems += [problem for package in options.packages for problem in broken_names(package, options.since)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def broken_names(package: str, since: str | None = None) -> Iterator[str]:
    """Yield what a user of the last tagged version, or of the commit `since`, would miss."""
    source, module = f"packages/{package}/src", package.replace("-", "_")
    revision = since or last_tag(package)
    if revision is None:
        print(f"{package}: no release yet, no names to keep")
        return
    if subprocess.run(["git", "cat-file", "-e", f"{revision}^{{commit}}"], cwd=ROOT, check=False).returncode:
        yield f"{package}: this clone lacks the commit {revision} to compare with; `git fetch --unshallow` brings it"
        return
    old = griffe.load_git(module, ref=revision, repo=ROOT, search_paths=[source])
    new = griffe.load(module, search_paths=[ROOT / source])
    breakages = [breakage for breakage in griffe.find_breaking_changes(old, new) if breaks(breakage)]
    gone = sorted({str(name) for name in old.exports or ()} - {str(name) for name in new.exports or ()})
    now, then = version(package), Version(str(old["__version__"].value).strip("'\""))
    kept, broken = len(old.exports or []), len(gone) + len(breakages)
    print(f"{package}: {kept} public names in {revision}, {broken} broken from {then} to {now}")
    if (now.major, now.minor if now.major == 0 else 0) == (then.major, then.minor if then.major == 0 else 0):
        yield from (f"{package}: {name} is no public name any more" for name in gone)
        for breakage in breakages:
            yield f"{package}: {breakage.explain(style=griffe.ExplanationStyle.ONE_LINE)}"


def breaks(breakage: griffe.Breakage) -> bool:
    """Whether a user can meet a change.

    Nobody does where `**keywords` have become the keywords that they took, or where a default that is a private
    function has another name.
    """
    before, after = breakage.old_value, breakage.new_value
    if breakage.kind is griffe.BreakageKind.PARAMETER_REMOVED:
        return not (isinstance(before, griffe.Parameter) and before.kind is griffe.ParameterKind.var_keyword)
    if breakage.kind is griffe.BreakageKind.PARAMETER_CHANGED_DEFAULT:
        return not all(str(getattr(value, "default", value)).startswith("_") for value in (before, after))
    return True


def broken_ranges(package: str) -> Iterator[str]:
    """Siblings whose version in the tree lies outside the range that this package declares."""
    for requirement in needed_siblings(package):
        present = version(requirement.name)
        if not requirement.specifier.contains(present, prereleases=True):
            yield f"{package}: needs {requirement}, but the tree has {requirement.name} {present}; widen the range"


def different_ranges(packages: Sequence[str]) -> Iterator[str]:
    """Siblings of which packages declare different ranges, so that an environment may have no version for both."""
    declared: dict[str, dict[str, str]] = {}
    for package in packages:
        for requirement in needed_siblings(package):
            declared.setdefault(requirement.name, {}).setdefault(str(requirement.specifier), package)
    for name, ranges in declared.items():
        if len(ranges) > 1:
            said = ", ".join(f"{package} needs {name}{specifier}" for specifier, package in ranges.items())
            yield f"{name}: {said}; declare the same range everywhere"


def needed_siblings(package: str) -> Iterator[Requirement]:
    """The packages of this workspace that a package declares, with or without an extra."""
    with (ROOT / "packages" / package / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project.get("optional-dependencies", {}).values()
    for requirement in map(
        Requirement, [*project.get("dependencies", []), *(each for extra in extras for each in extra)]
    ):
        if requirement.name != package and (ROOT / "packages" / requirement.name).is_dir():
            yield requirement


def version(package: str) -> Version:
    """The version in a package's own source."""
    text = (ROOT / "packages" / package / "src" / package.replace("-", "_") / "__init__.py").read_text()
    line = next(line for line in text.splitlines() if line.startswith("__version__"))
    return Version(line.partition("=")[2].strip().strip('"'))


def last_tag(package: str) -> str | None:
    """The newest tag of that package, such as par-groups-v0.1.0."""
    command = ["git", "tag", "--list", f"{package}-v*", "--sort=-version:refname", "--merged", "HEAD"]
    tags = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return tags[0] if tags else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
