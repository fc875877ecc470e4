"""The training script of a site."""

import sys

from nvflare_case import RULES, Net

from lightning_fl.integrations.client import RemoteClient
from lightning_fl.integrations.nvflare import run_client
from two_classes import samples

run_client(RemoteClient(Net(), samples(2), RULES[sys.argv[1]](), {"accelerator": "cpu"}))
