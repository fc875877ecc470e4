"""Seconds per round and accuracy of DrJAX: federated averaging of its building blocks, jitted.

The clients are shared out to a CPU device per thread. MLPs only: DrJAX trains clients by vmap, and
two rounds of W3 with a single step each did not end within 400 s on two busy cores.

Its environment, then a run:

    benchmarks/peers/install.sh drjax
    .peers/drjax/bin/python benchmarks/peers/run_drjax.py '<json>' OUT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import drjax
import haiku as hk
import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from networks_haiku import channels_last, layers
from samples import drawn, tested


def batches(random: np.random.Generator, w: dict) -> np.ndarray:
    """Indices ``[cohort, steps, batch_size]`` into a client's samples, shuffled for each pass."""
    passes = -(-w["steps"] * w["batch_size"] // w["samples"])
    order = np.tile(np.arange(w["samples"], dtype=np.int32), (w["cohort"], passes, 1))
    order = random.permuted(order, axis=2).reshape(w["cohort"], -1)
    return order[:, : w["steps"] * w["batch_size"]].reshape(w["cohort"], w["steps"], -1)


def federated_averaging(net: Callable, w: dict) -> Callable:
    """A round: ``(params, x, y, index, keys) -> params``; all but ``params`` are by client."""
    optimizer = optax.sgd(w["lr"])

    def loss(params: dict, key: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = net(params, key, x, is_training=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def train(params: dict, x: jax.Array, y: jax.Array, index: jax.Array, key: jax.Array) -> dict:
        def step(state: tuple, batch: tuple) -> tuple:
            params, optimizer_state = state
            at, key = batch
            gradients = jax.grad(loss)(params, key, x[at], y[at])
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
            return (optax.apply_updates(params, updates), optimizer_state), None

        keys = jax.random.split(key, w["steps"])
        (trained, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), (index, keys))
        return jax.tree.map(lambda new, old: new - old, trained, params)

    @jax.jit
    @drjax.program(clients=w["cohort"])
    def one_round(params: dict, *data: jax.Array) -> dict:
        updates = drjax.map_fn(train, (drjax.broadcast(params), *data))
        return optax.apply_updates(params, drjax.reduce_mean(updates))

    return one_round


def main() -> None:
    """Train the workload, write the seconds of each round and the accuracy."""
    w, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    if len(w["shape"]) > 1:
        raise ValueError("DrJAX trains its clients by vmap: convolutions take too long on a CPU")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: w["threads"]])
    jax.config.update("jax_num_cpu_devices", w["threads"])
    # Every device has as many clients of the cohort.
    devices = max(d for d in range(1, w["threads"] + 1) if w["cohort"] % d == 0)
    mesh = jax.make_mesh((devices,), ("clients",), (AxisType.Auto,))
    by_client = NamedSharding(mesh, PartitionSpec("clients"))
    shape = (*w["shape"][1:], w["shape"][0])
    x, y = channels_last(drawn(w["clients"] * w["samples"], tuple(w["shape"]), w["classes"]))
    x, y = (each.reshape(w["clients"], w["samples"], *each.shape[1:]) for each in (x, y))
    net = hk.transform(
        lambda x, is_training: hk.Sequential(layers(shape, w["name"], w["classes"], is_training))(x)
    )
    random, key = np.random.default_rng(0), jax.random.key(0)
    with jax.set_mesh(mesh):
        params = jax.device_put(
            net.init(key, x[0, :1], is_training=True), NamedSharding(mesh, PartitionSpec())
        )
        one_round = federated_averaging(net.apply, w)
        seconds, start = [], time.perf_counter()
        for number in range(w["rounds"]):
            cohort = random.choice(w["clients"], w["cohort"], replace=False)
            keys = jax.random.split(jax.random.fold_in(key, number), w["cohort"])
            data = jax.device_put((x[cohort], y[cohort], batches(random, w), keys), by_client)
            params = jax.block_until_ready(one_round(params, *data))
            end = time.perf_counter()
            seconds.append(end - start)
            start = end
    x, y = channels_last(tested(tuple(w["shape"]), w["classes"]))
    logits = net.apply(jax.device_get(params), None, x, is_training=False)
    accuracy = float((np.asarray(logits).argmax(1) == y).mean())
    out.write_text(json.dumps({"seconds": seconds, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
