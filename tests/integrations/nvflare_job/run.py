"""A job of two sites in NVFlare's simulator: ``python run.py RULE FORMAT``."""

import sys
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe.sim_env import SimEnv
from nvflare_case import Net, Server

if __name__ == "__main__":
    rule, exchanged = sys.argv[1:]
    recipe = FedAvgRecipe(
        name="job",
        model=Net(),
        aggregator=Server(rule),
        min_clients=2,
        num_rounds=6,  # one without training
        train_script=str(Path(__file__).with_name("nvflare_client.py")),
        train_args=rule,
        server_expected_format=exchanged,
        key_metric="train_loss",
        key_metric_mode="min",
    )
    recipe.execute(SimEnv(num_clients=2, workspace_root=str(Path.cwd())))
