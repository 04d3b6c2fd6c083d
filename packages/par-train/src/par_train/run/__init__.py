"""A training run in a folder: `Run` and the parts that its loop is made of.

`loop` steps; `opening` takes the folder, `stop` and `vote` end it, `saver` saves, `log` writes, `monitor` watches.
"""
