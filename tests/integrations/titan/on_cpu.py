"""Imports what torchtitan knows of the machine, so that it knows CPUs."""

from unittest import mock

with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
    from torchtitan.tools import utils

assert utils.device_type == "cpu"
