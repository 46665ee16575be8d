"""What a policy costs: the digits that each op loses, lowered or kept in float32."""

from amp_fuzz.interfaces.policy_costs.calls import costs_of_callable, costs_of_draws
from amp_fuzz.interfaces.policy_costs.tally import Costs

__all__ = ["Costs", "costs_of_callable", "costs_of_draws"]
