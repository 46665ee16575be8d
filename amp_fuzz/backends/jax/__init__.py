"""Programs on XLA by JAX: recorded as ATen calls with their casts, lowered call by call.

`recording` needs torch only. `replay` and the table of lowerings import JAX: import them in a
process that is to have it.
"""
