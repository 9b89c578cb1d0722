"""Neural networks: encoders, recurrent cores, action heads and their composition."""

from agents.networks.network import ActorCriticModule as ActorCriticModule
from agents.networks.network import ActorCriticOutput as ActorCriticOutput
from agents.networks.network import Composed as Composed
from agents.networks.network import Network as Network
from agents.networks.network import Torso as Torso
from agents.networks.network import actor_critic as actor_critic
from agents.networks.network import unroll_after as unroll_after
from agents.networks.network import unroll_in_parts as unroll_in_parts
from agents.networks.network import zero_timestep as zero_timestep
from agents.networks.q_values import q_network as q_network
