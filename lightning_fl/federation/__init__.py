"""A round of federated learning, without Lightning's hooks."""
