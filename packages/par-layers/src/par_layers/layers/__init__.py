"""The layers themselves, each written once for all modes.

A layer takes the rules of a mode and this rank's place from `modes`, makes its parameters with their records
(`parameter`, `parallel_layer`), and calls a product or a collective in forward. `LayerSet` makes the layers.
"""
