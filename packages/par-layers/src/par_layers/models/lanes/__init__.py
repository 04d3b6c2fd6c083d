"""Existing models whose weights are in lanes, so that their bits do not depend on the number of tensor ranks.

plan (what a survey becomes, and what has no form in lanes) -> gradients (hooks of parameters that several lanes use).
"""
