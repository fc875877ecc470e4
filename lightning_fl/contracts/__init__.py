"""What rules, policies, samplers and data modules see: plans, updates, the run, client parts.

``hyperparameters`` and ``step_module`` are what a module tells the runners.

``lightning_fl.types`` has the names that are imported most.
"""
