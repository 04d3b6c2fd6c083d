"""What became of the ranks of a test, in words: their outcomes, whose fault it was, and where every rank stood.

The room `ranks` fills outcomes in; nothing here starts or asks a process.
"""
