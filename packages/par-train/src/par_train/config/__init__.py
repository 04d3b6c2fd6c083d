"""Typed options: from a dataclass to flags, from a config file and flags to a checked instance of that dataclass.

A field made by `option` says its type, default, help and limits once; `settings` lists the fields, `files` reads a
TOML or Python file, `build` checks every value and makes the instance. Knows no command and no job.
"""
