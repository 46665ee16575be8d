"""torchax, PyTorch's ops on JAX, as programs of cases see it.

`compat` imports it on a torch that it does not know yet; `bridge` is what stands between the CPU
tensors of a plan and the arrays of a program. torchax names PrivateUse1 ``jax`` for good, so both
belong into a process of its own: `amp_fuzz.backends.torchax.backend`.
"""
