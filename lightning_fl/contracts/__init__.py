"""What rules, policies, samplers and data modules see: plans, updates, the run, client parts.

The names of :mod:`lightning_fl.types` are defined here.
"""
