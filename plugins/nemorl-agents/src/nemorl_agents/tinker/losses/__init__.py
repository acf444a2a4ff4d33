"""The losses of the Tinker API, each a plain sum over a client's target tokens: ``loss_named`` finds one.

``client_loss``: what they have in common; ``ratio_loss``: what those that compare with the sampler have; one file for
each loss; ``named``: their names and settings.
"""

from nemorl_agents.tinker.losses.client_loss import ClientLoss, Number
from nemorl_agents.tinker.losses.named import LOSSES, loss_named

__all__ = ["LOSSES", "ClientLoss", "Number", "loss_named"]
