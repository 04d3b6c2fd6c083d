"""What contributors and CI run. `nox -l` lists it; sessions for single packages come from the folder listing."""

import os
import platform
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import nox
from nox.project import dependency_groups, load_toml

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
TEST_TOOLS = "tools/par-testing"
ADAPTERS = ("trainer", "accelerate", "fabric", "ray")
"""The extras of par-train that bring a trainer; `adapters` tests them."""

STRICT_COVER = (
    "packages/par-groups/tests/sharding",
    "packages/par-layers/tests/layers/test_linear.py",
    "packages/par-layers/tests/test_models.py",
    "packages/par-data/tests/loading/test_broadcast.py",
    "packages/par-pipeline/tests/runtime",
    "packages/par-precision/tests/norm",
    "packages/par-zero/tests/test_equality.py",
    "packages/par-zero/tests/test_gather.py",
    "packages/par-zero/tests/test_reduce.py",
    "packages/par-checkpoint/tests/test_save.py",
    "tests-integration/matrix",
)
"""The rank tests that CI runs on strict ranks, under three minutes: what launches and waits, in every package."""

ACCELERATOR_COVER = (
    "tests-integration/gpu",
    "--ignore=tests-integration/gpu/test_train_gpu.py",  # commands in processes of their own
    "packages/par-precision/tests/norm",
)
"""The tests that CI runs on a strict accelerator, under three minutes: those of a GPU, and rank tests."""

ACCELERATOR = (
    "tests-integration/gpu",
    "packages/par-checkpoint/tests",
    "packages/par-pipeline/tests",
    "packages/par-precision/tests",
    "packages/par-recompute/tests",
    "packages/par-zero/tests",
)
"""The tests of `nox -s accelerator`: those of a GPU, and rank tests of five packages that are not marked `cpu`."""

PORTABLE = (
    "packages/par-groups/tests/topology",
    "packages/par-groups/tests/test_sizes.py",
    "packages/par-pipeline/tests/schedules",
    "packages/par-pipeline/tests/analysis",
    "packages/par-plan/tests",
    "packages/par-checkpoint/tests/format",
    "packages/par-checkpoint/tests/plan",
)
"""The tests for systems on which the ranks of a test cannot be started."""

