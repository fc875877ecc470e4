"""Runners, which train clients one after another or many at once.

Where a rule is found:

- Runners: ``base``, and its two forms ``sequential`` and ``vmap``. ``module`` is the wrapper that
  Lightning gets for clients at once.
- Tensors of clients: ``tensors`` (of a module), ``stacks`` (of many clients), ``constants`` (shared
  by all), ``local_tensors`` (that stay with a client), ``phases`` (which are trained when),
  ``spectral_norm`` (vectors that have no mean), ``hyperparameters`` (numbers of a policy),
  ``module_copy`` (for evaluation and checks).
- A local step: ``local_step`` (of one client or of many), ``vectorized`` (of all clients, until the
  backward pass), ``graphs`` and ``side_by_side`` (compiled), ``samples`` (what goes in), ``logs``
  (what is logged).
- How clients at once train: ``groups`` (how many), ``tuning`` (at once or not, compiled or not);
  on a CPU also ``rewrites`` (of graphs), ``matmul`` and ``memory`` (settings of the process).
- What clients at once must not do: ``step_checks`` (which check precedes which step), ``check``
  (that ``vmap`` gives the module's own results), ``watch`` (which tensors a step reads and writes),
  ``step_hooks`` (hooks of a step).
- What a client must not leave to the next: ``self_check`` (one client after another), ``carried``
  (clients at once), ``later_rounds`` (when to compare again), ``attributes`` (what is compared).
- Optimizers: ``optimizer_state`` and ``optimizer_values`` (what they learn), ``fresh`` (that a
  client begins without it), ``separable`` (that clients at once do not share it),
  ``optimizer_trial`` (steps of small copies, for both checks).
"""

from lightning_fl.runners.base import BufferPolicy, ClientRunner
from lightning_fl.runners.hyperparameters import Declared
from lightning_fl.runners.module import VectorizedClients, client_runner, user_module
from lightning_fl.runners.optimizer_values import optimizers_in
from lightning_fl.runners.phases import Phase
from lightning_fl.runners.sequential import SequentialRunner
from lightning_fl.runners.tensors import TensorList, flat

__all__ = [
    "BufferPolicy",
    "ClientRunner",
    "Declared",
    "Phase",
    "SequentialRunner",
    "TensorList",
    "VectorizedClients",
    "client_runner",
    "flat",
    "optimizers_in",
    "user_module",
]
