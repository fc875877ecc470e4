"""What rules, policies, samplers and data modules see: plans, updates, the run, client parts.

``lightning_fl.types`` has the names that are imported most.
"""
