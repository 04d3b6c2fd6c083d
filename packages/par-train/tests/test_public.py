"""What `import par_train` offers, and that `help` says how to use it."""

import par_train


def test_every_public_name_is_there_once():
    late = [name for names in par_train._LATE.values() for name in names]
    assert sorted(late) == sorted(par_train.__all__)
    assert all(getattr(par_train, name).__name__ == name for name in par_train.__all__)
