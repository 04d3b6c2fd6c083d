"""A training run in a folder: `Run` and the parts that its loop is made of.

`run` steps; `opening` takes the folder, `stop` ends a rank, `saver` saves, `log` writes lines, `monitor` watches.
"""
