"""Experts of existing models: one module with packed parameters, whose rows travel to the ranks that have them.

A look at such a module (`look`) says what it computes, how it is cut, and becomes its forward (`forward`); a list of
experts, one module each, is packed first (`pack`).
"""
