"""Adapters that run other projects' trainers on a `Strategy`: Fabric, Accelerate, transformers' Trainer, Ray Train.

Each module needs an extra of par-train, and only programs that use it import it. It converts the trainer's options into
those of a Strategy, and results back; an option without a counterpart raises an error that names the option to use.
"""
