"""Tests of your own federations."""

from lightning_fl.check import CheckResult, Run, check_federation

__all__ = ["CheckResult", "Run", "check_federation"]
