"""What `import par_data` offers."""

import subprocess
import sys

import par_data


def test_public_names_are_listed_once():
    late = [name for names in par_data._LATE.values() for name in names]
    assert sorted(late) == sorted(par_data.__all__)
    assert set(par_data.__all__) <= set(dir(par_data))
    assert all(getattr(par_data, name) is not None for name in par_data.__all__)


def test_files_of_a_corpus_are_found_without_torch():
    code = "import sys; from par_data import Packing, find_corpus_files, is_corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
