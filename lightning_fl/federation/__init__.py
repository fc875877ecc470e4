"""Implementation of communication rounds, independent of Lightning's hooks."""
