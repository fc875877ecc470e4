"""What a client minimises."""

from lightning_fl.objectives.client_module import ClientModule
from lightning_fl.objectives.proximal import Proximal
from lightning_fl.objectives.terms import Side, Term

__all__ = ["ClientModule", "Proximal", "Side", "Term"]
