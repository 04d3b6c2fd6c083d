"""Decisions within a byte budget for device, host and disk.

`tiers` computes the fractions to offload, `savings` selects the items that save most time. `plan` decides before the
model is sharded, `first_step` again after the measured first step.
"""
