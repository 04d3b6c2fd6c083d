"""The record of module calls, from which follows for which modules backward has finished.

Hooks of `watch.outputs` report when a call begins, ends, and begins its backward. `record` stores the calls. `closer`
closes a chunk for reduction when backward has finished for all modules of its parameters. Stage 3 uses the same record.
"""
