"""Bridges to frameworks that run federations on several machines."""
