import os
import subprocess
import sys

import pytest

from par_groups import Registry


def test_a_name_is_found_and_a_missing_one_gets_the_nearest():
    registry: Registry[int] = Registry("test thing", "par_groups.test_things")
    registry.register("alpha", 1)
    assert registry["alpha"] == 1
    assert "alpha" in registry
    assert registry.names() == ("alpha",)
    with pytest.raises(ValueError, match="no test thing is called 'alpa'; did you mean 'alpha'"):
        registry["alpa"]


WHEEL = """
from par_groups import Split, register_mode

@register_mode("from_a_wheel")
def cut(size):
    return Split(axes=(("first", size), ("second", 1)))
"""

USE = """
from par_groups import Topology
print(Topology.from_config({"tensor": {"size": 2, "mode": "MODE"}}, 2).axes["first"])
"""


def installed_wheel(folder, mode, value="wheel_module:cut"):
    """What pip leaves of a wheel with an entry point: a module and its metadata."""
    info = folder / "wheel_module-1.0.dist-info"
    info.mkdir()
    (folder / "wheel_module.py").write_text(WHEEL)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wheel-module\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[par_groups.modes]\n{mode} = {value}\n")


def run(folder, code):
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "PATH": ""}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_another_wheel_provides_a_mode_that_nobody_imported(tmp_path):
    installed_wheel(tmp_path, "from_a_wheel")
    done = run(tmp_path, USE.replace("MODE", "from_a_wheel"))
    assert done.stdout.strip() == "2", done.stderr


def test_a_wheel_that_takes_a_name_of_ours_is_refused(tmp_path):
    installed_wheel(tmp_path, "2d")
    done = run(tmp_path, USE.replace("MODE", "2d"))
    assert "registered twice, by par_groups.topology.modes._two_d and by wheel_module:cut" in done.stderr
