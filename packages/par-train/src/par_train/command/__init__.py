"""The `par-train` command: words of a command line in, an exit code out.

`cli` turns flags and a config file into options (declared in `jobs/options.py`, read by `config`) and hands them to
`jobs.start`, which trains, or to `plan`, which asks the planner and prints its report.
"""
