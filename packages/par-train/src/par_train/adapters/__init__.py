"""The trainers that people have, on a `Strategy`: Fabric, Accelerate, transformers' Trainer and Ray Train.

Each module needs an extra of par-train and is imported by nobody but who uses it. It tells a Strategy what its trainer
says, and its trainer what the Strategy says; what has no counterpart is refused by name.
"""
