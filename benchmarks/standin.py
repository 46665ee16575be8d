"""A device to run `make gpu` on without an accelerator: ``--plugins=benchmarks.standin``.

It is the PrivateUse1 device of `amp_fuzz.backends.privateuse1` in this process, under its own name,
with the policies of CUDA and the kernels of the CPU.
"""

from amp_fuzz.backends import privateuse1

DEVICE = privateuse1.install("cuda")
