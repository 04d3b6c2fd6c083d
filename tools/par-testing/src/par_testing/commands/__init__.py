"""Command lines of Python in forked processes, in which torch is imported already: a new Python takes seconds for it.

`warm` is the test's end, `process` what the forked process does, and `spares` starts the ranks of a launcher in it.
"""
