"""Programs on XLA through JAX: recorded as ATen calls with their casts, lowered call by call.

`recording` needs only torch. `replay` and the table of lowerings import JAX: import them only in
the JAX process.
"""
