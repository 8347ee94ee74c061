"""Policies: what answers an episode's messages. `base` has the interface, each sibling one way to get an answer."""

from relax_server.rollout.policy.base import Policies, Policy
from relax_server.rollout.policy.examples import ExamplePolicies
from relax_server.rollout.policy.messages import MessagePolicies
from relax_server.rollout.policy.tokens import EnginePolicies

__all__ = ["EnginePolicies", "ExamplePolicies", "MessagePolicies", "Policies", "Policy"]
