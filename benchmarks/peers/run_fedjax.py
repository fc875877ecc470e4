"""Seconds per round and accuracy of FedJAX: its federated averaging with the jit backend.

Its environment, then a run:

    benchmarks/peers/install.sh fedjax
    .peers/fedjax/bin/python benchmarks/peers/run_fedjax.py '<json>' OUT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fedjax
import haiku as hk
import jax
import numpy as np
from samples import drawn, tested


def channels_last(data: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Samples and labels as JAX takes them."""
    x, y = data
    return np.ascontiguousarray(np.moveaxis(x, 1, -1)), y.astype(np.int32)


def pool(x: jax.Array) -> jax.Array:
    """Halve maps by max pooling."""
    return hk.max_pool(x, (2, 2, 1), (2, 2, 1), "VALID")


def dropout(rate: float) -> Callable[[jax.Array], jax.Array]:
    """Drop out a share of the activations; for a rate of 0 there is no random key."""
    return lambda x: hk.dropout(hk.next_rng_key(), rate, x) if rate else x


def layers(shape: tuple[int, ...], workload: str, classes: int, is_training: bool) -> list:
    """The network of a workload for samples of this shape; channels come last."""
    relu, flat = jax.nn.relu, hk.Flatten()
    drop = [dropout(rate * is_training) for rate in (0.25, 0.5)]
    if workload == "blazefl":
        convs = [hk.Conv2D(6, 5, padding="VALID"), relu, pool]
        convs += [hk.Conv2D(16, 5, padding="VALID"), relu, pool, flat]
        return [*convs, hk.Linear(120), relu, hk.Linear(84), relu, hk.Linear(classes)]
    if workload in ("pfl", "femnist"):
        convs = [hk.Conv2D(32, 3, padding="VALID"), relu, hk.Conv2D(64, 3, padding="VALID"), relu]
        convs += [pool, drop[0], flat]
        return [*convs, hk.Linear(128), relu, drop[1], hk.Linear(classes)]
    if shape == (784,):
        return [hk.Linear(100), relu, hk.Linear(100), relu, hk.Linear(classes)]
    convs = []
    if shape == (32, 32, 3):
        for maps in (32, 64):
            convs += [hk.Conv2D(maps, 5), pool, relu]
    elif shape == (32, 32, 1):
        for i in range(4):
            convs += [hk.Conv2D(64, 3), *[pool] * (i % 2), relu]
    else:
        raise ValueError(f"no network for samples of shape {shape}")
    return [*convs, flat, hk.Linear(1024), relu, hk.Linear(classes)]


def model(shape: tuple[int, ...], workload: str, classes: int) -> fedjax.Model:
    """The network with its loss."""
    return fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform(
            lambda batch, is_training=True: hk.Sequential(
                layers(shape, workload, classes, is_training)
            )(batch["x"])
        ),
        sample_batch={"x": np.zeros((1, *shape), np.float32), "y": np.zeros(1, np.int32)},
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(
            batch["y"], logits
        ),
        train_kwargs={"is_training": True},
        eval_kwargs={"is_training": False},
    )


def main() -> None:
    """Train the workload, write the seconds of each round and the accuracy."""
    w, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    # XLA makes as many threads as there are cores for it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: w["threads"]])
    shape = (*w["shape"][1:], w["shape"][0])
    x, y = channels_last(drawn(w["clients"] * w["samples"], tuple(w["shape"]), w["classes"]))
    federation = fedjax.InMemoryFederatedData(
        {
            client: {"x": x[at : at + w["samples"]], "y": y[at : at + w["samples"]]}
            for client, at in enumerate(range(0, len(x), w["samples"]))
        }
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(federation, w["cohort"], seed=0)
    net = model(shape, w["name"], w["classes"])
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
    x, y = channels_last(tested(tuple(w["shape"]), w["classes"]))
    logits = net.apply_for_eval(state.params, {"x": x, "y": y})
    accuracy = float((np.asarray(logits).argmax(1) == y).mean())
    out.write_text(json.dumps({"seconds": seconds, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