WHEELS: dict[str, str] = {}  # what this call of nox has built so far, by package
BASE = ROOT / ".nox" / f"base-{platform.python_version()}"
BASES: set[Path] = set()  # those that this call of nox has looked after
CONSTRAINTS = ["-c", "constraints.txt"]


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that CI tests, in one environment. Arguments go to pytest.

    `-- --backend strict --cover` runs the part of them that CI runs on strict ranks, too. `-- --accelerator --cover`
    runs the part that it runs on a strict accelerator.
    """
    covers, others = cover_of(session)
    cover = ACCELERATOR_COVER if "--accelerator" in others else STRICT_COVER
    run_suite(session, *workers(), *(cover if covers else ()), *others)


@nox.session
def storms(session: nox.Session) -> None:
    """What `tests` leaves out: kills by the wall clock, terminals, the rest of large products; before a release.

    Then property tests, with many examples of this run's own.
    """
    run_suite(session, "-m", "storm", *session.posargs)
    run_pytest(session, *workers(), "-m", "hypothesis", "--hypothesis-profile", "par-storms", *session.posargs)


@nox.session
def hosts(session: nox.Session) -> None:
    """Real launchers over two hosts on one machine, and real NFS. Fifteen minutes.

    As root, with Debian's slurm-wlm, munge, openmpi-bin, user-mode-linux, nfs-kernel-server and kmod.
    """
    run_suite(session, "-m", "hosts", "tests-integration/hosts", *session.posargs)


@nox.session
def qlora(session: nox.Session) -> None:
    """Adapters on weights that bitsandbytes packs. A minute.

    No other session has bitsandbytes, which peft imports and whose import calls torch.compile.
    """
    install_workspace(session, "test", "integration", "quantized")
    run_pytest(
        session, "tests-integration/test_qlora.py", "tests-integration/test_strategy_adapters.py", *session.posargs
    )


@nox.session
def strict(session: nox.Session) -> None:
    """Rank tests on ranks that enforce on a CPU what NCCL would; then again, completing when a seed says. Minutes."""
    run_suite(session, *workers(), "--backend", "strict", *session.posargs)
    seed = str(random.randrange(1, 10**6))
    run_suite(session, *workers(), "--backend", "strict", "--strict-draw", seed, *session.posargs)


@nox.session
def accelerator(session: nox.Session) -> None:
    """Tests of a GPU, and rank tests of five packages, on a strict accelerator. Needs a C++ compiler. 6 minutes."""
    run_suite(session, *workers(), "--accelerator", *(session.posargs or ACCELERATOR))


@nox.session(python=PYTHONS)
def interpreters(session: nox.Session) -> None:
    """Every test on another Python. On Linux, torch for it may bring gigabytes of CUDA's libraries."""
    run_suite(session, *workers(), *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """The main job: trains a byte-level GPT on two local ranks. Arguments go to `par-train run`."""
    share_base(session)
    session.install(*CONSTRAINTS, *editable("par-groups", *PACKAGES))
    session.run("par-train", "run", "--ranks", "2", "--output", "runs/train", "--overwrite", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, docstrings, spelling, and who may import whom."""
    session.install(*group("lint"))
    session.install("--no-deps", *editable(*PACKAGES), "-e", TEST_TOOLS)  # import-linter reads them, nothing runs
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("codespell")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """The strict type check of every source."""
    share_base(session)
    install_workspace(session, "types", "test", "pictures")
    session.install(*group("api"), "nox")
    sources = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("packages/*/src"))]
    sources += [f"{TEST_TOOLS}/src", "tests-integration/own-parallelism/src"]
    tools = ["noxfile.py", "tools/check_api.py", "tools/matrix.py", "tools/atlas.py", "tools/tiny_model.py"]
    session.run("mypy", *sources, *tools, *docs_scripts(), *benchmarks())


def test_package(session: nox.Session, package: str, *, lowest: bool) -> None:
    """Tests one package as a user gets it: its wheel, what it declares, and nothing else of ours.

    `-- --cover` leaves out the tests of several ranks, as CI does, which has run them in the environment of all.
    """
    share_base(session)
    wheels = build_wheels(session, package, *siblings(package))
    constraints = ["-c", lowest_versions(session, package)] if lowest else []
    extras = ",".join(name for name in project(package).get("optional-dependencies", {}) if name not in ADAPTERS)
    first, *others = wheels
    # The newest transformers may want a peft that nobody has released yet: `nox -s transformers` meets that one.
    proven = [each for each in group("integration") if each.startswith("transformers==")]
    pins = proven if "transformers" in extras and not lowest else []
    session.install(*CONSTRAINTS, *constraints, f"{first}[{extras}]" if extras else first, *others, *pins)
    servers = group("store") if package == "par-checkpoint" else []
    session.install(*CONSTRAINTS, *constraints, *group("test"), *servers, TEST_TOOLS, *others)
    # In an environment that is used again, pip keeps a wheel of the same version.
    session.install("--no-deps", "--force-reinstall", *wheels)
    # Old releases call what newer ones of their own dependencies deprecate; that is not ours to fail on.
    warnings = ["-W", "ignore::DeprecationWarning"] if lowest else []
    covers, others = cover_of(session)
    part = ["-m", "not ranks and not storm and not hosts"] if covers else []
    run_pytest(session, *workers(more=0 if covers else 1), *warnings, f"packages/{package}/tests", *part, *others)


def register_package_sessions(package: str) -> None:
    """Adds `test-<package>` and `test-<package>-lowest`."""

    @nox.session(name=f"test-{package}", tags=["alone"])
    def newest(session: nox.Session) -> None:
        """One package alone: its wheel and what it declares."""
        test_package(session, package, lowest=False)

    @nox.session(name=f"test-{package}-lowest")
    def lowest(session: nox.Session) -> None:
        """One package with the oldest versions that it declares, torch excepted."""
        test_package(session, package, lowest=True)


for each in PACKAGES:
    register_package_sessions(each)


@nox.session
def integration(session: nox.Session) -> None:
    """Several packages together, on gloo; `-- --device cuda` for the GPUs there are."""
    install_workspace(session, "test", "integration")
    session.run("pytest", "tests-integration", "--ignore=tests-integration/gpu", *session.posargs)


@nox.session(name="other-torch")
def other_torch(session: nox.Session) -> None:
    """All tests on another release of torch, such as `-- 2.11.0`. On Linux it brings gigabytes of CUDA's libraries."""
    if not session.posargs:
        session.error("name the release of torch, such as `nox -s other-torch -- 2.11.0`")
    release, *arguments = session.posargs
    run_suite(session, *workers(), *arguments, pins=[f"torch=={release}"])


@nox.session
@nox.parametrize("release", ["oldest", "newest"], ids=["oldest", "newest"])
def transformers(session: nox.Session, release: str) -> None:
    """Tests of existing models on the oldest release of transformers that par-train declares, and on the newest."""
    declared = next(each for each in requirements("par-train") if each.startswith("transformers>="))
    wanted = declared.replace(">=", "==") if release == "oldest" else "transformers"
    others = [each for each in (*group("test"), *group("integration")) if not each.startswith("transformers")]
    session.install(*CONSTRAINTS, "--upgrade", *editable(*PACKAGES), "-e", TEST_TOOLS, *others, wanted)
    # Old releases call what newer ones of their own dependencies deprecate; that is not ours to fail on.
    warnings = ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"] if release == "oldest" else []
    session.run("pytest", *workers(), *warnings, *(session.posargs or transformers_tests()))


@nox.session
def adapters(session: nox.Session) -> None:
    """The trainers that people have, on a Strategy, in an environment that has them all.

    Accelerate's own examples are taken from its repository, or from the folder that ACCELERATE_EXAMPLES names.
    """
    install_workspace(session, "test", "integration")
    session.install(*CONSTRAINTS, "-e", f"packages/par-train[{','.join(ADAPTERS)}]", "trl", "evaluate")
    theirs = os.environ.get("ACCELERATE_EXAMPLES")
    if theirs is None:
        copy = Path(session.create_tmp()) / "accelerate"
        shutil.rmtree(copy, ignore_errors=True)
        source = "https://github.com/huggingface/accelerate"
        clone = ["git", "clone", "-q", "--depth", "1", source, str(copy)]
        session.run(*clone, external=True, success_codes=[0, 128])  # without a network the tests say why they skip
        theirs = str(copy / "examples")
    session.run("pytest", "-m", "", "tests-integration/adapters", *session.posargs, env={"ACCELERATE_EXAMPLES": theirs})


@nox.session
def matrix(session: nox.Session) -> None:
    """Every cell of the integration matrix, and its page in docs; minutes."""
    install_workspace(session, "test", "integration")
    session.run("python", "tools/matrix.py", *session.posargs)


@nox.session
def atlas(session: nox.Session) -> None:
    """Train a tiny model of every type of transformers in every way; write docs/models.md. Results are cached."""
    install_workspace(session, "test", "integration")
    session.run("python", "tools/atlas.py", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """What needs a GPU. Without nox: `pytest tests-integration/gpu`, with tools/par-testing installed, too."""
    install_workspace(session, "test")
    session.run("pytest", "tests-integration/gpu", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build every release file, and install each as a user would after its release.

    Packages are taken in the order of a release: a sibling before the packages that need it. `-- par-zero` builds that
    one package, and the siblings that it needs.
    """
    packages = release_order(session.posargs or PACKAGES)
    session.install(*group("build"), *group("api"))
    session.run("python", "tools/check_api.py", "--ranges", *PACKAGES)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for package in packages:
        session.run("python", "-m", "build", "--outdir", "dist", f"packages/{package}")  # the wheel from the sdist
    session.run("twine", "check", "--strict", *(f"dist/{path.name}" for path in sorted((ROOT / "dist").iterdir())))
    index = Path(session.create_tmp()) / "index"
    shutil.rmtree(index, ignore_errors=True)
    index.mkdir()
    for package in packages:
        for file in (ROOT / "dist").glob(f"{package.replace('-', '_')}-*"):
            shutil.copy2(file, index)
        install_from(session, index, package)


def release_order(packages: Sequence[str]) -> list[str]:
    """Return these packages and the siblings that they need, each behind all that it needs."""
    order: list[str] = []
    for package in packages:
        needed = [each for each in PACKAGES if each != package and declares(package, each)]
        order += [each for each in (*release_order(needed), package) if each not in order]
    return order


def install_from(session: nox.Session, index: Path, package: str) -> None:
    """Install a package in a fresh environment, from an index that holds only what was released before it."""
    folder = Path(session.create_tmp()) / "fresh"
    python = str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")
    session.run("python", "-m", "venv", "--clear", str(folder))
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    ours = release_order([package])
    # Ours come from the index alone: a package of the same name on a public index may be somebody else's.
    session.run(*pip, "--no-index", "--no-deps", "--find-links", str(index), *ours, external=True)
    table = project(package)
    extras = ",".join(name for name in table.get("optional-dependencies", {}) if name not in ("fabric", "ray"))
    session.run(*pip, *CONSTRAINTS, f"{package}[{extras}]" if extras else package, external=True)
    module = package.replace("-", "_")
    check = (
        f"import {module} as m; [getattr(m, name) for name in m.__all__]; print(m.__name__, m.__version__)\n"
        "import importlib.metadata as meta\n"
        "found = sorted(each.name for each in meta.distributions() if each.name.startswith('par-'))\n"
        f"assert found == {sorted(ours)}, found\n"
        f"assert meta.version('{package}') == m.__version__"
    )
    torch_alone = "ignore:Failed to initialize NumPy"  # torch warns so when no package needs numpy
    wheel, sdist = (next(index.glob(f"{module}-*{ending}")) for ending in (".whl", ".tar.gz"))
    for file in (wheel, sdist):
        session.run(*pip, "--no-deps", "--force-reinstall", str(file), external=True)
        session.run(python, "-m", "pip", "check", external=True)
        session.run(python, "-W", "error", "-W", torch_alone, "-P", "-c", check, external=True)
        for command in table.get("scripts", {}):
            session.run(str(Path(python).parent / command), "--help", external=True, silent=True)


@nox.session
def portable(session: nox.Session) -> None:
    """Run the tests that need neither ranks nor Linux, on macOS and Windows: arithmetic, schedules, file formats."""
    # Without par-testing: it starts ranks, by calls that Windows lacks.
    proven = [each for each in group("integration") if each.startswith("transformers==")]  # par-plan's tests need it
    session.install(*editable(*PACKAGES), *group("test"), *proven)
    options = ["-m", "not ranks", "-o", "markers=ranks\ngpu\nhosts\nstorm", "--hypothesis-profile", "ci"]
    run_pytest(session, *options, *PORTABLE, *session.posargs)


@nox.session
def api(session: nox.Session) -> None:
    """The public names against the last tag, and version ranges against the siblings in the tree."""
    session.install(*group("api"))
    session.run("python", "tools/check_api.py", *PACKAGES)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation into site/; pictures are drawn anew. `-- serve` serves it instead."""
    install_workspace(session, "docs", "pictures")
    session.run("python", "docs/figures.py")
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Every benchmark in tools/bench, or those named; tables go to docs/benchmarks/."""
    install_workspace(session, "test", "integration", "bench")
    for script in [f"tools/bench/{name}.py" for name in session.posargs] or benchmarks():
        session.run("python", script)


def cover_of(session: nox.Session) -> tuple[bool, list[str]]:
    """Whether `--cover` was given, and the other arguments."""
    return "--cover" in session.posargs, [argument for argument in session.posargs if argument != "--cover"]


def run_suite(session: nox.Session, *arguments: str, pins: Sequence[str] = CONSTRAINTS) -> None:
    """Runs pytest over everything, in an environment that has all packages."""
    install_workspace(session, "test", "integration", pins=pins)
    run_pytest(session, *arguments)


def run_pytest(session: nox.Session, *arguments: str) -> None:
    """Runs pytest as a module, since its command may lie in the base, and without this folder on the path."""
    # Where Python may not write bytecode, every worker, and every command of a test, would compile all sources again.
    session.run("python", "-P", "-m", "pytest", *arguments, env={"PYTHONDONTWRITEBYTECODE": ""})


def share_base(session: nox.Session) -> None:
    """Takes torch and the test tools from one environment, which others read too, so that torch is unpacked once.

    Nothing of ours is in it, nor anything that one package alone declares; what a session installs goes before it.
    """
    python = str(BASE / ("Scripts" if os.name == "nt" else "bin") / "python")
    if BASE not in BASES:
        BASES.add(BASE)
        session.run("python", "-m", "venv", str(BASE))
        session.run(python, "-m", "pip", "install", *CONSTRAINTS, "torch", *group("test"), external=True)
    where = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    shared, own = (str(session.run(each, *where, external=True, silent=True)).strip() for each in (python, "python"))
    Path(own, "base.pth").write_text(f"{shared}\n")


def install_workspace(session: nox.Session, *groups: str, pins: Sequence[str] = CONSTRAINTS) -> None:
    """All packages, editable, with the groups' tools."""
    tools = [requirement for name in groups for requirement in group(name)]
    session.install(*pins, *editable(*PACKAGES), "-e", TEST_TOOLS, *tools)


def editable(*packages: str) -> Iterator[str]:
    """Arguments of pip that install these packages in place."""
    for package in packages:
        yield from ("-e", f"packages/{package}")


def group(name: str) -> list[str]:
    """The requirements of a dependency group of the root pyproject."""
    return list(dependency_groups(load_toml(ROOT / "pyproject.toml"), name))


def project(package: str) -> dict[str, dict[str, list[str]]]:
    """The [project] table of a package."""
    table: dict[str, dict[str, list[str]]] = load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]
    return table


def requirements(package: str) -> list[str]:
    """Everything a package declares, extras included."""
    table = project(package)
    extras = table.get("optional-dependencies", {}).values()
    return [*table.get("dependencies", []), *(requirement for extra in extras for requirement in extra)]


def siblings(package: str) -> list[str]:
    """The packages of this workspace that a package needs, and par-groups for the test tools."""
    names = {requirement.partition(">")[0].partition("[")[0] for requirement in requirements(package)}
    return [each for each in PACKAGES if each != package and (each in names or each == "par-groups")]


def declares(package: str, sibling: str) -> bool:
    """Whether a package needs a sibling without any extra."""
    needed: Sequence[str] = list(project(package).get("dependencies", []))
    return sibling in {re.split(r"[^a-z-]", requirement)[0] for requirement in needed}


def build_wheels(session: nox.Session, *packages: str) -> list[str]:
    """Wheels of these packages; each is built once, by the first of this call's sessions that needs it."""
    folder = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    if missing := [package for package in packages if package not in WHEELS]:
        session.run("pip", "wheel", "-q", "--no-deps", "-w", str(folder), *(f"./packages/{name}" for name in missing))
        for name in missing:
            WHEELS[name] = str(next(folder.glob(f"{name.replace('-', '_')}-*.whl")))
    return [WHEELS[package] for package in packages]


def lowest_versions(session: nox.Session, package: str) -> str:
    """A constraints file with the oldest version of everything that a package declares, torch and siblings excepted."""
    pins = [
        f"{name}=={rest.partition(',')[0]}"
        for name, _, rest in (requirement.partition(">=") for requirement in requirements(package))
        if name != "torch" and name not in PACKAGES and "[" not in name
    ]
    path = Path(session.create_tmp()) / "lowest.txt"
    path.write_text("\n".join(pins) + "\n")
    session.log(f"oldest versions: {', '.join(pins)}")
    return str(path)


def workers(*, more: int = 2) -> list[str]:
    """Workers of pytest: one a core, up to four. The tests of a file stay together: they share what is slow to make.

    Args:
        more: Workers beyond the cores, which compute while others wait: for ranks, for commands, for a time to pass.
    """
    cores = min(os.cpu_count() or 1, 4)
    return ["-n", str(cores + more), "--dist", "loadfile"] if cores > 1 else []


def transformers_tests() -> list[str]:
    """The test files that need transformers."""
    files = [path for folder in ("packages", "tests-integration") for path in (ROOT / folder).rglob("test_*.py")]
    needs = re.compile(r"""importorskip\("(transformers|peft)"|^ *(import|from) (transformers|peft)""", re.MULTILINE)
    return [str(path.relative_to(ROOT)) for path in sorted(files) if needs.search(path.read_text())]


def benchmarks() -> list[str]:
    """The benchmark scripts; a name with an underscore in front is a part of them."""
    return [f"tools/bench/{path.name}" for path in sorted((ROOT / "tools/bench").glob("[!_]*.py"))]


def docs_scripts() -> list[str]:
    """What draws the pictures of the documentation."""
    return [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.py"))]
