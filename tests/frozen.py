"""Federations in which small frozen parameters exist once, as large ones do."""

from unittest import mock

from lightning_fl.runners import constants


def frozen_once(is_wanted=True):
    """Return a context in which frozen parameters of any size are shared, or none."""
    return mock.patch.object(constants, "are_large", return_value=is_wanted)
