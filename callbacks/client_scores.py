"""Scores of the models of clients, which are trained on a copy of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor

from lightning_fl.callbacks.checkpoint import save_with_sums
from lightning_fl.callbacks.federated_loop import FederatedLoop
from lightning_fl.contracts.personal import PersonalModel
from lightning_fl.contracts.step_module import StepModule
from lightning_fl.contracts.update import ServerState
from lightning_fl.errors import FederationError
from lightning_fl.federation.measures import evaluate, on_device
from lightning_fl.functional.randomness import RandomStream, derive_seed, generator, seeded_rng
from lightning_fl.hooks import call_hook
from lightning_fl.runners import SequentialRunner, optimizers_in
from lightning_fl.runners.local_step import LocalStep
from lightning_fl.runners.module_copy import copied_module
from lightning_fl.runners.optimizer import params_of
from lightning_fl.runners.tensors import ModuleTensors


class ClientScores:
    """Train and score the models of clients; the module of the run stays unchanged.

    Args:
        trainer: The Trainer of the fit.
        loop: Its loop.
        metric: Function of module and batch that returns one score per sample.
        lr: Learning rate of local training; None uses that of the policy, or of the optimizer.

    Raises:
        FederationError: If the optimizer of a copy has parameters of another module.
    """

    def __init__(
        self,
        trainer: Trainer,
        loop: FederatedLoop,
        metric: Callable[[LightningModule, Any], Tensor],
        lr: float | None,
    ) -> None:
        self._trainer, self._loop, self._metric, self._lr = trainer, loop, metric, lr
        #: Folder for the models of clients; None writes none.
        self.folder: Path | None = None
        self._data: Any = trainer.datamodule  # type: ignore[attr-defined]
        original, constants = loop.runner.module, loop.runner.constants.parameters
        self._module: Any = copied_module(original, constants.values())
        optimizers = list(optimizers_in(self._module.configure_optimizers()))
        known = {id(param) for param in self._module.parameters()}
        if any(id(p) not in known for optimizer in optimizers for p in params_of(optimizer)):
            raise FederationError(
                f"PersonalizedEvaluation trains a copy of {type(original).__name__}, but its"
                " optimizer has parameters of another module: use self.parameters() in"
                " configure_optimizers"
            )
        for group in (group for each in optimizers for group in each.param_groups):
            if "initial_lr" in group:  # a scheduler has set the rate of its first step
                group["lr"] = group["initial_lr"]
        tensors = ModuleTensors(self._module, constants, loop.runner.private)
        options = loop.options.buffer_policy, optimizers, loop.runner.keep_optimizer
        self._runner = SequentialRunner(tensors, *options)
        self._step = LocalStep(self._module, constants)
        self._server = loop.runner.read()
        self._parts = [*self._data.parts, *self._data.unseen_parts]
        #: Round whose hyperparameters clients train with: after the last one, those of the last.
        self._next_round = loop.round - (loop.round == trainer.max_epochs)
        loop.aggregator.start(self._server.vector)  # clients start from those of the next round

    def row(
        self, client: int, round: int, steps: int, local_steps: int, first: Tensor | None
    ) -> dict[str, float]:
        """Return the scores of a client by kind of model; see `PersonalizedEvaluation`.

        Args:
            client: The client.
            round: Number of the round.
            steps: Number of local steps of ``personal``; 0 omits it.
            local_steps: Number of local steps of ``local``; 0 omits it.
            first: Initial global model, from which ``local`` starts.
        """
        rows = self._loop.fit.memory.of_runner(client)
        is_unseen = client >= len(self._data.parts)
        models = self._server.vector[None]
        if not is_unseen:
            models = self._loop.aggregator.models_for(torch.tensor([client]))
        state = ServerState(models, self._server.counters)
        plan = self._loop.policy.drawn(self._next_round, torch.tensor([client]))
        if "class_counts" in self._runner.declared.values:
            counts = self._data.split.class_counts([self._parts[client]])
            plan = {**plan, "class_counts": counts}
        row: dict[str, float] = {
            "client": client,
            "round": round,
            "train_samples": len(self._parts[client]),
            "test_samples": len(self._data.local_tests[client]),
        }
        if is_unseen:
            row["unseen"] = 1
        has_own = any(name.startswith(("parameter.", "buffer.")) for name in rows)
        if has_own or not torch.equal(state.vector[0], self._server.vector):
            self._load(self._server._replace(vector=self._server.vector[None]), {}, plan)
            row["global"] = self._score(client)
        self._load(state, rows, plan)
        if not rows and isinstance(self._module, StepModule):
            self._module._adapt(self._samples(client))
        row["server"] = self._score(client)
        own = self._own_start(client, state.vector)
        if own is not None:
            self._load(state._replace(vector=own), rows, plan)
        if self._personalize(client) or own is not None:
            row["kept"] = self._score(client)
            self._save(client)
            self._load(state, rows, plan)
        if steps:
            self._train(islice(self._batches(client, round), steps))
            row["personal"] = self._trained_score(client)
        if "kept" not in row:
            self._save(client)
        if local_steps and first is not None:
            self._train_alone(first, plan, client, round, local_steps)
            row["local"] = self._trained_score(client)
        return row

    def _save(self, client: int) -> None:
        """Write the model in the copy if there is a folder for it."""
        if self.folder is not None:
            own = self._module.state_dict()  # with tensors of terms, which a module does not save
            names = self._loop.runner.module.state_dict()
            save_with_sums({name: own[name] for name in names}, self.folder / f"{client}.pt")

    def _train_alone(
        self, first: Tensor, plan: Mapping[str, Tensor], client: int, round: int, steps: int
    ) -> None:
        """Train the initial global model on one client only, with one local epoch per round."""
        state, rows = ServerState(first[None], self._server.counters), dict[str, Tensor]()
        batches, epoch = self._batches(client, round), self._data.batches_of(client)
        for done in range(0, steps, epoch):
            self._load(state, rows, plan)
            self._train(islice(batches, min(epoch, steps - done)))
            state = ServerState(self._runner.vector.read()[None], self._runner.counters.read())
            rows = {name: kept.detach().clone() for name, kept in self._runner.rows()[0].items()}

    def _load(
        self, state: ServerState, rows: Mapping[str, Tensor], plan: Mapping[str, Tensor]
    ) -> None:
        """Load the state of a client at the start of a round."""
        self._runner.load(state, [rows], [self._rate(plan)])
        self._runner.set_hyperparameters(plan)
        call_hook(self._module, "on_client_start")

    def _rate(self, plan: Mapping[str, Tensor]) -> float:
        """Return the learning rate of a client."""
        if self._lr is not None:
            return self._lr
        return float(plan.get("lr", self._runner.base_lr)) * float(plan.get("lr_factor", 1.0))

    def _trained_score(self, client: int) -> float:
        """Return the score of a client's model after training, including its personal state."""
        # Mixtures load the weights that they learned from the samples.
        call_hook(self._module, "on_client_start")
        self._personalize(client)
        return self._score(client)

    def _own_start(self, client: int, received: Tensor) -> Tensor | None:
        """Return the model that a client makes of the received one, ``[1, P]``; None if none."""
        fit = self._loop.fit
        memories = fit.memory.of_parts(torch.tensor([client]))
        for part, memory in zip(fit.parts, memories, strict=True):
            made = part.personal_models(fit.federation, received, memory)
            if made is not None:
                return made
        return None

    def _personalize(self, client: int) -> bool:
        """Load the personal model of the method; return whether there is one."""
        seed = derive_seed(0, RandomStream.PERSONAL, client)
        for owner in (self._module, *self._runner.optimizers):
            if isinstance(owner, PersonalModel):
                with seeded_rng(seed, self._module.device):
                    if owner.federated_personalize(self._samples(client)):
                        return True
        return False

    def _samples(self, client: int) -> Iterator[Any]:
        """Yield all training samples of a client in batches."""
        for batch in self._data.samples_of(client):
            yield on_device(self._trainer, batch, is_training=True)

    def _score(self, client: int) -> float:
        """Return the mean score of the test samples of a client."""
        seed = derive_seed(0, RandomStream.PERSONAL, client)
        samples = self._data.samples_of(client, test=True)
        scores = evaluate(self._trainer, self._module, samples, self._metric, seed)
        return float(torch.cat([part.double() for part in scores]).mean())

    def _batches(self, client: int, round: int) -> Iterator[tuple[int, Any]]:
        """Yield an infinite stream of a client's batches, each with the seed of its step."""
        seed = derive_seed(self._loop.run_seed, RandomStream.PERSONAL, round, client)
        batches = self._data.steps_of(client, generator(seed, RandomStream.PERSONAL))
        for step, batch in enumerate(batches):
            yield derive_seed(seed, step), batch

    def _train(self, batches: Iterable[tuple[int, Any]]) -> None:
        """Run local steps in the modes of the run, and the hook at their end, as in a round."""
        with torch.enable_grad():
            for step, (seed, batch) in enumerate(batches):
                with seeded_rng(seed, self._module.device):
                    moved = on_device(self._trainer, batch, is_training=True)
                    self._runner.optimizer.step(partial(self._loss, moved, step))
        call_hook(self._module, "on_client_end")

    def _loss(self, batch: Any, step: int) -> float:
        """Compute the loss and its clipped gradients."""
        trainer = self._trainer
        self._runner.optimizer.zero_grad()
        self._step.batch_idx = step
        with trainer.precision_plugin.train_step_context():
            out: Any = self._step(batch)
        loss: Tensor | None = out.get("loss") if isinstance(out, Mapping) else out
        if loss is None:  # the module skips the step
            return 0.0
        loss.backward()
        trainer.precision_plugin.clip_gradients(
            self._runner.optimizer,
            trainer.gradient_clip_val or 0,
            trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM,
        )
        return float(loss.detach())
