"""torchax: PyTorch's ops on JAX.

`compat` imports it on a newer torch than it knows. `bridge` connects the CPU tensors of a plan with
the arrays of a program. torchax renames PrivateUse1 to ``jax`` permanently, so both belong in a
separate process: `amp_fuzz.backends.torchax.backend`.
"""
