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
from pathlib import Path

import fedjax
import haiku as hk
import jax
import numpy as np
from networks_haiku import channels_last, layers
from samples import drawn, tested


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
