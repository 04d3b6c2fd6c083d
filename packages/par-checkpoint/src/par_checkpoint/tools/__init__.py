"""What people do with checkpoints beside saving and loading: inspect, read a slice, convert, and the command.

All of it runs in one process and reads through `storage`; only `convert` writes, by `save` like everybody else.
"""
