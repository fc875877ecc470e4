r"""Seconds per round of FedJAX: its federated averaging with the jit backend.

Its environment, then a run:

    python -m venv .peers/fedjax
    .peers/fedjax/bin/pip install fedjax==0.0.17 jax==0.5.3 jaxlib==0.5.3 dm-haiku==0.0.17 \
        optax==0.2.8 numpy==2.4.6 scipy==1.17.1

    .peers/fedjax/bin/python benchmarks/peers/run_fedjax.py '<json>' OUT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import fedjax
import haiku as hk
import jax
import numpy as np

#: Workloads with a network of their own.
PUBLISHED = ("blazefl", "pfl", "femnist")


def layers(shape: tuple[int, ...]) -> list:
    """The network for samples of this shape; channels come last."""
    if shape == (784,):
        return [hk.Linear(100), jax.nn.relu, hk.Linear(100), jax.nn.relu, hk.Linear(10)]
    convs: list = []
    if shape == (32, 32, 3):
        for maps in (32, 64):
            convs += [hk.Conv2D(maps, 5), hk.MaxPool(2, 2, "VALID", channel_axis=-1), jax.nn.relu]
    elif shape == (32, 32, 1):
        for i in range(4):
            convs += [hk.Conv2D(64, 3)]
            convs += [hk.MaxPool(2, 2, "VALID", channel_axis=-1)] if i % 2 else []
            convs += [jax.nn.relu]
    else:
        raise ValueError(f"no network for samples of shape {shape}")
    return [*convs, hk.Flatten(), hk.Linear(1024), jax.nn.relu, hk.Linear(10)]


def model(shape: tuple[int, ...]) -> fedjax.Model:
    """The network with its loss."""
    return fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform(
            lambda batch: hk.Sequential(layers(shape))(batch["x"])
        ),
        sample_batch={"x": np.zeros((1, *shape), np.float32), "y": np.zeros(1, np.int32)},
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(
            batch["y"], logits
        ),
    )


def main() -> None:
    """Train the workload and write the seconds of each round."""
    w, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    # XLA makes as many threads as there are cores for it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: w["threads"]])
    if w["name"] in PUBLISHED:
        raise ValueError(f"the network of {w['name']} is not written in Haiku")
    shape = (*w["shape"][1:], w["shape"][0])
    rng = np.random.default_rng(0)
    federation = fedjax.InMemoryFederatedData(
        {
            client: {
                "x": rng.standard_normal((w["samples"], *shape), np.float32),
                "y": rng.integers(10, size=w["samples"], dtype=np.int32),
            }
            for client in range(w["clients"])
        }
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(federation, w["cohort"], seed=0)
    net = model(shape)
    fedjax.set_for_each_client_backend("jit")
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        grad_fn=fedjax.model_grad(net),
        client_optimizer=fedjax.optimizers.sgd(w["lr"]),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
            batch_size=w["batch_size"], num_epochs=None, num_steps=w["steps"]
        ),
    )
    state = algorithm.init(net.init(jax.random.PRNGKey(0)))
    jax.block_until_ready(state.params)
    seconds, start = [], time.perf_counter()
    for _ in range(w["rounds"]):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        end = time.perf_counter()
        seconds.append(end - start)
        start = end
    out.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
