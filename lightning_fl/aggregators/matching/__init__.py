"""Rules that match the neurons of clients: PFNM, StreamingPFNM and FedMA.

``NeuronMatching`` is their base class. The mathematics of the neurons of a layer is in
``functional/neuron_matching.py``, of whole networks in ``functional/networks.py``.
"""

from lightning_fl.aggregators.matching.fedma import FedMA
from lightning_fl.aggregators.matching.layer_stack import LayerStack
from lightning_fl.aggregators.matching.neuron_matching import NeuronMatching
from lightning_fl.aggregators.matching.pfnm import PFNM
from lightning_fl.aggregators.matching.pfnm_streaming import StreamingPFNM

__all__ = ["PFNM", "FedMA", "LayerStack", "NeuronMatching", "StreamingPFNM"]
